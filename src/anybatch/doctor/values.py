"""What is known of the tensors of one forward: which parameters they depend on, and where autograd lost these."""

import weakref
from collections import UserDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from anybatch.doctor.sites import NOWHERE, Site


def entries_of(value: Any) -> list[tuple[Any, Any]]:
    """The keys or positions of a list, tuple, dictionary or ``UserDict`` with its entries; empty for anything else.

    The user's subclass of one may run code when it is read, such as a random augmentation, so its entries are taken as
    they are stored.
    """
    if isinstance(value, dict):
        return list(dict.items(value))
    if isinstance(value, list):
        return list(enumerate(list.__iter__(value)))
    if isinstance(value, tuple):
        return list(enumerate(tuple.__iter__(value)))
    if isinstance(value, UserDict):
        return entries_of(vars(value).get("data"))
    return []


class Event(NamedTuple):
    """An operation whose result lacks the graph of some of its inputs."""

    op: str  # its name, or that of the mode or function which caused it
    site: Site  # where
    bits: int  # of the parameters that were lost
    after: str  # what made the tensor that still had a graph
    inside: str = ""  # the ``autograd.Function`` whose forward was running, if it is the cause
    again: bool = False  # whether it was seen while a checkpoint was gone through again
    note: str = ""  # a sentence more
    context: Any = None  # of that function, which is its node if it has one
    # positions of the events on the way to it: without it, these would not end the graph of what it made
    behind: frozenset[int] = frozenset()


class Summand(NamedTuple):
    """A summand of a sum of scalars."""

    value: Any  # a copy, or a number
    live: int  # bits of the parameters in its graph
    params: int  # bits of all that are in its value
    cuts: frozenset[int]  # positions of the events
    op: str  # what made it
    site: Site  # where
    has_graph: bool  # whether it requires a gradient


@dataclass(slots=True)
class Value:
    """What is known of one tensor."""

    params: int = 0  # bits of the parameters that its value depends on
    cuts: frozenset[int] = frozenset()  # positions of the events on the way from them
    op: str = ""  # what made it
    site: Site = NOWHERE  # where
    terms: tuple[Summand, ...] = ()  # if it is a sum of scalars


NOTHING = Value()


@dataclass(slots=True)
class Values:
    """The values of tensors, as long as these live."""

    _known: dict[int, tuple[weakref.ref[torch.Tensor], Value]] = field(default_factory=dict)
    _memory: dict[int, Value] = field(default_factory=dict)  # by address, for parameters, whose making is not seen

    def of(self, tensor: torch.Tensor) -> Value:
        """What is known of a tensor; for a view, what was written to its base is included."""
        entry = self._known.get(id(tensor))
        value = entry[1] if entry is not None and entry[0]() is tensor else NOTHING
        base = tensor._base
        if base is not None and (of_base := self.of(base)) is not value and of_base.params:
            return joined((value, of_base), value.op or of_base.op, value.site)
        return value

    def by_memory(self, parameter: torch.Tensor) -> Value:
        """What is known of a parameter made from a tensor, found by its address, since its creation is not observed."""
        return self._memory.get(address(parameter), NOTHING)

    def put(self, tensor: torch.Tensor, value: Value) -> None:
        """Stores what is known of a tensor."""
        known, key = self._known, id(tensor)

        def forget(reference: Any) -> None:
            if (entry := known.get(key)) is not None and entry[0] is reference:
                del known[key]

        known[key] = (weakref.ref(tensor, forget), value)
        if value.params and (place := address(tensor)):
            self._memory[place] = value

    def wrote(self, tensor: torch.Tensor, value: Value) -> None:
        """Stores the value of a tensor that was written to, and adds it to that of its base."""
        self.put(tensor, value)
        if tensor._base is not None:
            self.put(tensor._base, joined((self.of(tensor._base), value), value.op, value.site))


def joined(values: Iterable[Value], op: str, site: Site) -> Value:
    """The value of a result made from several others."""
    params, cuts = 0, frozenset[int]()
    for value in values:
        params |= value.params
        if value.cuts and not value.cuts <= cuts:
            cuts |= value.cuts
    return Value(params, cuts, op, site)


def address(tensor: torch.Tensor) -> int:
    """The address of a tensor, 0 if it has no memory of its own."""
    try:
        return tensor.data_ptr()
    except (RuntimeError, NotImplementedError):  # fakes, sparse tensors, wrappers
        return 0


def storage_of(tensor: torch.Tensor) -> int:
    """The address of the storage of a tensor, 0 if it has none."""
    try:
        return 0 if tensor.is_meta else tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):  # sparse tensors, wrappers
        return 0


def tensors_in(*values: Any) -> Iterator[torch.Tensor]:
    """The tensors in the arguments or the result of an operation."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        else:
            yield from tensors_in(*[entry for _, entry in entries_of(value)])


@dataclass(slots=True)
class Departure:
    """Numbers taken out of a tensor, as by ``.item()``."""

    op: str  # what took them out
    number: Any  # the number, list or array
    value: Value  # what was known of the tensor
    bits: int  # of the parameters in it
    source: Any = None  # the tensor, held where the numbers share its memory


def returning(number: Any, departures: list[Departure], *, constructor: bool) -> Iterator[Departure]:
    """Departures whose numbers are used again, recognised by equality; floats with few digits don't count."""
    for departure in reversed(departures):
        if _same(number, departure.number, constructor=constructor):
            yield departure
            return
    if isinstance(number, (list, tuple)) and len(number) <= 4096:
        for item in number:
            if not isinstance(item, torch.Tensor):
                yield from returning(item, departures, constructor=constructor)


def sharing(tensor: torch.Tensor, departures: list[Departure]) -> Departure | None:
    """The departure whose array shares the memory of a tensor, as after ``torch.from_numpy``; ``None`` if none does."""
    found = address(tensor)
    return next((d for d in departures if d.source is not None and address(d.source) == found != 0), None)


def _same(number: Any, left: Any, *, constructor: bool) -> bool:
    if isinstance(number, bool) or isinstance(left, bool):
        return False
    if isinstance(number, float):
        return isinstance(left, float) and number == left and round(number, 3) != number
    if not constructor or type(number) is not type(left):
        return False
    if hasattr(number, "__array_interface__"):
        same = number.shape == left.shape and number.dtype == left.dtype
        return bool(same and (number is left or (number == left).all()))
    return isinstance(number, (int, list)) and bool(number == left)
