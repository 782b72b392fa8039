"""Operations in float64 whatever precision they ask for, and random draws that do not depend on the split.

``x.float()``, a mask in float32 or class weights in float32 would bring single precision into a float64 copy, or fail
there. And a split draws other random numbers than the whole batch, so that nothing could be compared. Both are dealt
with where operations are dispatched, below autograd.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from anybatch.checking.drawing import STAND_INS, Numbers, argument, draws
from anybatch.tensors.dispatch import Mode
from anybatch.tensors.graph import in_backward
from anybatch.tensors.randomness import generator_state

Wider = Mapping[torch.dtype, torch.dtype]
_WIDER: Wider = {
    torch.float32: torch.float64, torch.bfloat16: torch.float64, torch.float16: torch.float64,
    torch.complex64: torch.complex128, torch.complex32: torch.complex128,
}  # fmt: skip
SINGLE: Wider = {torch.bfloat16: torch.float32, torch.float16: torch.float32, torch.complex32: torch.complex64}
"""Low precision becomes single."""


class Draw(NamedTuple):
    """One place where random numbers are drawn.

    Args:
        operation: the name of the operation, such as ``bernoulli_``.
        where: the qualified name of the innermost module that was running.
    """

    operation: str
    where: str


class Substitution(Mode):
    """Replaces the precision and the random numbers of operations while it is entered.

    Args:
        promotes: whether operations run in float64.
        where: names the module that is running.

    Attributes:
        draws: the places where random numbers were drawn.
        lowered: operations that computed in lower precision although ``promotes``.
        numbers: what stands in for random numbers.
        drawn: where the generator stood at each draw; with a list here numbers are really drawn.
    """

    def __init__(self, *, promotes: bool, where: Callable[[], str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.draws: dict[Draw, None] = {}
        self.lowered: set[str] = set()
        self.numbers = Numbers()
        self.drawn: list[bytes] | None = None
        self._promotes = promotes
        self._where = where

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._promotes:
            args, kwargs = promoted(func, args, kwargs)
        if torch.Tag.nondeterministic_seeded in func.tags:
            return self._draw(func, args, kwargs)
        if self._promotes and func.overloadpacket.__name__ == "_grouped_mm":
            return _grouped_mm(*args, **kwargs)
        result = func(*args, **kwargs)
        if self._promotes and isinstance(result, torch.Tensor) and result.dtype in _WIDER:
            if not any(isinstance(arg, torch.Tensor) for arg in args):
                return result.to(_WIDER[result.dtype])  # a constant, in the default precision
            if any(isinstance(arg, torch.Tensor) and arg.dtype in _WIDER.values() for arg in args):
                self.lowered.add(func.overloadpacket.__name__)
        return result

    def _draw(self, func: Any, args: Any, kwargs: Any) -> Any:
        if not draws(func, args, kwargs):
            return func(*args, **kwargs)
        name = func.overloadpacket.__name__
        if not in_backward():
            self.draws[Draw(name, self._where())] = None
        if self.drawn is not None:
            if not in_backward():
                self.drawn.append(_state_before(func, args, kwargs))
            return func(*args, **kwargs)
        stand_in = STAND_INS.get(name)
        return func(*args, **kwargs) if stand_in is None else stand_in(self.numbers, func, args, kwargs)


def _state_before(func: Any, args: Any, kwargs: Any) -> bytes:
    """The state of the generator that an operation draws from."""
    generator = argument(func, args, kwargs, "generator")
    if generator is None:
        tensors = (value.device for value in args if isinstance(value, torch.Tensor))
        device = next(tensors, torch.device(kwargs.get("device") or "cpu"))
        return bytes(generator_state(device).tolist())
    return bytes(generator.get_state().tolist())


def promoted(func: Any, args: Any, kwargs: Any, wider: Wider = _WIDER) -> tuple[Any, Any]:
    """Raises the precision of arguments, but not of those that the result is a view of or that are written to.

    Args:
        func: the operation.
        args: its arguments.
        kwargs: those by name.
        wider: what each precision becomes.
    """
    if func.overloadpacket.__name__ != "lift_fresh":
        aliased = [argument.alias_info is not None for argument in func._schema.arguments]
        args = tuple(arg if alias else _raised(arg, wider) for arg, alias in zip(args, aliased, strict=False))
    else:
        args = tuple(_raised(arg, wider) for arg in args)
    kwargs = {name: value if name == "out" else _raised(value, wider) for name, value in kwargs.items()}
    return args, kwargs


def _raised(value: Any, wider: Wider) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(wider[value.dtype]) if value.dtype in wider else value
    if isinstance(value, torch.dtype):
        return wider.get(value, value)
    if type(value) in (list, tuple):
        return type(value)(_raised(item, wider) for item in value)
    return value


def _grouped_mm(a: torch.Tensor, b: torch.Tensor, offs: torch.Tensor | None = None, *_: Any, **__: Any) -> torch.Tensor:
    """The products of mixtures of experts, which torch does not have in float64: one product a group.

    Args:
        a: ``[rows, k]``, or ``[groups, rows, k]``.
        b: ``[groups, k, n]`` or ``[k, n]``; where both have two dimensions, ``k`` is what is grouped.
        offs: where each group ends in the dimension that is grouped; ``None`` if both have a dimension for it.

    Source: the documentation of ``torch.nn.functional.grouped_mm``.
    """
    if offs is None:
        return a @ b
    ends = [int(end) for end in offs.tolist()]
    groups = list(zip([0, *ends[:-1]], ends, strict=True))
    if a.dim() == 2 and b.dim() == 2:
        return torch.stack([a[:, start:end] @ b[start:end] for start, end in groups])
    if b.dim() == 3:
        found = a.new_zeros(a.size(0), b.size(-1))
        for group, (start, end) in enumerate(groups):
            found[start:end] = a[start:end] @ b[group]
    else:
        found = a.new_zeros(a.size(1), b.size(-1))
        for group, (start, end) in enumerate(groups):
            found[:, start:end] = a[group] @ b[:, start:end]
    return found
