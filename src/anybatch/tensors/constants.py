"""Fake tensors that are constants of the program, such as a cached mask, and can be made real after a trace.

A traced step may cache fake tensors, which its next real run would find. Those that were computed from shapes and
Python numbers alone, and not from weights, samples or random numbers, are replaced by what a real run would have
cached.
"""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from anybatch.batch.trees import map_leaves

NAME = "anybatch_constant"


class _Place:
    """A tensor in the log: its number and that of its storage."""

    __slots__ = ("number", "storage")

    def __init__(self, number: int, storage: int) -> None:
        self.number = number
        self.storage = storage


class _Operation(NamedTuple):
    func: Any
    args: Any
    kwargs: Any
    made: tuple[_Place, ...]
    read: frozenset[int]
    changed: frozenset[int]


class Constants:
    """A log of the operations on constants.

    Attributes:
        is_off: set while fake tensors are made for real ones, which are no constants.
    """

    def __init__(self) -> None:
        self.is_off = False
        self._operations: list[_Operation] = []
        self._spoiled: set[int] = set()  # storages that something else than a constant was written to
        self._numbers = itertools.count()

    def note(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any, fake: Any) -> None:
        """Logs an operation if all its arguments are constants."""
        if self.is_off:
            return
        given = [one for one in tensors_in((args, tuple(kwargs.values()))) if type(one) is fake]
        known = [place for one in given if (place := vars(one).get(NAME)) is not None]
        if given and not known:
            return
        written = _written(func, args)
        changed = {place.storage for one in written if (place := vars(one).get(NAME)) is not None}
        if len(known) < len(given) or torch.Tag.nondeterministic_seeded in func.tags:
            self._spoiled |= changed
            return
        by_storage = {one.untyped_storage()._cdata: vars(one)[NAME].storage for one in given}
        made = []
        for one in tensors_in((result,)):
            if type(one) is fake and one.layout is torch.strided:
                storage = by_storage.get(one.untyped_storage()._cdata)
                number = next(self._numbers)
                place = vars(one).get(NAME) or _Place(number, number if storage is None else storage)
                vars(one)[NAME] = place
                made.append(place)
        if made or changed:
            own_args, own_kwargs = map_leaves(
                lambda leaf: vars(leaf)[NAME] if type(leaf) is fake else _kept(func, leaf), [args, dict(kwargs)]
            )
            read = frozenset(place.storage for place in known)
            changed |= {place.storage for place in made}
            self._operations.append(_Operation(func, own_args, own_kwargs, tuple(made), read, frozenset(changed)))

    def made_real(self, fakes: Iterable[torch.Tensor]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Pairs of a fake tensor and its real value, for those that are constants."""
        found = [one for one in fakes if vars(one).get(NAME) is not None]
        needed: set[int] = set()
        chosen = []
        for one in found:
            wanted = self._needed(vars(one)[NAME].storage)
            if wanted is not None:
                needed |= wanted
                chosen.append(one)
        real: dict[int, torch.Tensor] = {}
        for index in sorted(needed):
            operation = self._operations[index]
            args, kwargs = map_leaves(
                lambda leaf: real[leaf.number] if type(leaf) is _Place else leaf, [operation.args, operation.kwargs]
            )
            result = tensors_in((operation.func(*args, **kwargs),))
            real.update((place.number, one) for place, one in zip(operation.made, result, strict=True))
        return [(one, real[vars(one)[NAME].number]) for one in chosen]

    def _needed(self, storage: int) -> set[int] | None:
        """Indices of the operations that made a storage's content; ``None`` if it is not constant."""
        storages, found = {storage}, set()
        for index in reversed(range(len(self._operations))):
            if self._operations[index].changed & storages:
                storages |= self._operations[index].read
                found.add(index)
        return None if storages & self._spoiled else found


def tensors_in(values: Iterable[Any]) -> list[Any]:
    """The tensors among some values, nested lists and tuples included."""
    found = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found += tensors_in(value)
    return found


def _written(func: Any, args: Sequence[Any]) -> list[Any]:
    """The fake tensors that an operation writes to."""
    if not func._schema.is_mutable:
        return []
    pairs = zip(args, func._schema.arguments, strict=False)
    return tensors_in([value for value, one in pairs if one.alias_info is not None and one.alias_info.is_write])


def _kept(func: Any, leaf: Any) -> Any:
    """An argument as it is logged; the tensor in ``lift`` is reused by the caller, and has to be copied."""
    if isinstance(leaf, torch.Tensor) and "lift" in func.overloadpacket.__name__:
        return leaf.clone()
    return leaf
