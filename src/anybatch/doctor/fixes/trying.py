"""Whether a fix that was tried is good: judged by what the run with it shows, beside the same run without it."""

import math
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from anybatch.doctor.fixes import graph, order, wiring
from anybatch.doctor.fixes.scene import MAKERS, edits
from anybatch.doctor.fixes.source import Edit, UserSource
from anybatch.doctor.rules.bounds import out_of_bound
from anybatch.doctor.rules.registry import all_rules
from anybatch.doctor.views.courses import Course, course
from anybatch.records.diagnoses import Diagnosis
from anybatch.records.events import Ended
from anybatch.records.findings import Finding
from anybatch.records.runs import Run

FAMILIES = (wiring, order, graph)
"""Loaded for what they put into the table of edits."""

LEAST_STEPS = 60
_BEST_OF = frozenset({"LR_TOO_HIGH", "LR_TOO_LOW", "EXPLODING"})
"""Findings of which all edits are tried, since they are several sizes of the same one: the lowest loss decides."""
_LONGER = 20  # steps past the one at which a finding was complete
_SLACK = 0.1  # of the first loss: how much less far it may fall and still count as falling as far
_OTHER = 0.25  # of a first loss: what differs by more, before any step, is another quantity
_SLOWER = frozenset(
    {"EVAL_IN_TRAINING", "DROPOUT_NEVER_ON", "FROZEN_BN_DRIFT", "FREEZE_INEFFECTIVE", "LEAK_TO_OTHER_NET",
     "LOSS_TERM_CUT", "SOFTMAX_DIM", "TARGETS_CONSTANT", "ACCUM_NOT_DIVIDED", "ACCUM_FIRST_WINDOW", "CLIP_NO_EFFECT",
     "ZERO_GRAD_MISSING", "LR_TOO_HIGH", "EXPLODING", "DATA_ORDER", "GRAPH_GROWS", "INPLACE_ON_SAVED",
     "LR_IGNORED_ON_RESUME", "SCHED_STALE_OPT"}
)  # fmt: skip
"""Faults without which a loss may fall less far: it was too easy, lacked a term, or took steps that are too long."""


@dataclass(frozen=True, slots=True)
class Tried:
    """A run of a script on trial."""

    diagnosis: Diagnosis  # of the run
    run: Run  # its facts
    refused: str = ""  # what it wanted to do that a trial may not; empty for a run that was whole
    late: bool = False  # whether it was stopped because its time was over
    code: int = 0  # its exit code, 0 too if it was ended after its steps

    @property
    def unusable(self) -> str:
        """Why nothing can be concluded from it; empty where something can."""
        if self.refused:
            return f"the script would {self.refused}"
        return "it takes too long" if self.late else ""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of the fix of one finding."""

    edit: Edit | None  # that was tried and is good, ``None`` without
    said: str  # what the trial has shown, or why there is none
    trial: Tried | None = None  # the run with the edit, ``None`` without


Start = Callable[[Edit | None], Tried]
"""Runs the script with an edit, or without, on top of the edits that were found good before."""


def steps_for(findings: Iterable[Finding]) -> int:
    """After how many steps a trial of some findings may end."""
    return max([LEAST_STEPS, *(one.step + _LONGER for one in findings)])


def with_edits(diagnosis: Diagnosis) -> list[Finding]:
    """Those findings for whose names there are edits: causes, and what is a note since it did no harm yet."""
    rules = all_rules()
    causes = [one for one in diagnosis.findings if not one.consequence_of and one.name in MAKERS]
    return [one for one in causes if one.severity != "info" or rules[one.name].slows]


def tried(
    finding: Finding, run: Run, read: Callable[[str], UserSource], without: Callable[[], Tried], start: Start, most: int
) -> Outcome:
    """Tries the edits of one finding until one is good."""
    reasons: list[str] = []
    good: list[Outcome] = []
    for edit in edits(finding, run, read, most):
        before = without()
        if why := _untold(finding, run, before):
            return Outcome(None, f"not tried: {why}")
        after = start(edit)
        reason = worse(finding, before, after)
        if reason:
            reasons.append(reason)
            continue
        good.append(Outcome(edit, shown(finding, before, after), after))
        if finding.name not in _BEST_OF:
            break
    if good:
        return min(good, key=_end)
    if not reasons:
        return Outcome(None, "no edit of the source is clear enough to be tried")
    number = "an edit was tried and is" if len(reasons) == 1 else f"{len(reasons)} edits were tried and are"
    return Outcome(None, f"{number} no good: {'; '.join(dict.fromkeys(reasons))}")


def _untold(finding: Finding, run: Run, before: Tried) -> str:
    """Why a run on trial without an edit is nothing to compare with; empty if it is."""
    if before.unusable:
        return before.unusable
    ended = next(run.of(Ended), None)
    if before.code != 0 and ended is not None and ended.exit_code == 0:
        return "the script fails in a trial, without any edit"
    return "" if _found(finding, before.diagnosis) else "in a trial without the fix it is not found either"


def _end(outcome: Outcome) -> float:
    """Where the loss ends with an edit."""
    last = math.inf if outcome.trial is None else course(outcome.trial.run).last
    return last if math.isfinite(last) else math.inf


def worse(finding: Finding, before: Tried, after: Tried) -> str:
    """Why an edit is no good; empty if it is."""
    if after.unusable:
        return after.unusable
    if after.code != 0:
        return "the script fails with it"
    if _found(finding, after.diagnosis) >= _found(finding, before.diagnosis):
        return f"{finding.name} is still found"
    below = out_of_bound(after.run)
    if not finding.code.startswith("AB6"):  # else what was out of its bound should have come back into it
        below -= out_of_bound(before.run)
    if below:
        return f"{min(below)} is below its bound with it"
    known = {one.name for one in before.diagnosis.findings}  # notes, too, which may only now be worth a warning
    new = [one.name for one in after.diagnosis.causes if not known & {one.name, one.consequence_of}]
    if new:
        return f"{new[0]} is found with it"
    if (after.diagnosis.verdict == "undecided" and after.run.steps == 0) or 2 * after.run.steps < before.run.steps:
        return f"only {after.run.steps} steps are done with it"
    says_nothing = before.code != 0 or bool(out_of_bound(before.run))
    return _worse_loss(finding, course(before.run), course(after.run), says_nothing=says_nothing)


def _found(finding: Finding, diagnosis: Diagnosis) -> int:
    return Counter(one.name for one in diagnosis.findings)[finding.name]


def _worse_loss(finding: Finding, before: Course, after: Course, *, says_nothing: bool) -> str:
    if not after.values:
        return ""  # of a script whose losses were not seen, the findings tell
    if after.diverged or not after.finite:
        return "the loss is not finite with it"
    if says_nothing or before.diverged or not before.finite:
        return (
            ""
            if _fall(after) > -_SLACK
            else f"the loss rises with it from {_number(after.first)} to {_number(after.last)}"
        )
    if min(after.finite) < 0 <= min(before.finite) and _is_other(before, after):
        return f"the loss is another quantity with it, and falls below 0, to {_number(after.last)}"
    if _fall(after) >= _fall(before) - _SLACK:
        return ""
    if finding.name in _SLOWER and after.last <= after.first * 1.05 + 2 * after.noise:
        return ""
    return f"the loss ends at {_number(after.last)} with it, at {_number(before.last)} without"


def _fall(values: Course) -> float:
    """How far a loss fell, as a part of what it began with."""
    return (values.first - values.last) / max(abs(values.first), abs(values.last), 1e-12)


def _is_other(before: Course, after: Course) -> bool:
    """Whether an edit changes what the loss measures, or its scale, as it differs before anything is learned."""
    first, other = before.first, after.first
    return abs(first - other) > _OTHER * max(abs(first), abs(other)) + 2 * max(before.noise, after.noise)


def shown(finding: Finding, before: Tried, after: Tried) -> str:
    """What a good trial has shown."""
    steps, was, now = after.run.steps, course(before.run), course(after.run)
    if before.code != 0:
        without = "without: the script fails"
    elif was.diverged or not was.finite:
        without = "without: it is not finite"
    else:
        without = f"without: {_words(was)}{', which is another quantity' * _is_other(was, now)}"
    if not now.finite:
        return f"tried: in {steps} steps {finding.name} is gone, and nothing else is found"
    return f"tried: the loss {_words(now)} in {steps} steps, and {finding.name} is gone ({without})"


def _words(values: Course) -> str:
    first, last = values.first, values.last
    if not math.isfinite(first) or abs(first - last) <= max(2 * values.noise, 0.02 * abs(first)):
        return f"stays at {_number(last)}"
    return f"{'falls' if last < first else 'rises'} from {_number(first)} to {_number(last)}"


def _number(value: float) -> str:
    return f"{value:.3g}" if abs(value) < 0.995 or abs(value) >= 999.5 else f"{value:.2f}"
