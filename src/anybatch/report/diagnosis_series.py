"""What was measured over a run, as series that are short enough to draw, and as plain values for JSON."""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import PurePath
from typing import Any

from anybatch.records.events import Backward, Clipped, Stepped
from anybatch.records.runs import Run
from anybatch.records.samples import Memory, Norms, Watched
from anybatch.report.diagnosis_calls import Call, Output, calls_of, outputs_of
from anybatch.report.diagnosis_flow import Flow, flow_of, plain

_MOST_POINTS = 240
_MOST_CURVES = 4
_STD_OF_ZERO = 1e-3  # a weight whose root mean square is below this has just begun at zero: its ratio says nothing


@dataclass(frozen=True, slots=True)
class Curve:
    """Values over steps.

    Args:
        name: in the legend.
        steps: ascending, not always distinct.
        values: one for each step; some may not be finite.
    """

    name: str
    steps: tuple[int, ...]
    values: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Ratio:
    """How far one step moved the weight matrices, each relative to its own norm.

    Args:
        step: of the optimizer.
        low: the least of the matrices.
        middle: the median.
        high: the greatest.
        lowest: the name of the matrix that moved least.
        highest: the name of the one that moved most.
    """

    step: int
    low: float
    middle: float
    high: float
    lowest: str = ""
    highest: str = ""


@dataclass(frozen=True, slots=True)
class Series:
    """All series of a run; each may be empty.

    Args:
        flow: norms of gradients, layer by layer.
        ratios: updates relative to weights.
        losses: one curve for each line that called a backward.
        rates: one curve for each learning rate that differs from the others.
        norms: of the whole gradient.
        clips: limits that gradients were clipped to.
        memory: in bytes.
        graphs: losses of earlier steps whose graph was still alive.
        watched: norms of outputs, and of their gradients, that were asked for.
        outputs: of modules, some where there are very many.
        modules: of how many modules outputs were sampled.
        calls: lines of the loop.
    """

    flow: Flow
    ratios: tuple[Ratio, ...]
    losses: tuple[Curve, ...]
    rates: tuple[Curve, ...]
    norms: tuple[Curve, ...]
    clips: tuple[float, ...]
    memory: tuple[Curve, ...]
    graphs: tuple[Curve, ...]
    watched: tuple[Curve, ...]
    outputs: tuple[Output, ...]
    modules: int
    calls: tuple[Call, ...]

    def to_dict(self) -> dict[str, Any]:
        """The series as plain values for JSON; numbers that are not finite are texts (``"nan"``, ``"inf"``)."""
        curves = ("losses", "rates", "norms", "memory", "graphs", "watched")
        return {
            "flow": self.flow.to_dict(),
            "ratios": [
                {"step": one.step, "low": plain(one.low), "median": plain(one.middle), "high": plain(one.high)}
                | {"lowest": one.lowest, "highest": one.highest}
                for one in self.ratios
            ],
            "clips": [plain(limit) for limit in self.clips],
            "outputs": [one.to_dict() for one in self.outputs],
            "modules": self.modules,
            "calls": [asdict(call) for call in self.calls],
            **{name: [_curve_dict(curve) for curve in getattr(self, name)] for name in curves},
        }


def _limits(run: Run) -> list[float]:
    """What norms were clipped to; an infinite limit is only there to measure."""
    return [one.limit for one in run.of(Clipped) if one.by == "norm"]


def series_of(run: Run) -> Series:
    """Gathers what was measured over a run; long series are thinned, and what stands out in them stays.

    Args:
        run: its facts.

    Returns:
        The series.

    Example:
        >>> backwards = [Backward(value=1.0 / (step + 1), file="a.py", line=3, step=step) for step in range(3)]
        >>> [(curve.name, curve.steps) for curve in series_of(Run(list(backwards))).losses]
        [('a.py:3', (0, 1, 2))]
    """
    outputs, modules = outputs_of(run)
    return Series(
        flow=flow_of(run),
        ratios=_thinned_ratios(_ratios(run)),
        losses=_curves(_losses(run)),
        rates=_curves(_rates(run)),
        norms=_curves(_norms(run)),
        clips=tuple(dict.fromkeys(limit for limit in _limits(run) if math.isfinite(limit)))[:3],
        memory=_curves(_memory(run)),
        graphs=_curves({"losses of earlier steps": [(one.step, float(one.graphs)) for one in run.of(Memory)]}),
        watched=_curves(_watched(run)),
        outputs=outputs,
        modules=modules,
        calls=calls_of(run),
    )


Points = list[tuple[int, float]]


def _curves(points: Mapping[str, Points]) -> tuple[Curve, ...]:
    curves = []
    for name, found in points.items():
        kept = thinned(found, _MOST_POINTS)
        if kept:
            curves.append(Curve(name, tuple(step for step, _ in kept), tuple(value for _, value in kept)))
    return tuple(curves[:_MOST_CURVES])


def _losses(run: Run) -> dict[str, Points]:
    """The mean over the backwards of a step, for each line that called some; the busiest lines first."""
    sites: dict[str, dict[int, list[float]]] = {}
    for one in run.of(Backward):
        if one.value is not None and one.function == "backward":
            name = f"{PurePath(one.file).name}:{one.line}" if one.file else "loss"
            sites.setdefault(name, {}).setdefault(one.step, []).append(one.value)
    ranked = sorted(sites.items(), key=lambda item: -len(item[1]))
    return {name: [(step, sum(v) / len(v)) for step, v in steps.items()]
            for name, steps in ranked}  # fmt: skip


def _rates(run: Run) -> dict[str, Points]:
    found: dict[str, Points] = {}
    for one in run.of(Stepped):
        optimizer = run.optimizers.get(one.optimizer)
        name = (optimizer.variable if optimizer else "") or f"optimizer {one.optimizer}"
        for group, rate in enumerate(one.lrs):
            label = f"{name}, group {group}" if len(one.lrs) > 1 else name
            found.setdefault(label, []).append((one.number, rate))
    return _merged(found)


def _norms(run: Run) -> dict[str, Points]:
    found: dict[str, Points] = {}
    for clip in run.of(Clipped):
        if clip.norm is not None:
            found.setdefault("before clipping", []).append((clip.step, clip.norm))
    for one in run.of(Norms):
        optimizer = run.optimizers.get(one.optimizer)
        name = (optimizer.variable if optimizer else "") or f"optimizer {one.optimizer}"
        own = {number for group in optimizer.groups for number in group.parameters} if optimizer else set()
        own_norms = [
            norm
            for number, norm in zip(one.parameters, one.grad, strict=False)
            if norm is not None and (number in own or not own)
        ]
        if own_norms:
            found.setdefault(f"used by {name}", []).append(
                (one.number, math.hypot(*own_norms) if _all_finite(own_norms) else sum(own_norms))
            )
    return found


def _memory(run: Run) -> dict[str, Points]:
    kinds = (("process", "resident"), ("device", "allocated"), ("device, peak so far", "peak"))
    found = {name: [(one.step, float(getattr(one, entry))) for one in run.of(Memory)] for name, entry in kinds}
    return {name: points for name, points in found.items() if any(value for _, value in points)}


def _watched(run: Run) -> dict[str, Points]:
    found: dict[str, Points] = {}
    for one in run.of(Watched):
        found.setdefault(f"{one.module}: output", []).append((one.step, one.output))
        if one.gradient is not None:
            found.setdefault(f"{one.module}: gradient", []).append((one.step, one.gradient))
    return found


def _ratios(run: Run) -> list[Ratio]:
    found = []
    for one in run.of(Norms):
        moved = []
        for number, weight, update in zip(one.parameters, one.weight, one.update, strict=False):
            facts = run.parameters.get(number)
            is_matrix = facts is not None and len(facts.shape) >= 2 and facts.requires_grad
            if facts is not None and is_matrix and weight > _STD_OF_ZERO * math.sqrt(facts.numel or 1):
                moved.append((update / weight, facts.name))
        if moved and _all_finite(ratio for ratio, _ in moved):
            (low, lowest), (high, highest) = min(moved), max(moved)
            middle = statistics.median(ratio for ratio, _ in moved)
            found.append(Ratio(one.number, low, middle, high, lowest, highest))
    return sorted(found, key=lambda one: one.step)


def thinned(points: Sequence[tuple[int, float]], most: int) -> list[tuple[int, float]]:
    """Leaves points out so that a drawing of the others looks the same.

    Args:
        points: in order.
        most: that may stay, at least 8.

    Returns:
        The first, the last, and of each stretch between them the least, the greatest and the first that is not finite.

    Example:
        >>> len(thinned([(step, float(step % 7)) for step in range(5000)], 240)) <= 240
        True
    """
    if len(points) <= most:
        return list(points)
    stretches = (most - 2) // 3
    kept = {0, len(points) - 1}
    for index in range(stretches):
        part = range(index * len(points) // stretches, (index + 1) * len(points) // stretches)
        finite = [here for here in part if math.isfinite(points[here][1])]
        kept.update(next(([here] for here in part if not math.isfinite(points[here][1])), []))
        if finite:
            kept.add(min(finite, key=lambda here: points[here][1]))
            kept.add(max(finite, key=lambda here: points[here][1]))
    return [points[here] for here in sorted(kept)]


def _thinned_ratios(ratios: list[Ratio]) -> tuple[Ratio, ...]:
    if len(ratios) <= _MOST_POINTS:
        return tuple(ratios)
    middles = thinned([(index, one.middle) for index, one in enumerate(ratios)], _MOST_POINTS)
    return tuple(ratios[index] for index, _ in middles)


def _merged(curves: dict[str, Points]) -> dict[str, Points]:
    """Curves that are equal become one with the names of all."""
    same: dict[tuple[tuple[int, float], ...], list[str]] = {}
    for name, points in curves.items():
        same.setdefault(tuple(points), []).append(name)
    return {
        names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more": list(points)
        for points, names in same.items()
    }


def _all_finite(values: Iterable[float]) -> bool:
    return all(math.isfinite(value) for value in values)


def _curve_dict(curve: Curve) -> dict[str, Any]:
    return {"name": curve.name, "steps": list(curve.steps), "values": [plain(value) for value in curve.values]}
