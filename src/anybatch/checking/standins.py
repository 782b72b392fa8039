"""Operations in another precision than they ask for, and random draws that do not depend on the split.

``x.float()``, a mask in float32 or class weights in float32 would bring single precision into a float64 copy, or fail
there. And a split draws other random numbers than the whole batch, so that nothing could be compared. Both are dealt
with where operations are dispatched, below autograd.
"""

import copy
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, NamedTuple, TypeVar

import torch

from anybatch.batch.batches import Splittable
from anybatch.tensors.dispatch import Mode
from anybatch.tensors.graph import in_backward
from anybatch.tensors.randomness import generator_state

T = TypeVar("T")
Wider = Mapping[torch.dtype, torch.dtype]
DOUBLE: Wider = {
    torch.float32: torch.float64, torch.bfloat16: torch.float64, torch.float16: torch.float64,
    torch.complex64: torch.complex128, torch.complex32: torch.complex128,
}  # fmt: skip
"""Every precision becomes double."""
SINGLE: Wider = {torch.bfloat16: torch.float32, torch.float16: torch.float32, torch.complex32: torch.complex64}
"""Low precision becomes single."""

_SAME_TURNS = 1024  # draws with the same numbers, where they are held alike
_PLACE = 0.6  # where in its distribution the number is that stands for a whole tensor of them
# Fractional parts of square roots of primes: multiples of them spread evenly over (0, 1), whatever is added up.
_STEPS = (0.4142135623730951, 0.7320508075688772, 0.2360679774997898, 0.6457513110645906, 0.3166247903553998)


@dataclass
class Held:
    """What all numbers that stand in for random ones have in common."""

    alike: bool = False  # whether all draws have the same ones
    constant: bool = False  # whether one stands in for all of a draw, whatever sample it is of


class Numbers:
    """Numbers in (0, 1) that depend on the draw, the sample and the position in it, but not on the rest of the batch.

    Which dimension of a drawn tensor is that of the samples shows where its size differs from that of the same draw in
    the whole batch, which has to run first. Parts that draw more or less often than it are taken to draw for one sample
    after the other.
    """

    def __init__(self, held: "Held") -> None:
        self.held = held
        self._whole: list[tuple[int, ...]] = []
        self._rows = 0
        self._samples: Sequence[int] = ()
        self._drawn = 0
        self.is_uneven = False  # whether a part draws more or less often than the whole batch
        self.is_shared = False  # whether a part draws something of the shape that it has in the whole batch
        self._places_of: dict[tuple[int, ...], tuple[int, int]] = {}

    def begin(self, samples: Sequence[int], rows: int) -> None:
        """Begins a forward of some of the whole batch's samples."""
        self.is_uneven |= 0 < len(self._samples) < self._rows and self._drawn != len(self._whole)
        if len(samples) == rows:
            self._whole = []
        self._samples, self._rows, self._drawn, self._places_of = samples, rows, 0, {}

    def places(self, like: torch.Tensor) -> torch.Tensor:
        """Numbers for the next draw, which broadcast to its shape."""
        shape = tuple(like.shape)
        self._meet(shape)
        shift = self._turn() * _STEPS[-1] % 1
        if self.held.constant:
            return torch.full((), _PLACE + shift, device=like.device).frac_().clamp_(1e-6, 1 - 1e-6)
        total = torch.full((), shift, device=like.device)
        for dim, size in enumerate(shape):
            steps = torch.tensor(self._positions(shape, dim, size), dtype=torch.float64, device="cpu").add_(1)
            steps = (steps * _STEPS[dim % len(_STEPS)]).frac_().to(like.device, torch.float32)
            total = total + steps.view(-1, *[1] * (len(shape) - dim - 1))
        return total.frac_().clamp_(1e-6, 1 - 1e-6)

    def _turn(self) -> int:
        """Which draw of the whole batch the last one belongs to."""
        turn, many = self._drawn - 1, len(self._samples)
        if self.is_uneven and many:
            turn = turn // many * self._rows + self._samples[turn % many]
        return turn // _SAME_TURNS if self.held.alike else turn  # a loop may draw until a number pleases it

    def _meet(self, shape: tuple[int, ...]) -> None:
        """Compares the shape of a draw with that of the same draw in the whole batch."""
        if len(self._samples) == self._rows:
            self._whole.append(shape)
        elif self._drawn < len(self._whole) and len(self._whole[self._drawn]) == len(shape):
            self.is_shared |= shape == self._whole[self._drawn]
            for dim, (size, whole) in enumerate(zip(shape, self._whole[self._drawn], strict=True)):
                if size != whole and size * self._rows == whole * len(self._samples):
                    self._places_of[shape] = dim, whole // self._rows
                    break
        self._drawn += 1

    def _positions(self, shape: tuple[int, ...], dim: int, size: int) -> list[int] | range:
        own, times = self._places_of.get(shape, (-1, 1))
        if dim != own:
            return range(size)
        return [sample * times + position for sample in self._samples for position in range(times)]


class Draw(NamedTuple):
    """One place where random numbers are drawn."""

    operation: str  # the name of the operation, such as ``bernoulli_``
    where: str  # the qualified name of the innermost module that was running


class Drawn(NamedTuple):
    """One draw: where the generator stood, and the shape of what was drawn."""

    state: bytes
    shape: tuple[int, ...]


_RECURRENT = frozenset({"_cudnn_rnn", "_cudnn_rnn_backward", "miopen_rnn", "miopen_rnn_backward"})
"""Kernels that drop out between layers by themselves; no numbers can stand in for theirs, so they run without."""


class StandIns(Mode):
    """Replaces the precision and the random numbers of operations while it is entered.

    Args:
        wider: what each precision becomes; ``None`` to leave all.
        in_order: whether what is compared draws as often, so that each draw in turn has numbers of its own.
    """

    def __init__(
        self, wider: Wider | None = None, where: Callable[[], str] = lambda: "", *, in_order: bool = True
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.draws: dict[Draw, None] = {}  # the places where random numbers were drawn
        self.lowered: set[str] = set()  # operations that computed in lower precision than double although they were to
        self.held = Held(alike=not in_order)
        self.in_parts, self.in_collate, self.in_whole = (Numbers(self.held) for _ in range(3))
        # what stands in for random numbers now: in micro-batches, in ``collate``, in what sees all samples
        self.numbers = self.in_parts
        # the draws of each forward that began; with a list here numbers are really drawn
        self.drawn: list[list[Drawn]] | None = None
        self._wider, self._where = wider, where

    @property
    def repeats(self) -> bool:
        """Whether a second pass draws the same numbers: there are none, or all of them are one."""
        return not self.draws or (self.held.constant and self.held.alike)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        is_seeded, is_recurrent = _kind_of(func)
        if is_recurrent and self.drawn is None:
            args, kwargs = self._without_dropout(func, args, kwargs)
        if self._wider is None and not is_seeded:
            return func(*args, **kwargs)
        # In single precision a gradient has the precision of what it is of.
        if self._wider is DOUBLE or (self._wider and not (func is torch.ops.aten._to_copy.default and in_backward())):
            args, kwargs = _promoted(func, args, kwargs, self._wider)
        if is_seeded:
            return self._draw(func, args, kwargs)
        if self._wider is not DOUBLE:
            return func(*args, **kwargs)
        if func.overloadpacket.__name__ == "_grouped_mm":
            return _grouped_mm(*args, **kwargs)
        result = func(*args, **kwargs)
        if isinstance(result, torch.Tensor) and result.dtype in DOUBLE:
            if not any(isinstance(arg, torch.Tensor) for arg in args):
                return result.to(DOUBLE[result.dtype])  # a constant, in the default precision
            if any(isinstance(arg, torch.Tensor) and arg.dtype in DOUBLE.values() for arg in args):
                self.lowered.add(func.overloadpacket.__name__)
        return result

    def _without_dropout(self, func: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """The arguments of a recurrent kernel, with no dropout between its layers, and notes that there was some."""
        if draws(func, args, kwargs) and not in_backward():
            self.draws[Draw("dropout", self._where())] = None
        place = [argument.name for argument in func._schema.arguments].index("dropout")
        if place < len(args):
            return (*args[:place], 0.0, *args[place + 1 :]), kwargs
        return args, {**kwargs, "dropout": 0.0}

    @property
    def is_uneven(self) -> bool:
        """Whether parts draw more or less often than the whole batch."""
        return any(numbers.is_uneven for numbers in (self.in_parts, self.in_collate, self.in_whole))

    def _draw(self, func: Any, args: Any, kwargs: Any) -> Any:
        if not draws(func, args, kwargs):
            return func(*args, **kwargs)
        name = func.overloadpacket.__name__
        if not in_backward():
            self.draws[Draw(name, self._where())] = None
        if self.drawn is not None:
            return self._really(func, args, kwargs)
        stand_in = STAND_INS.get(name)
        if stand_in is None:
            return func(*args, **kwargs)
        return stand_in(self.numbers, partial(argument, func, args, kwargs), args, name)

    def _really(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Draws, and notes where the generator stood, if that moves it: what has no entries, or one order, does not."""
        before = _state_of(func, args, kwargs)
        result = func(*args, **kwargs)
        if self.drawn and not in_backward() and before != _state_of(func, args, kwargs):
            first = result[0] if isinstance(result, tuple) else result
            self.drawn[-1].append(Drawn(before, tuple(first.shape)))
        return result

    def repeated(self, *runs: Callable[[], T]) -> list[T] | None:
        """Runs the whole batch and its parts with numbers that are really drawn; gives what the runs gave.

        That is ``None`` where no two micro-batches draw the very same ones.
        """
        found: list[T] = []
        drawn: list[list[list[Drawn]]] = []
        try:
            for run in runs:
                self.drawn = []
                drawn.append(self.drawn)
                found.append(run())
        finally:
            self.drawn = None
        return found if repeats(*drawn) else None


def repeats(whole: Sequence[Sequence[Drawn]], parts: Sequence[Sequence[Drawn]]) -> bool:
    """Whether two micro-batches draw the very same numbers for their samples, since a generator is seeded anew.

    Numbers that are not of samples, such as a fixed projection, have the same shape in the whole batch.

    Example:
        >>> own, shared = Drawn(b"seed 3", (3, 2)), Drawn(b"seed 3", (2,))
        >>> repeats([[Drawn(b"seed 3", (6, 2))]], [[own], [own]]), repeats([[shared]], [[shared], [shared]])
        (True, False)
    """
    shapes = {one.shape for forward in whole for one in forward}
    states = [{one.state for one in forward if one.shape not in shapes} for forward in parts]
    return any(one & other for one, other in itertools.combinations(states, 2))


class Turns:
    """Tells numbers that stand in for random ones whose samples they belong to."""

    def __init__(self, stand_ins: StandIns | None, rows: int, parts: Sequence[Sequence[int]]) -> None:
        self._stand_ins, self._rows, self._parts = stand_ins, rows, parts
        self.turn = self._collated = 0

    def begin(self) -> None:
        """A micro-batch begins."""
        if self._stand_ins is not None:
            if self._stand_ins.drawn is not None:
                self._stand_ins.drawn.append([])
            self._stand_ins.numbers = self._stand_ins.in_parts
            self._stand_ins.numbers.begin(self._parts[self.turn % len(self._parts)], self._rows)
        self.turn += 1

    def begin_whole(self) -> None:
        """What sees all samples begins."""
        if self._stand_ins is not None:
            self._stand_ins.numbers = self._stand_ins.in_whole
            self._stand_ins.numbers.begin(range(self._rows), self._rows)

    def collated(self, splittable: Splittable) -> Splittable:
        """The samples, with a ``collate`` whose random numbers belong to them, too."""
        found, collate, stand_ins = copy.copy(splittable), splittable.collate, self._stand_ins
        if collate is None or stand_ins is None:
            return found

        def with_numbers(raw: list[Any]) -> Any:
            outside, stand_ins.numbers = stand_ins.numbers, stand_ins.in_collate
            stand_ins.numbers.begin(self._parts[self._collated % len(self._parts)], self._rows)
            self._collated += 1
            try:
                return collate(raw)
            finally:
                stand_ins.numbers = outside

        found.collate = with_numbers
        return found


def _state_of(func: Any, args: Any, kwargs: Any) -> bytes:
    """The state of the generator that an operation draws from."""
    generator = argument(func, args, kwargs, "generator")
    if generator is None:
        tensors = (value.device for value in args if isinstance(value, torch.Tensor))
        device = next(tensors, torch.device(kwargs.get("device") or "cpu"))
        return bytes(generator_state(device).tolist())
    return bytes(generator.get_state().tolist())


def argument(func: Any, args: Any, kwargs: Any, name: str, default: Any = None) -> Any:
    """An argument of an operation by its name."""
    if name in kwargs:
        return kwargs[name]
    for position, argument in enumerate(func._schema.arguments):
        if argument.name == name:
            return args[position] if position < len(args) else default
    return default


@lru_cache(maxsize=4096)  # tags are looked up slowly, for each operation of a run
def _kind_of(func: Any) -> tuple[bool, bool]:
    """Whether an operation draws random numbers, and whether it is a recurrent kernel that drops out by itself."""
    return torch.Tag.nondeterministic_seeded in func.tags, func.overloadpacket.__name__ in _RECURRENT


def draws(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether an operation draws; a fused kernel that can drop out by itself does only if it was asked to."""
    names = {argument.name for argument in func._schema.arguments} & {"dropout_p", "dropout"}
    rates = [argument(func, args, kwargs, name, 0.0) for name in names]
    return not names or (bool(argument(func, args, kwargs, "train", True)) and any(rate > 0 for rate in rates))


Given = Callable[..., Any]  # an argument of an operation by its name, and a default
StandIn = Callable[[Numbers, Given, Any, str], Any]  # is given the arguments and the name of the operation


def _new(given: Given, *, dtype: torch.dtype | None = None) -> torch.Tensor:
    """An empty tensor of the shape, precision and device that a factory was asked for."""
    chosen = {name: value for name in ("dtype", "device") if (value := given(name)) is not None}
    if isinstance(source := given("self"), torch.Tensor):
        return torch.empty_like(source, **chosen)
    size = given("size")
    return torch.empty(given("n") if size is None else size, **({"dtype": dtype} | chosen if dtype else chosen))


def _filled(numbers: Numbers, given: Given, args: Any, name: str) -> Any:
    """A tensor filled in place, or by a factory, with numbers of a distribution."""
    whole = torch.int64 if name.startswith("randint") else None
    tensor = args[0] if name.endswith("_") else _new(given, dtype=whole)
    return tensor.copy_(_DISTRIBUTIONS[name.removesuffix("_like")](numbers.places(tensor), given))


def _whole_numbers(places: torch.Tensor, low: float, high: float) -> torch.Tensor:
    return (low + places.double() * (high - low)).floor()


_DISTRIBUTIONS: dict[str, Callable[[torch.Tensor, Given], torch.Tensor]] = {
    "rand": lambda places, given: places,
    "randn": lambda places, given: torch.special.ndtri(places),
    "randint": lambda places, given: _whole_numbers(places, given("low", 0), given("high")),
    "random_": lambda places, given: _whole_numbers(places, given("from", 0), given("to") or 2),
    "uniform_": lambda places, given: given("from", 0.0) + places * (given("to", 1.0) - given("from", 0.0)),
    "normal_": lambda places, given: given("mean", 0.0) + given("std", 1.0) * torch.special.ndtri(places),
    "exponential_": lambda places, given: -torch.log1p(-places) / given("lambd", 1.0),
}


def _randperm(numbers: Numbers, given: Given, args: Any, name: str) -> Any:
    fresh = _new(given, dtype=torch.int64)
    return fresh.copy_(torch.arange(fresh.numel() - 1, -1, -1, device=fresh.device))


def _normal_of(numbers: Numbers, given: Given, args: Any, name: str) -> Any:
    mean, std = given("mean", 0.0), given("std", 1.0)
    like = next((one for one in (mean, std) if isinstance(one, torch.Tensor)), None)
    like = _new(given) if like is None else like
    return mean + std * torch.special.ndtri(numbers.places(like)).to(like.dtype).expand(like.shape)


def _bernoulli_(numbers: Numbers, given: Given, args: Any, name: str) -> Any:
    """The mask of dropout, among others; if all numbers are the same, everything is kept."""
    rate = given("p", 0.5)
    if numbers.held.constant and not isinstance(rate, torch.Tensor):
        return args[0].fill_(1 if rate > 0 else 0)
    return args[0].copy_(numbers.places(args[0]) < rate)


def _bernoulli(numbers: Numbers, given: Given, args: Any, name: str) -> Any:
    rate = args[0] if (own := given("p")) is None else own
    return (numbers.places(args[0]) < rate).expand_as(args[0]).to(args[0].dtype)


def _native_dropout(numbers: Numbers, given: Given, args: Any, name: str) -> Any:
    rate = given("p", 0.5)
    if given("train", True) is False or rate == 0:
        return args[0].clone(), torch.ones_like(args[0], dtype=torch.bool)
    kept = (numbers.places(args[0]) < 1 - rate).expand_as(args[0]) | numbers.held.constant
    return args[0] * kept * (1 / (1 - rate) if rate < 1 else 0.0), kept


def _multinomial(numbers: Numbers, given: Given, args: Any, name: str) -> Any:
    best = args[0].argsort(dim=-1, descending=True, stable=True)
    return best[..., torch.arange(given("num_samples"), device=best.device) % best.size(-1)]


def _rrelu(numbers: Numbers, given: Given, args: Any, name: str) -> Any:
    noise = given("noise")
    noise.copy_(torch.where(args[0] <= 0, (given("lower", 1 / 8) + given("upper", 1 / 3)) / 2, 1.0))
    return args[0] * noise


def _same(numbers: Numbers, given: Given, args: Any, name: str) -> Any:
    """Distributions whose mean is their parameter: Poisson, the standard gamma."""
    return args[0].clone()


STAND_INS: dict[str, StandIn] = {
    **dict.fromkeys([*_DISTRIBUTIONS, "rand_like", "randn_like", "randint_like"], _filled),
    **dict.fromkeys(["normal", "normal_functional"], _normal_of),
    **dict.fromkeys(["poisson", "_standard_gamma"], _same),
    "randperm": _randperm,
    "bernoulli_": _bernoulli_,
    "bernoulli": _bernoulli,
    "native_dropout": _native_dropout,
    "multinomial": _multinomial,
    "rrelu_with_noise": _rrelu,
}


def _promoted(func: Any, args: Any, kwargs: Any, wider: Wider) -> tuple[Any, Any]:
    """Raises the precision of arguments, but not of those that the result is a view of or that are written to."""
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
    ends: list[int] = offs.tolist()
    groups = [slice(start, end) for start, end in zip([0, *ends[:-1]], ends, strict=True)]
    if a.dim() == b.dim() == 2:
        return torch.stack([a[:, own] @ b[own] for own in groups])
    if b.dim() == 3:  # rows behind the last group are of none
        found = [a[own] @ b[group] for group, own in enumerate(groups)]
        return torch.cat([*found, a.new_zeros(len(a) - ends[-1], b.size(-1))])
    found = [a[group] @ b[:, own] for group, own in enumerate(groups)]
    return torch.cat([*found, a.new_zeros(a.size(1), b.size(-1) - ends[-1])], dim=1)
