"""The training loop as it ran: its calls with their counts, and one step event by event."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from anybatch.records.events import Backward, Cleared, Clipped, Epoch, Forward, Loaded, Scaler, Scheduled, Stepped
from anybatch.records.findings import Finding
from anybatch.records.lossfacts import LossCall
from anybatch.records.runs import Run

MOST_CALLS = 30
_MOST_MOMENTS = 24
_KINDS = (Forward, LossCall, Backward, Cleared, Clipped, Scaler, Stepped, Scheduled, Epoch, Loaded)
_ROW_OF: dict[type, str] = {
    LossCall: "loss", Backward: "backward", Cleared: "clear", Clipped: "clip", Stepped: "step", Scheduled: "schedule",
}  # fmt: skip
_ALWAYS = ("clear", "forward", "loss", "backward", "step")
_ROWS = ("clear", "forward", "loss", "backward", "clip", "step", "schedule", "evaluation", "data")


@dataclass(slots=True)
class Call:
    """A call by a line of the user's loop."""

    what: str  # the call in words, such as ``"backward"``
    file: str  # the file of the line; empty if unknown
    line: int
    times: int = 0  # the number of calls in the run
    first: int = 0  # the number of the event of its first call

    @property
    def where(self) -> str:
        """File and line in short."""
        return f"{PurePath(self.file).name}:{self.line}" if self.file else ""


def calls_of(run: Run) -> tuple[Call, ...]:
    """The 30 most frequent calls of the loop, in the order of their first call."""
    found: dict[tuple[str, str, int], Call] = {}
    seen: Iterable[Any] = run.of(*_KINDS)
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
            name = ".".join(part for part in (root_name(run, fact.root), fact.module) if part)
            return f"forward of {name}, {mode}{'' if fact.grad else ', no gradient'}"
        case LossCall():
            return fact.function
        case Backward():
            kept = ", graph retained" if fact.retain else ""
            return ("backward" if fact.function == "backward" else "autograd.grad") + kept
        case Cleared():
            name = {"optimizer": _optimizer(run, fact.number), "module": root_name(run, fact.number)}.get(fact.by, "")
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


def root_name(run: Run, number: int) -> str:
    """The variable of a model in the user's code, or its class."""
    root = run.roots.get(number)
    return (root.variable or root.cls if root else "") or f"model {number}"


def _optimizer(run: Run, number: int) -> str:
    optimizer = run.optimizers.get(number)
    return (optimizer.variable or optimizer.cls if optimizer else "") or f"optimizer {number}"


@dataclass(slots=True)
class Moment(Call):
    """An event of a step; consecutive repetitions by the same line are one moment."""

    row: str = ""  # the row of the page it is in, such as ``"backward"``
    codes: tuple[str, ...] = ()  # the codes of the findings at it


@dataclass(frozen=True, slots=True)
class StepOfLoop:
    """One step of the loop."""

    step: int
    rows: tuple[str, ...] = ()  # kinds of events, in the order of a usual loop; some may have no moment
    moments: tuple[Moment, ...] = ()
    more: int = 0  # the number of moments left out
    elsewhere: tuple[str, ...] = ()  # findings at no line of the step, with their lines


def step_of_loop(run: Run, findings: Sequence[Finding]) -> StepOfLoop | None:
    """One step, event by event: the step of the first finding, or the last complete step without findings."""
    seen: list[Any] = [fact for fact in run.of(*_KINDS) if _what(fact, run)]
    if not seen:
        return None
    stepped = Counter(one.step for one in seen if isinstance(one, Stepped))
    usual = Counter(stepped.values()).most_common(1)  # of a game both step, but for one at the first or the last
    last = max((step for step, times in stepped.items() if times == usual[0][0]), default=seen[-1].step)
    wanted = min(max(findings[0].step, 1), last) if findings else last  # a finding about a step is recorded after it
    step = min({fact.step for fact in seen}, key=lambda number: (abs(number - wanted), number))
    moments: list[Moment] = []
    for fact in (one for one in seen if one.step == step):
        moment = Moment(_what(fact, run), fact.file, fact.line, 1, fact.at, _row_of(fact))
        before = moments[-1] if moments else None
        if before is not None and (before.row, before.what, before.where) == (moment.row, moment.what, moment.where):
            before.times += 1
        else:
            moments.append(moment)
    elsewhere = _mark(moments, findings)
    used = {_row_of(fact) for fact in seen}
    rows = tuple(row for row in _ROWS if row in used or row in _ALWAYS)
    return StepOfLoop(step, rows, tuple(moments[:_MOST_MOMENTS]), max(0, len(moments) - _MOST_MOMENTS), elsewhere)


def _mark(moments: Sequence[Moment], findings: Sequence[Finding]) -> tuple[str, ...]:
    """Adds findings to the moments of their lines; returns the findings whose line is not in the step."""
    elsewhere = []
    for finding in findings:
        here = [one for one in moments if finding.place.file and one.where and one.file == finding.place.file]
        on_line = [one for one in here if one.line == finding.place.line]
        exact = [one for one in on_line if one.first == finding.at]
        for one in (exact or on_line)[:1]:
            one.codes = (*one.codes, finding.code or finding.name)
        if not on_line and finding.place.file:
            name, place = finding.code or finding.name, finding.place
            elsewhere.append(f"{name} at {PurePath(place.file).name}:{place.line}")
    return tuple(elsewhere)


def _row_of(fact: Any) -> str:
    if isinstance(fact, Forward):
        return "forward" if fact.training and fact.grad else "evaluation"
    if isinstance(fact, Scaler):
        return "step" if fact.call == "step" else "clip"
    return _ROW_OF.get(type(fact), "data")
