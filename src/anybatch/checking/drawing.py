"""Numbers that stand in for random ones, and that a sample has in the whole batch and in any part of it."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

_PLACE = 0.6  # where in its distribution the number is that stands for a whole tensor of them
# Fractional parts of square roots of primes: multiples of them spread evenly over (0, 1), whatever is added up.
_STEPS = (0.4142135623730951, 0.7320508075688772, 0.2360679774997898, 0.6457513110645906, 0.3166247903553998)


class Numbers:
    """Numbers in (0, 1) that depend on the sample and on the position in it, but not on what else is in the batch.

    Which dimension of a drawn tensor is that of the samples shows where its size differs from that of the same draw in
    the whole batch, which has to run first.

    Attributes:
        constant: whether all numbers are the same instead, for draws whose samples can't be told.
    """

    def __init__(self) -> None:
        self.constant = False
        self._whole: list[tuple[int, ...]] = []
        self._rows = 0
        self._samples: Sequence[int] = ()
        self._drawn = 0
        self._places_of: dict[tuple[int, ...], tuple[int, int]] = {}

    def begin(self, samples: Sequence[int], rows: int) -> None:
        """Begins a forward.

        Args:
            samples: which of the whole batch's samples are in it.
            rows: samples of the whole batch.
        """
        if len(samples) == rows:
            self._whole = []
        self._samples, self._rows, self._drawn, self._places_of = samples, rows, 0, {}

    def places(self, like: torch.Tensor) -> torch.Tensor:
        """Numbers for the next draw.

        Args:
            like: of the shape and on the device of the draw.

        Returns:
            Numbers that broadcast to that shape.
        """
        shape = tuple(like.shape)
        self._meet(shape)
        if self.constant:
            return torch.full((), _PLACE, device=like.device)
        total = torch.zeros((), device=like.device)
        for dim, size in enumerate(shape):
            steps = torch.tensor(self._positions(shape, dim, size), dtype=torch.float64).add_(1)
            steps = (steps * _STEPS[dim % len(_STEPS)]).frac_().to(like.device, torch.float32)
            total = total + steps.view(-1, *[1] * (len(shape) - dim - 1))
        return total.frac_().clamp_(1e-6, 1 - 1e-6)

    def _meet(self, shape: tuple[int, ...]) -> None:
        """Compares the shape of a draw with that of the same draw in the whole batch."""
        if len(self._samples) == self._rows:
            self._whole.append(shape)
        elif self._drawn < len(self._whole) and len(self._whole[self._drawn]) == len(shape):
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


def argument(func: Any, args: Any, kwargs: Any, name: str, default: Any = None) -> Any:
    """An argument of an operation by its name.

    Args:
        func: the operation.
        args: as it is called.
        kwargs: as it is called.
        name: of the argument.
        default: what is given if it is not there.
    """
    if name in kwargs:
        return kwargs[name]
    for position, argument in enumerate(func._schema.arguments):
        if argument.name == name:
            return args[position] if position < len(args) else default
    return default


def draws(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether an operation draws; a fused kernel that can drop out by itself does only if it was asked to."""
    names = {argument.name for argument in func._schema.arguments} & {"dropout_p", "dropout"}
    rates = [argument(func, args, kwargs, name, 0.0) for name in names]
    return not names or (bool(argument(func, args, kwargs, "train", True)) and any(rate > 0 for rate in rates))


def _new(func: Any, args: Any, kwargs: Any, *, dtype: torch.dtype | None = None) -> torch.Tensor:
    """An empty tensor of the shape, precision and device that a factory was asked for."""
    source = argument(func, args, kwargs, "self")
    chosen = {name: kwargs[name] for name in ("dtype", "device") if kwargs.get(name) is not None}
    if isinstance(source, torch.Tensor):
        return torch.empty_like(source, **chosen)
    if dtype is not None:
        chosen.setdefault("dtype", dtype)
    size = argument(func, args, kwargs, "size")
    return torch.empty(argument(func, args, kwargs, "n") if size is None else size, **chosen)


def _filled(numbers: Numbers, func: Any, args: Any, kwargs: Any) -> Any:
    """A tensor filled in place, or by a factory, with numbers of a distribution."""
    name = func.overloadpacket.__name__
    whole = torch.int64 if name.startswith("randint") else None
    tensor = args[0] if name.endswith("_") else _new(func, args, kwargs, dtype=whole)
    given = partial(argument, func, args, kwargs)
    return tensor.copy_(_DISTRIBUTIONS[name.removesuffix("_like")](numbers.places(tensor), given))


def _whole_numbers(places: torch.Tensor, low: float, high: float) -> torch.Tensor:
    return (low + places.double() * (high - low)).floor()


_DISTRIBUTIONS: dict[str, Callable[[torch.Tensor, Any], torch.Tensor]] = {
    "rand": lambda places, given: places,
    "randn": lambda places, given: torch.special.ndtri(places),
    "randint": lambda places, given: _whole_numbers(places, given("low", 0), given("high")),
    "random_": lambda places, given: _whole_numbers(places, given("from", 0), given("to") or 2),
    "uniform_": lambda places, given: given("from", 0.0) + places * (given("to", 1.0) - given("from", 0.0)),
    "normal_": lambda places, given: given("mean", 0.0) + given("std", 1.0) * torch.special.ndtri(places),
    "exponential_": lambda places, given: -torch.log1p(-places) / given("lambd", 1.0),
}


def _randperm(numbers: Numbers, func: Any, args: Any, kwargs: Any) -> Any:
    fresh = _new(func, args, kwargs, dtype=torch.int64)
    return fresh.copy_(torch.arange(fresh.numel() - 1, -1, -1, device=fresh.device))


def _normal_of(numbers: Numbers, func: Any, args: Any, kwargs: Any) -> Any:
    mean, std = argument(func, args, kwargs, "mean", 0.0), argument(func, args, kwargs, "std", 1.0)
    like = next((one for one in (mean, std) if isinstance(one, torch.Tensor)), None)
    like = _new(func, args, kwargs) if like is None else like
    return mean + std * torch.special.ndtri(numbers.places(like)).to(like.dtype).expand(like.shape)


def _bernoulli_(numbers: Numbers, func: Any, args: Any, kwargs: Any) -> Any:
    """The mask of dropout, among others; if all numbers are the same, everything is kept."""
    rate = argument(func, args, kwargs, "p", 0.5)
    if numbers.constant and not isinstance(rate, torch.Tensor):
        return args[0].fill_(1 if rate > 0 else 0)
    return args[0].copy_(numbers.places(args[0]) < rate)


def _bernoulli(numbers: Numbers, func: Any, args: Any, kwargs: Any) -> Any:
    rate = argument(func, args, kwargs, "p")
    return (numbers.places(args[0]) < (args[0] if rate is None else rate)).expand_as(args[0]).to(args[0].dtype)


def _native_dropout(numbers: Numbers, func: Any, args: Any, kwargs: Any) -> Any:
    rate, training = argument(func, args, kwargs, "p", 0.5), argument(func, args, kwargs, "train", True)
    if training is False or rate == 0:
        return args[0].clone(), torch.ones_like(args[0], dtype=torch.bool)
    kept = (numbers.places(args[0]) < 1 - rate).expand_as(args[0]) | numbers.constant
    return args[0] * kept * (1 / (1 - rate) if rate < 1 else 0.0), kept


def _multinomial(numbers: Numbers, func: Any, args: Any, kwargs: Any) -> Any:
    wanted = argument(func, args, kwargs, "num_samples")
    best = args[0].argsort(dim=-1, descending=True, stable=True)
    return best[..., torch.arange(wanted, device=best.device) % best.size(-1)]


def _rrelu(numbers: Numbers, func: Any, args: Any, kwargs: Any) -> Any:
    lower, upper = argument(func, args, kwargs, "lower", 1 / 8), argument(func, args, kwargs, "upper", 1 / 3)
    noise = argument(func, args, kwargs, "noise")
    noise.copy_(torch.where(args[0] <= 0, (lower + upper) / 2, 1.0))
    return args[0] * noise


def _same(numbers: Numbers, func: Any, args: Any, kwargs: Any) -> Any:
    """Distributions whose mean is their parameter: Poisson, the standard gamma."""
    return args[0].clone()


STAND_INS: dict[str, Callable[[Numbers, Any, Any, Any], Any]] = {
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
