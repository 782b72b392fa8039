"""The measurements of a run as series short enough to draw, and as plain values for JSON."""

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import PurePath
from typing import Any

from anybatch.records.events import Backward, Clipped, Stepped
from anybatch.records.lossfacts import Evaluated, LossCall
from anybatch.records.reading import plain
from anybatch.records.runs import Run, grouped
from anybatch.records.samples import Activations, Memory, ModuleSample, Norms
from anybatch.report.flow import STD_OF_ZERO, Flow, flow_of, steps_of
from anybatch.report.loop import Call, calls_of, root_name
from anybatch.report.svg import Curve

_MOST_POINTS = 240
_MOST_CURVES = 4
_NEARLY_ALL = 0.9
_MOST_SAMPLES = 48
MOST_MODULES = 64


@dataclass(frozen=True, slots=True)
class Ratio:
    """The update-to-weight ratios of the weight matrices in one step."""

    step: int  # the optimizer step
    low: float  # the smallest ratio
    middle: float  # the median
    high: float  # the largest ratio
    lowest: str = ""  # the name of the matrix with the smallest ratio
    highest: str = ""  # the name of the matrix with the largest ratio


@dataclass(frozen=True, slots=True)
class Output:
    """The output of one module over the sampled steps."""

    module: str  # its name; empty for the model itself
    cls: str  # the name of its class
    first_std: float  # the standard deviation of the output at the first sampled step
    last_std: float  # the standard deviation at the last sampled step
    absmax: float  # the largest absolute value over all sampled steps
    zeros: float  # share of entries that are zero at the last sampled step
    dead: float  # share of units that were zero in all samples
    saturated: float | None  # share of saturated entries at the last sampled step; ``None`` for other modules
    # standard deviation over the batch relative to the mean absolute value, at the last sampled step; ``None`` for a
    # batch of one
    spread: float | None
    samples: int  # the number of sampled steps
    steps: tuple[int, ...] = ()  # sampled steps with percentiles, at most about 48
    # ``PERCENTILES`` of the entries at each of ``steps``
    percentiles: tuple[tuple[float, ...], ...] = ()

    @property
    def stands_out(self) -> bool:
        """Whether more than 90 % of it is dead or saturated, or a value is not finite."""
        return self.dead > _NEARLY_ALL or (self.saturated or 0) > _NEARLY_ALL or not math.isfinite(self.absmax)


@dataclass(frozen=True, slots=True)
class Series:
    """All series of a run; each may be empty."""

    flow: Flow  # gradient and update norms of each layer
    ratios: tuple[Ratio, ...]  # update-to-weight ratios
    losses: tuple[Curve, ...]  # one curve per line that called backward, and per line that evaluated
    guess: float | None  # the loss of the best constant guess for the first of ``losses``; ``None`` if unknown
    rates: tuple[Curve, ...]  # one curve per distinct schedule of a learning rate
    norms: tuple[Curve, ...]  # the norm of the whole gradient
    clips: tuple[float, ...]  # the finite limits of gradient clipping by norm, at most 3
    memory: tuple[Curve, ...]  # in bytes
    graphs: tuple[Curve, ...]  # the number of earlier steps whose graph was still alive
    outputs: tuple[Output, ...]  # of at most 64 modules
    modules: int  # the number of modules with sampled outputs
    calls: tuple[Call, ...]  # the calls of the loop

    def to_dict(self) -> dict[str, Any]:
        """The series as plain values for JSON; numbers that are not finite are texts (``"nan"``, ``"inf"``)."""
        own = {one.name: getattr(self, one.name) for one in fields(self)}
        ratios = [asdict(one) for one in self.ratios]
        named = [{"median": one.pop("middle"), **one} for one in ratios]
        values: dict[str, Any] = plain({**own, "flow": self.flow.to_dict(), "ratios": named}, str)
        return values


def series_of(run: Run) -> Series:
    """Collects the series of a run; long ones are thinned, but keep their extremes and non-finite values."""
    outputs, modules = outputs_of(run)
    limits = (one.limit for one in run.of(Clipped) if one.by == "norm")  # an infinite one only measures the norm
    return Series(
        flow=flow_of(run),
        ratios=_thinned_ratios(_ratios(run)),
        losses=_curves(_losses(run)),
        guess=_guess(run),
        rates=_curves(_rates(run)),
        norms=_curves(_norms(run)),
        clips=tuple(dict.fromkeys(limit for limit in limits if math.isfinite(limit)))[:3],
        memory=_curves(_memory(run)),
        graphs=_curves({"losses of earlier steps": [(one.step, float(one.graphs)) for one in run.of(Memory)]}),
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


def _guess(run: Run) -> float | None:
    """The loss of the best constant prediction, if the value passed to backward is that of a single loss function."""
    calls = {one.at: one for one in run.of(LossCall) if one.guess is not None and one.value is not None}
    passes = [one for one in run.of(Backward) if one.value is not None and one.function == "backward"]
    lines = Counter((one.file, one.line) for one in passes).most_common(1)
    for one in reversed(passes):
        found = [calls[at] for at in one.loss_calls if at in calls]
        if len(found) == 1 and (one.file, one.line) == lines[0][0] and found[0].value is not None:
            return found[0].guess if math.isclose(one.value or 0.0, found[0].value, rel_tol=1e-3) else None
    return None


def _losses(run: Run) -> dict[str, Points]:
    """The mean loss within a step, per line: the backward with the most steps, evaluations, other backwards."""
    backwards = grouped(
        (f"{PurePath(one.file).name}:{one.line}" if one.file else "loss", (one.step, one.value))
        for one in run.of(Backward)
        if one.value is not None and one.function == "backward"
    )
    evaluations = grouped(
        (f"evaluation, {PurePath(one.file).name}:{one.line}", (one.step, one.value)) for one in run.of(Evaluated)
    )
    ranked = sorted(backwards.items(), key=lambda item: -len(dict(item[1])))
    ranked[1:1] = evaluations.items()
    return {name: [(step, sum(v) / len(v)) for step, v in grouped(points).items()] for name, points in ranked}


def _rates(run: Run) -> dict[str, Points]:
    found: dict[str, Points] = {}
    steps = steps_of(run)
    for one in run.of(Stepped):
        optimizer = run.optimizers.get(one.optimizer)
        name = (optimizer.variable if optimizer else "") or f"optimizer {one.optimizer}"
        for group, rate in enumerate(one.lrs):
            label = f"{name}, group {group}" if len(one.lrs) > 1 else name
            found.setdefault(label, []).append((steps[one.optimizer, one.number], rate))
    same = grouped((tuple(points), name) for name, points in found.items())
    return {
        names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more": list(points)
        for points, names in same.items()
    }


def _norms(run: Run) -> dict[str, Points]:
    found = grouped(("before clipping", (clip.step, clip.norm)) for clip in run.of(Clipped) if clip.norm is not None)
    steps = steps_of(run)
    for one in run.of(Norms):
        optimizer = run.optimizers.get(one.optimizer)
        name = (optimizer.variable if optimizer else "") or f"optimizer {one.optimizer}"
        own = {number for group in optimizer.groups for number in group.parameters} if optimizer else set()
        own_norms = [
            grad
            for number, grad in zip(one.parameters, one.grad, strict=False)
            if grad is not None and (number in own or not own)
        ]
        if own_norms:
            norm = math.hypot(*own_norms) if _all_finite(own_norms) else sum(own_norms)
            found.setdefault(f"used by {name}", []).append((steps.get((one.optimizer, one.number), one.step), norm))
    return found


def _memory(run: Run) -> dict[str, Points]:
    kinds = (("process", "resident"), ("device", "allocated"), ("device, peak so far", "peak"))
    found = {name: [(one.step, float(getattr(one, entry))) for one in run.of(Memory)] for name, entry in kinds}
    return {name: points for name, points in found.items() if any(value for _, value in points)}


def _ratios(run: Run) -> list[Ratio]:
    found, steps = [], steps_of(run)
    for one in run.of(Norms):
        moved = []
        for number, weight, update in zip(one.parameters, one.weight, one.update, strict=False):
            facts = run.parameters.get(number)
            is_matrix = facts is not None and len(facts.shape) >= 2 and facts.requires_grad
            if facts is not None and is_matrix and weight > STD_OF_ZERO * math.sqrt(facts.numel or 1):
                moved.append((update / weight, facts.name))
        if moved and _all_finite(ratio for ratio, _ in moved):
            (low, lowest), (high, highest) = min(moved), max(moved)
            middle = statistics.median(ratio for ratio, _ in moved)
            found.append(Ratio(steps.get((one.optimizer, one.number), one.step), low, middle, high, lowest, highest))
    return sorted(found, key=lambda one: one.step)


def thinned(points: Sequence[tuple[int, float]], most: int) -> list[tuple[int, float]]:
    """Thins points to at most ``most``: first, last, extremes and the first non-finite one of each stretch are kept."""
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


def _all_finite(values: Iterable[float]) -> bool:
    return all(math.isfinite(value) for value in values)


def outputs_of(run: Run) -> tuple[tuple[Output, ...], int]:
    """The outputs of at most 64 modules in forward order (conspicuous ones first choice), and the number of all."""
    seen = grouped(
        ((one.root, module.module), (one.step, module)) for one in run.of(Activations) for module in one.modules
    )
    several = len({root for root, _ in seen}) > 1
    outputs = [_output(f"{root_name(run, root)}.{name}".rstrip(".") if several else name, samples)
               for (root, name), samples in seen.items()]  # fmt: skip
    ranked = sorted(range(len(outputs)), key=lambda index: not outputs[index].stands_out)[:MOST_MODULES]
    return tuple(outputs[index] for index in sorted(ranked)), len(outputs)


def _output(name: str, samples: list[tuple[int, ModuleSample]]) -> Output:
    first, last = samples[0][1], samples[-1][1]
    known = {step: sample.percentiles for step, sample in samples if sample.percentiles}
    every = max(1, -(-len(known) // _MOST_SAMPLES))
    steps = tuple(step for place, step in enumerate(known) if place % every == 0 or place == len(known) - 1)
    return Output(
        name, last.cls, first.std, last.std, _largest(sample.absmax for _, sample in samples), last.zeros,
        last.always_dead, last.saturated, last.spread, len(samples), steps, tuple(known[step] for step in steps),
    )  # fmt: skip


def _largest(values: Iterable[float]) -> float:
    found = list(values)
    return next((value for value in found if math.isnan(value)), max(found))
