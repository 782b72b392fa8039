"""What a run called, from which lines and how often; and what its modules put out."""

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import PurePath
from typing import Any

from anybatch.records.events import (
    Backward,
    Cleared,
    Clipped,
    Epoch,
    Forward,
    Loaded,
    Scaler,
    Scheduled,
    Stepped,
)
from anybatch.records.lossfacts import LossCall
from anybatch.records.runs import Run
from anybatch.records.samples import Activations, ModuleSample
from anybatch.report.diagnosis_flow import plain

MOST_CALLS = 30
MOST_MODULES = 64
_NEARLY_ALL = 0.9


@dataclass(slots=True)
class Call:
    """One line of the user's that did something.

    Args:
        what: in words, such as ``"backward"``.
        file: of the line, empty if unknown.
        line: its number.
        times: how often in the run.
        first: the number of the event when it was first seen.
    """

    what: str
    file: str
    line: int
    times: int = 0
    first: int = 0

    @property
    def where(self) -> str:
        """File and line in short."""
        return f"{PurePath(self.file).name}:{self.line}" if self.file else ""


def calls_of(run: Run) -> tuple[Call, ...]:
    """The lines of the loop in the order in which they first ran.

    Args:
        run: its facts.

    Returns:
        At most ``MOST_CALLS`` lines, those that ran most often.

    Example:
        >>> facts = [Forward(root=0, at=1), Backward(at=2), Stepped(optimizer=0, at=3), Forward(root=0, at=4, step=1)]
        >>> [(call.what, call.times) for call in calls_of(Run(list(facts)))]
        [('forward of model 0, training', 2), ('backward', 1), ('step of optimizer 0', 1)]
    """
    found: dict[tuple[str, str, int], Call] = {}
    kinds = (Forward, LossCall, Backward, Cleared, Clipped, Scaler, Stepped, Scheduled, Epoch, Loaded)
    seen: Iterable[Any] = run.of(*kinds)
    for fact in seen:
        what = _what(fact, run)
        if what:
            key = (what, fact.file, fact.line)
            call = found.setdefault(key, Call(what, fact.file, fact.line, first=fact.at))
            call.times += 1
    often = sorted(found.values(), key=lambda call: -call.times)[:MOST_CALLS]
    return tuple(sorted(often, key=lambda call: call.first))


def _what(fact: Any, run: Run) -> str:
    match fact:
        case Forward():
            mode = "training" if fact.training else "evaluation"
            name = ".".join(part for part in (_root(run, fact.root), fact.module) if part)
            return f"forward of {name}, {mode}{'' if fact.grad else ', no gradient'}"
        case LossCall():
            return fact.function
        case Backward():
            kept = ", graph retained" if fact.retain else ""
            return ("backward" if fact.function == "backward" else "autograd.grad") + kept
        case Cleared():
            name = {"optimizer": _optimizer(run, fact.number), "module": _root(run, fact.number)}.get(fact.by, "")
            return f"gradients cleared, {name or 'by hand'}"
        case Clipped():
            return f"gradients clipped by {fact.by} to {fact.limit:g}"
        case Scaler():
            return f"scaler: {fact.call}{', skipped' if fact.skipped else ''}"
        case Stepped():
            return f"step of {_optimizer(run, fact.optimizer)}{', by the scaler' if fact.by == 'scaler' else ''}"
        case Scheduled():
            scheduler = run.schedulers.get(fact.scheduler)
            return f"step of {(scheduler.variable if scheduler else '') or f'scheduler {fact.scheduler}'}"
        case Epoch():
            return "" if fact.ended else "an epoch of a DataLoader"
        case Loaded():
            return f"state loaded into {fact.variable or fact.into}"
    return ""


def _root(run: Run, number: int) -> str:
    root = run.roots.get(number)
    return (root.variable or root.cls if root else "") or f"model {number}"


def _optimizer(run: Run, number: int) -> str:
    optimizer = run.optimizers.get(number)
    return (optimizer.variable or optimizer.cls if optimizer else "") or f"optimizer {number}"


@dataclass(frozen=True, slots=True)
class Output:
    """What one module put out, at the first and the last sampled step.

    Args:
        module: its name; empty for the model itself.
        cls: its class.
        first_std: the standard deviation of the output at the first sampled step.
        last_std: at the last one.
        absmax: the largest absolute value, over all sampled steps.
        zeros: share of entries that are zero, last.
        dead: share of units that were zero in all samples.
        saturated: share of entries at a limit, last; ``None`` where there are none.
        spread: over the batch, relative to the mean absolute value, last; ``None`` for a batch of one.
        samples: how many steps.
    """

    module: str
    cls: str
    first_std: float
    last_std: float
    absmax: float
    zeros: float
    dead: float
    saturated: float | None
    spread: float | None
    samples: int

    @property
    def stands_out(self) -> bool:
        """Whether nearly all of it is dead or saturated, or some of it is not finite."""
        return self.dead > _NEARLY_ALL or (self.saturated or 0) > _NEARLY_ALL or not math.isfinite(self.absmax)

    def to_dict(self) -> dict[str, Any]:
        """The fields as plain values for JSON."""
        return {name: plain(value) if isinstance(value, float) else value for name, value in asdict(self).items()}


def outputs_of(run: Run) -> tuple[tuple[Output, ...], int]:
    """What each module put out, in forward order.

    Args:
        run: its facts.

    Returns:
        At most ``MOST_MODULES``, those that stand out always among them; and how many there are in all.
    """
    seen: dict[tuple[int, str], list[ModuleSample]] = {}
    for one in run.of(Activations):
        for module in one.modules:
            seen.setdefault((one.root, module.module), []).append(module)
    several = len({root for root, _ in seen}) > 1
    outputs = [_output(f"{_root(run, root)}.{name}".rstrip(".") if several else name, samples)
               for (root, name), samples in seen.items()]  # fmt: skip
    ranked = sorted(range(len(outputs)), key=lambda index: not outputs[index].stands_out)[:MOST_MODULES]
    return tuple(outputs[index] for index in sorted(ranked)), len(outputs)


def _output(name: str, samples: list[ModuleSample]) -> Output:
    last = samples[-1]
    return Output(
        name, last.cls, samples[0].std, last.std, _largest(sample.absmax for sample in samples), last.zeros,
        last.always_dead, last.saturated, last.spread, len(samples),
    )  # fmt: skip


def _largest(values: Iterable[float]) -> float:
    found = list(values)
    return next((value for value in found if math.isnan(value)), max(found))
