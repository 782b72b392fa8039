"""Is a net given in a loop of sampling what it was trained on?

A sampler of a diffusion or a flow calls the net without a gradient, time after time with the next level of noise, and
what the net gives goes into its next input. The loss of the training says nothing of such a loop: how large its inputs
are at each level, beside those of the training at the same level, does.
"""

import bisect
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any

import torch

from anybatch.doctor.ask.trials import told
from anybatch.records.lossfacts import Probed
from anybatch.records.runs import Run
from anybatch.tensors.dispatch import has_numbers, unseen
from anybatch.userlines import user_place

_MOST_ROWS = 20_000  # of the training
_OF_A_CALL = 1024  # rows, and entries of each, evenly spaced where there are more
_MOST_CALLS = 512  # of a loop whose inputs are looked at, evenly over it
_LEAST_CALLS = 10
_LEAST_LEVELS = 8
_LEAST_DRAWN, _MOST_DRAWN = 64, 1024  # numbers of a first input that are looked at
_SEVERAL = 32  # rows of which one column may be the level; a player looks at fewer, and often
_NEAR, _FEWEST = 0.03, 64
"""What is compared with a call of a loop: a share of the rows of the training, those of the nearest levels."""

_ALIKE = 1.3
"""How many times as large inputs may be in the mean square: a few levels, and an imperfect net, make such a difference.
"""

_MOSTLY = 0.75  # of the calls
_AWAY = 1e3
"""How many times the mean square of the training samples have that run away."""

_BEGUN, _COLD = 2.2, 5.0
"""The same for the noise that a loop begins with, where no net makes a difference: larger, or smaller, since a low
temperature, down to 0.45, is meant."""

_CHAIN = 3  # calls with one level, more of which are a chain that forgets what it began with

_MOST_SPREAD = 1 << 20
_KOLMOGOROV = 1.63  # the distance of Kolmogorov and Smirnov times the root of n, which 1 of 100 draws exceed
Key = tuple[Any, tuple[int, ...]]
"""The place or the name of the argument that is the level, and the shape of a row of the input."""


@dataclass(slots=True)
class Loop:
    """Calls one after the other, each with one level for all rows."""

    step: int
    file: str
    line: int
    calls: list[tuple[float, float]] = field(default_factory=list)  # level, and mean logarithm of the mean square
    count: int = 0
    last: float = math.nan  # level
    way: float = 0.0  # 1 where levels rise, -1 where they fall
    again: int = 0  # how often it was called with its first level after that
    noise: float = 0.0  # the mean square of its first input where that is distributed as normal draws are

    def goes_on(self, step: int, level: float) -> bool:
        """Whether a call is the next one of this loop."""
        return step == self.step and (level == self.last or not self.way or (level - self.last) * self.way > 0)


class Sampling:
    """Keeps how large inputs are at which level, in training and in the last loop."""

    def __init__(self) -> None:
        self.trained: dict[Key, list[tuple[float, float]]] = {}  # levels of rows with the mean square of each
        self.of_rows: set[Key] = set()  # of these, those whose level is a tensor with one for each row
        self.loops: dict[Key, Loop] = {}  # the last long one of each
        self._going: dict[Key, Loop] = {}
        self._classes: set[type] = set()  # of nets that were trained

    @unseen
    def train(self, module: Any, args: Any, kwargs: Mapping[str, Any]) -> None:
        """Is shown what a net is given in a step that is looked at."""
        self._classes.add(type(module))
        for place, level, given in _levels(args, kwargs):
            key = place, given.shape[1:]
            rows = self.trained.setdefault(key, [])
            if isinstance(level, torch.Tensor) and level.numel() == len(given) > 1:
                self.of_rows.add(key)
            if len(rows) < _MOST_ROWS and given.numel():
                sizes = _sizes(given)
                levels = _spaced(level.flatten()).double() if isinstance(level, torch.Tensor) else None
                own = [float(level)] if levels is None else levels.tolist()
                rows += zip(own * (len(sizes) // len(own)), sizes, strict=True)

    @unseen
    def sample(self, step: int, module: Any, args: Any, kwargs: Mapping[str, Any]) -> None:
        """Is shown what one is given without a gradient."""
        for place, level, given in _levels(args, kwargs):
            key = place, given.shape[1:]
            is_known = key in self.trained or type(module) not in self._classes
            if is_known and given.numel() and (ends := _ends(level))[0] == ends[1]:
                self._call(step, key, ends[0], given)

    def _call(self, step: int, key: Key, level: float, given: torch.Tensor) -> None:
        loop = self._going.get(key)
        if loop is None or not loop.goes_on(step, level):
            loop = self._going[key] = Loop(step, *user_place(6), noise=_noise(given))
        if level == loop.last:
            loop.again += loop.count == 1
            return
        loop.way = 0.0 if math.isnan(loop.last) else level - loop.last
        loop.last, loop.count = level, loop.count + 1
        if loop.count < _MOST_CALLS // 8 or (loop.count % 8 == 0 and len(loop.calls) < _MOST_CALLS):
            sizes = _sizes(given)
            loop.calls.append((level, sum(sizes) / len(sizes)))
        if loop.count >= _LEAST_CALLS:
            self.loops[key] = loop


def about_sampling(kept: Any, run: Run) -> Iterator[Probed]:
    """Whether inputs in the last loop of sampling are as large as those of the training at the same levels."""
    for key, loop in kept.sampling.loops.items():
        if len({size for _, size in loop.calls}) == 1:
            continue  # what the net gives goes into none of its inputs
        rows = sorted(kept.sampling.trained.get(key, ()), key=itemgetter(0))
        levels = [level for level, _ in rows]
        if len(set(levels)) < _LEAST_LEVELS:
            if not rows:
                yield told("sampling", loop, answer="unknown", detail="what that was given in training was not seen")
            elif levels[0] == levels[-1] and len(rows) >= _FEWEST and key in kept.sampling.of_rows:
                yield told("sampling level", loop, calls=loop.count, level=levels[0], rows=len(rows))
            continue
        near = max(_FEWEST, int(_NEAR * len(rows)))
        found, begun, is_level = list[tuple[float, float]](), 1.0, False
        for level, size in loop.calls:
            if rows[0][0] <= level <= rows[-1][0] and len(rows) >= 2 * near:
                middle = (bisect.bisect_left(levels, level) + bisect.bisect_right(levels, level)) // 2
                first = min(max(middle - near // 2, 0), len(rows) - near)
                if not found:
                    half = near // 2
                    low, high = (sum(math.exp(one) for _, one in rows[at : at + half]) / half
                                 for at in (first, first + half))  # fmt: skip
                    begun = (low + high) / 2
                    is_level = 1 / _BEGUN < (low / high) ** 2 < _BEGUN
                found.append((math.exp(size - sum(one for _, one in rows[first : first + near]) / near), level))
        if loop.noise and is_level and loop.again <= _CHAIN and found[0][1] == loop.calls[0][0]:
            times = loop.noise / begun
            if not 1 / _COLD <= times <= _BEGUN:  # what the net gives has no part in it yet
                yield told("sampling start", loop, times=times, level=loop.calls[0][0])
        away = [one for one in found if not 1 / _ALIKE <= one[0] <= _ALIKE]
        if len(found) < _LEAST_CALLS // 2:
            yield told("sampling", loop, answer="unknown", detail="levels of the training have too few rows")
            continue
        worst, level = max(found, key=lambda one: abs(math.log(one[0])))
        answer = "no" if len(away) > (1 - _MOSTLY) * len(found) else "yes"
        far = answer == "no" and worst > _AWAY
        yield told("sampling", loop, answer=answer, calls=loop.count, times=worst, level=level, away=len(away), far=far)


def is_normal(noise: torch.Tensor) -> bool:
    """Whether numbers are distributed as draws of a standard normal one are."""
    drawn = spread(noise)
    count = drawn.numel()
    steps = torch.arange(1, count + 1, dtype=torch.double) / count
    away = (torch.special.ndtr(drawn.sort().values) - steps).abs().max()
    return bool(away * count**0.5 <= _KOLMOGOROV)


def spread(tensor: torch.Tensor) -> torch.Tensor:
    """Evenly spaced entries of a tensor on the host; all of one that is not large."""
    return tensor.detach().flatten()[:: max(1, tensor.numel() // _MOST_SPREAD)].cpu().double()


def _noise(given: torch.Tensor) -> float:
    some = given.detach().flatten()[:_MOST_DRAWN].double()
    square = float(some.square().mean()) if len(some) >= _LEAST_DRAWN else 0.0
    return square if square and is_normal(some / square**0.5) else 0.0


def _levels(args: Any, kwargs: Mapping[str, Any]) -> Iterator[tuple[Any, Any, torch.Tensor]]:
    """Where a net is given one number for each row, or for all, that number, and the first tensor that has rows."""
    named = dict[Any, Any]([*enumerate(args), *kwargs.items()])
    inputs = (one for one in named.values() if isinstance(one, torch.Tensor) and one.dim() > 1)
    given = next((one for one in inputs if one.is_floating_point() and has_numbers(one)), None)
    if given is None or given.is_nested or given.layout is not torch.strided:
        return
    for place, one in named.items():
        is_real = isinstance(one, torch.Tensor) and one is not given and has_numbers(one) and not one.is_complex()
        if type(one) in (int, float) or (is_real and one.numel() in (1, len(given))):
            yield place, one, given
    if given.dim() == 2 and len(given) >= _SEVERAL and given.shape[1] > 1:  # a level may be one of the columns
        yield "first", given[:, 0], given[:, 1:]
        yield "last", given[:, -1], given[:, :-1]


def _ends(level: Any) -> tuple[float, float]:
    """The least and the largest level; of what has other ones at both ends, these, which is quick."""
    if not isinstance(level, torch.Tensor):
        return float(level), float(level)
    flat = level.detach().flatten()
    first, last = flat[:: max(1, len(flat) - 1)][:2].tolist() if len(flat) > 1 else [float(flat[0])] * 2
    return (first, last) if first != last else (float(flat.amin()), float(flat.amax()))


def _sizes(given: torch.Tensor) -> list[float]:
    """The logarithm of the mean square of each row."""
    some = _spaced(_spaced(given.detach()).flatten(1), 1)
    return some.double().square().mean(1).clamp(min=1e-12).log().tolist()


def _spaced(given: torch.Tensor, dim: int = 0) -> torch.Tensor:
    """Some of its rows, or columns, evenly spaced."""
    step = -(-given.shape[dim] // _OF_A_CALL)
    return given[(slice(None),) * dim + (slice(None, None, step),)] if step > 1 else given
