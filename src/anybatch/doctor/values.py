"""What is known of the tensors of one forward: whose values are in them, and where autograd lost sight of those."""

import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from anybatch.doctor.containers import entries_of
from anybatch.doctor.sites import NOWHERE, Site


class Event(NamedTuple):
    """An operation whose result is without the graph of some of what went in."""

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
    """A part of a sum."""

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
    """Values by tensor, as long as the tensors live."""

    _known: dict[int, tuple[weakref.ref[torch.Tensor], Value]] = field(default_factory=dict)
    _memory: dict[int, Value] = field(default_factory=dict)  # by address, for parameters, whose making is not seen

    def of(self, tensor: torch.Tensor) -> Value:
        """What is known of a tensor; a view also has what was written to the tensor that it is a view of."""
        entry = self._known.get(id(tensor))
        value = entry[1] if entry is not None and entry[0]() is tensor else NOTHING
        base = tensor._base
        if base is not None and (of_base := self.of(base)) is not value and of_base.params:
            return joined((value, of_base), value.op or of_base.op, value.site)
        return value

    def by_memory(self, parameter: torch.Tensor) -> Value:
        """What is known of a parameter that was made of a tensor, which is not seen."""
        return self._memory.get(address(parameter), NOTHING)

    def put(self, tensor: torch.Tensor, value: Value) -> None:
        """Notes what is known of a tensor."""
        known, key = self._known, id(tensor)

        def forget(reference: Any) -> None:
            if (entry := known.get(key)) is not None and entry[0] is reference:
                del known[key]

        known[key] = (weakref.ref(tensor, forget), value)
        if value.params and (place := address(tensor)):
            self._memory[place] = value

    def wrote(self, tensor: torch.Tensor, value: Value) -> None:
        """Notes that a tensor was written to, and with it the tensor that it is a view of."""
        self.put(tensor, value)
        if tensor._base is not None:
            self.put(tensor._base, joined((self.of(tensor._base), value), value.op, value.site))


def joined(values: Iterable[Value], op: str, site: Site) -> Value:
    """The value of what is made of several others."""
    params, cuts = 0, frozenset[int]()
    for value in values:
        params |= value.params
        if value.cuts and not value.cuts <= cuts:
            cuts |= value.cuts
    return Value(params, cuts, op, site)


def address(tensor: torch.Tensor) -> int:
    """Where a tensor lies in memory, 0 if it has none of its own."""
    try:
        return tensor.data_ptr()
    except (RuntimeError, NotImplementedError):  # fakes, sparse tensors, wrappers
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
    """Numbers that left the tensors, as ``.item()`` gives them."""

    op: str  # what took them out
    number: Any  # the number, list or array
    value: Value  # what was known of the tensor
    bits: int  # of the parameters in it
    source: Any = None  # the tensor, held where the numbers share its memory


def returning(number: Any, departures: list[Departure], *, constructor: bool) -> Iterator[Departure]:
    """Departures whose numbers come back; told by equality, so that only telling numbers count."""
    for departure in reversed(departures):
        if _same(number, departure.number, constructor=constructor):
            yield departure
            return
    if isinstance(number, (list, tuple)) and len(number) <= 4096:
        for item in number:
            if not isinstance(item, torch.Tensor):
                yield from returning(item, departures, constructor=constructor)


def sharing(tensor: torch.Tensor, departures: list[Departure]) -> Departure | None:
    """The array that a tensor shares its memory with, as ``torch.from_numpy`` makes it."""
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
