"""The verdict on a run: ``"learning"`` only if that was seen, else why not."""

from collections.abc import Iterable, Sequence

from anybatch.doctor.ranking import OUTCOMES
from anybatch.doctor.views.courses import updates
from anybatch.doctor.views.outcomes import outcome
from anybatch.records.diagnoses import INTERRUPTED, Verdict, missing_of
from anybatch.records.events import Backward, Crashed, Ended, Stepped
from anybatch.records.findings import Finding
from anybatch.records.runs import Run
from anybatch.records.samples import Norms

_MOST_NAMES = 3


def verdict_on(run: Run, findings: Iterable[Finding], unexamined: Sequence[str]) -> tuple[Verdict, str]:
    """The verdict on a run, and its reason; what could not be examined keeps it from being ``"learning"``."""
    crash = next(iter(list(run.of(Crashed))[-1:]), None)
    ended = next(run.of(Ended), Ended())
    if crash is not None:
        return "crashed", f"{crash.error}: {crash.text}".strip(": \n")
    if ended.exit_code not in (None, 0, INTERRUPTED):
        return "crashed", f"it ended with exit code {ended.exit_code}"
    grave = [one for one in findings if one.severity != "info"]
    if grave:
        only = all(one.name in OUTCOMES or one.consequence_of in OUTCOMES for one in grave)
        return ("not learning", grave[0].message) if only else ("faults", grave[0].message)
    if unexamined:
        return "undecided", f"not all was examined: {missing_of(unexamined)}"
    if not updates(run):
        return "undecided", "no optimizer stepped"
    unseen = _unseen(run)
    if unseen:
        more = f" and {len(unseen) - _MOST_NAMES} more" if len(unseen) > _MOST_NAMES else ""
        return (
            "undecided",
            f"not every trained parameter was looked at and named: {', '.join(unseen[:_MOST_NAMES])}{more}",
        )
    found = outcome(run)
    if ended.exit_code == INTERRUPTED:
        return "undecided", f"it was interrupted, and {found.said}"
    return ("learning" if found.word == "learning" else "undecided"), found.said


def _unseen(run: Run) -> list[str]:
    """Parameters that an optimizer stepped and that were not looked at, or for which no name was found."""
    seen = {number for one in run.of(Norms) for number in one.parameters}
    seen |= {number for one in run.of(Backward) for number in one.touched or ()}
    found = []
    for optimizer in sorted({one.optimizer for one in run.of(Stepped)} & run.optimizers.keys()):
        for number in (one for group in run.optimizers[optimizer].groups for one in group.parameters):
            facts = run.parameters.get(number)
            if facts is None:
                found.append(f"parameter {number} of {run.optimizers[optimizer].variable or 'the optimizer'}")
            elif facts.requires_grad and (number not in seen or ".param_groups[" in facts.name):
                found.append(facts.name)
    return found
