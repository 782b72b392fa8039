"""Runs the rules during a run: at steps 10, 30, 100, 300 and so on, and at the first non-finite number."""

from collections.abc import Iterable, Sequence

from anybatch.doctor.diagnosing import diagnose
from anybatch.doctor.policy import Policy, is_among
from anybatch.records.events import Stepped
from anybatch.records.findings import Finding
from anybatch.records.runs import Run
from anybatch.records.samples import NonFinite

NOT_FINITE = ("NAN_IN_FORWARD", "NAN_IN_BACKWARD")
_FIRST = 10
_AT_THE_END = "AB8"  # what probes tell, and what is like it: it is said of a whole run


class Judge:
    """Runs all rules at growing intervals, and gives each finding once.

    Together this takes about half as long again as the diagnosis at the end of the run.

    Example:
        >>> judge = Judge()
        >>> [step for step in range(2000) if judge.is_due(step) and judge.news(Run([]), step) == ()]
        [10, 30, 100, 300, 1000]
    """

    def __init__(self, policy: Policy | None = None) -> None:
        self._policy = policy or Policy()
        self._due = _FIRST
        self._seen_not_finite = False
        self._known: set[tuple[str, str, str, int]] = set()

    def is_due(self, step: int, *, not_finite: bool = False) -> bool:
        """Whether it is time to run the rules."""
        return step >= self._due or (not_finite and not self._seen_not_finite)

    def news(self, run: Run, step: int) -> tuple[Finding, ...]:
        """New findings: errors and warnings that are no consequence of another one, and those of non-finite numbers.

        Those that only a whole run can show (codes AB8..) are left out.
        """
        while self._due <= step:
            self._due = self._due * 3 if str(self._due)[0] == "1" else self._due // 3 * 10
        self._seen_not_finite |= next(run.of(NonFinite), None) is not None
        found = self._told(diagnose(_whole_steps(run), self._policy))
        if self._seen_not_finite and not any(one.name in NOT_FINITE for one in found):
            found += self._told(one for one in diagnose(run, self._policy) if one.name in NOT_FINITE)
        new = {_key(one): one for one in found if _key(one) not in self._known}
        self._known |= new.keys()
        return tuple(new.values())

    def _told(self, findings: Iterable[Finding]) -> list[Finding]:
        roots = (one for one in findings if not one.consequence_of or one.name in NOT_FINITE)
        return [one for one in roots if one.severity != "info" and not one.code.startswith(_AT_THE_END)]


def is_met(one: Finding, stop_on: Sequence[str]) -> bool:
    """Whether a finding is one of those that end the run.

    Example:
        >>> is_met(Finding("", severity="error", code="AB555", name="NAN_IN_FORWARD"), ["NAN"])
        True
    """
    if ("NAN" in stop_on and one.name in NOT_FINITE) or ("ERROR" in stop_on and one.severity == "error"):
        return True
    return is_among(one, [code for code in stop_on if code not in ("NAN", "ERROR")])


def sentence_of(one: Finding) -> str:
    """A finding on one line, as it is shown during a run."""
    place = f" ({one.place})" if str(one.place) else ""
    return " ".join(f"step {one.step}: {one.severity} {one.code} {one.message}{place}".split())


def _whole_steps(run: Run) -> Run:
    """The run up to its last step, so that no rule takes one that goes on for one that was left out."""
    last = max((one.at for one in run.of(Stepped)), default=None)
    return run if last is None else Run([one for one in run.facts if one.at <= last])


def _key(one: Finding) -> tuple[str, str, str, int]:
    return one.code, one.place.module, one.place.file, one.place.line
