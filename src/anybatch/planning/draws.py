"""Random numbers that decide what a step runs, such as which layers are left out: the draws that take the most.

A step that is traced once has seen one course of the dice. Where it draws numbers that Python can look at, it is traced
again with draws that are all small, all large, and some of the usual kind, and planned with those that took the most.
"""

import contextlib
import logging
import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch

from anybatch.tensors.dispatch import TorchDispatchMode
from anybatch.tensors.meter import OverBudget
from anybatch.tensors.randomness import RandomState
from anybatch.update.transaction import Failure, is_out_of_memory

logger = logging.getLogger(__name__)

_WORDS = 624  # of the state of a Mersenne Twister
_EXTREME = 128  # words, so that a loop that draws until it likes a number comes to its end
_SCALARS = 64
_USUAL = 3
_ALL = 2**32 - 1


@dataclass(frozen=True)
class Draw:
    """What the random generators give while a step is traced.

    Args:
        kind: ``"as they come"``, ``"small"``, ``"large"`` or ``"usual"``.
        seed: of what follows after the first numbers, or of all.
    """

    kind: str = "as they come"
    seed: int = 0

    def __str__(self) -> str:
        return f"{self.kind} numbers" + (f" of seed {self.seed}" if self.kind == "usual" else "")


AS_THEY_COME = Draw()
OTHERS = (Draw("large"), Draw("small"), *(Draw("usual", seed) for seed in range(_USUAL)))


class _Trace(Protocol):
    @property
    def bytes_made(self) -> int: ...


Made = TypeVar("Made", bound=_Trace)


class Drawn:
    """What a step drew while it was traced.

    Attributes:
        scalars: whether single random numbers of torch's.
        outside: whether numbers from the generators of Python or NumPy.
    """

    scalars = outside = False

    def __bool__(self) -> bool:
        return self.scalars or self.outside


@contextlib.contextmanager
def drawing(draw: Draw, *, is_fake: bool) -> Iterator[Drawn]:
    """Sets the generators, and notes whether they are asked; whoever calls puts their states back.

    Args:
        draw: what they give.
        is_fake: whether tensors have no numbers, so that Python can look at none of torch's.
    """
    _set(draw)
    drawn, before = Drawn(), _states()
    with contextlib.nullcontext() if is_fake else _Scalars(draw, drawn):
        yield drawn
    drawn.outside = before != _states()


def heaviest_draw(draw_is: Callable[[Draw], None], first: Made, trace: Callable[[], Made]) -> tuple[Made, bool]:
    """Traces with other draws, and stays with those that took the most.

    Args:
        draw_is: sets the draw for all further traces.
        first: the trace of the numbers as they come.
        trace: traces once more.

    Returns:
        The trace of the heaviest draw, and whether draws differ in what they take.
    """
    found = [(first.bytes_made, AS_THEY_COME, first)]
    for draw in OTHERS:
        draw_is(draw)
        other = attempted(trace)
        if other is not None:
            found.append((other.bytes_made, draw, other))
    _, heaviest, most = max(found, key=lambda one: one[0])
    draw_is(heaviest)
    differ = len({made for made, _, _ in found}) > 1
    if differ:
        logger.info("random numbers decide what the step runs; it is planned for what it takes with %s", heaviest)
    return most, differ


def attempted(trace: Callable[[], Made]) -> Made | None:
    """A trace; ``None`` where the step can't run this way, which it need not in its user's hands.

    Args:
        trace: runs it.
    """
    try:
        return trace()
    except Exception as error:
        if is_out_of_memory(error) or isinstance(error, OverBudget):
            raise
        failure = Failure(error)
    failure.release()
    return None


def _set(draw: Draw) -> None:
    if draw.kind == "as they come":
        return
    words = [random.Random(draw.seed).getrandbits(32) | 1 for _ in range(_WORDS)]
    if draw.kind != "usual":
        words[:_EXTREME] = [_untempered(_extreme(draw.kind, i)) for i in range(_EXTREME)]
    random.setstate((random.Random.VERSION, (*words, 0), None))
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.set_state(("MT19937", words, 0))
    torch.default_generator.manual_seed(draw.seed)


def _extreme(kind: str, place: int) -> int:
    """A word that makes numbers small or large.

    A fraction comes from two words, of which the first one tells. A whole number below a bound is made of the first or
    the last bits of one word; words that come to more are left out, so that every other one here goes down in steps.
    """
    if kind == "small":
        return 0
    if place % 2 == 0:
        return _ALL
    step = 15 - place // 2 % 16
    return step << 28 | 0x0FFFFFF0 | step


def _untempered(word: int) -> int:
    """The word of the state that a Mersenne Twister makes a word of (Matsumoto and Nishimura, 1998, last page)."""
    steps: tuple[Callable[[int], int], ...] = (
        lambda w: w >> 18, lambda w: w << 15 & 0xEFC60000, lambda w: w << 7 & 0x9D2C5680, lambda w: w >> 11,
    )  # fmt: skip
    for step in steps:
        found = word
        for _ in range(5):  # each round gets at least seven more bits right
            found = word ^ step(found)
        word = found
    return word


def _states() -> Any:
    state = RandomState().state_dict()
    return state["python"], state.get("numpy")


class _Scalars(TorchDispatchMode):
    """Gives single random numbers of torch's, which Python may look at, and notes that there were any."""

    def __init__(self, draw: Draw, drawn: Drawn) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._draw, self._drawn, self._given = draw, drawn, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func._schema.name.removeprefix("aten::")
        if name in _RANDOM and isinstance(out, torch.Tensor) and out.numel() == 1:
            self._drawn.scalars = True
            if self._draw.kind in ("large", "small") and self._given < _SCALARS:
                self._given += 1
                value = _extreme_of(name, out, args, is_large=self._draw.kind == "large")
                return out if value is None else out.fill_(value)
        return out


_RANDOM = {"rand", "rand_like", "uniform", "uniform_", "randint", "randint_like", "random_", "bernoulli", "bernoulli_",
           "randn", "randn_like", "normal", "normal_", "multinomial"}  # fmt: skip


def _extreme_of(name: str, out: torch.Tensor, args: tuple[Any, ...], *, is_large: bool) -> float | int | None:
    """The least or the largest number that an operation may give; ``None`` where there is no such thing."""
    if name.startswith("bernoulli"):
        return int(is_large)
    bounds = [one for one in args if isinstance(one, (int, float))]
    if name in ("rand", "rand_like", "uniform", "uniform_") and out.dtype.is_floating_point:
        low, high = bounds if len(bounds) == 2 else (0.0, 1.0)
        return low + (high - low) * (1 - torch.finfo(out.dtype).eps) if is_large else low
    if name.startswith("randint") and bounds:
        low, high = (0, bounds[0]) if len(bounds) == 1 else bounds[:2]
        return high - 1 if is_large else low
    return None
