"""What happens during a run: the rules run now and then, findings are given to a callback, and a run can end."""

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from anybatch.doctor.diagnosing import OUTCOMES, diagnose
from anybatch.doctor.policy import Policy, is_among
from anybatch.records.events import Stepped
from anybatch.records.findings import Finding
from anybatch.records.runs import Run
from anybatch.records.samples import NonFinite

if TYPE_CHECKING:
    from anybatch.doctor.recorder import Doctor

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
        self._flat: set[str] = set()  # names of outcomes that were found the last time

    def is_due(self, step: int, *, not_finite: bool = False) -> bool:
        """Whether it is time to run the rules."""
        return step >= self._due or (not_finite and not self._seen_not_finite)

    def news(self, run: Run, step: int, *, has_ended: bool = False) -> tuple[Finding, ...]:
        """New findings: errors and warnings that are no consequence of another one, and those of non-finite numbers.

        Those that only a whole run can show (codes AB8..) are left out until it has ended, and that nothing is learned
        until it is found a second time, three times as many steps later: what is hard at first is flat at first.
        """
        while self._due <= step:
            self._due = self._due * 3 if str(self._due)[0] == "1" else self._due // 3 * 10
        self._seen_not_finite |= next(run.of(NonFinite), None) is not None
        found = self._told(diagnose(run if has_ended else _whole_steps(run), self._policy), has_ended=has_ended)
        if self._seen_not_finite and not any(one.name in NOT_FINITE for one in found):
            found += self._told(one for one in diagnose(run, self._policy) if one.name in NOT_FINITE)
        flat, before = {one.name for one in found} & OUTCOMES, self._flat
        self._flat = flat
        found = [one for one in found if has_ended or one.name not in flat - before]
        new = {_key(one): one for one in found if _key(one) not in self._known}
        self._known |= new.keys()
        return tuple(new.values())

    def _told(self, findings: Iterable[Finding], *, has_ended: bool = False) -> list[Finding]:
        roots = (one for one in findings if not one.consequence_of or one.name in NOT_FINITE)
        told = (one for one in roots if has_ended or not one.code.startswith(_AT_THE_END))
        return [one for one in told if one.severity != "info"]


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


_SHARE = 0.01  # of the run's time that judging it within its own process may take
_SECONDS = 0.2  # that a first judgement is taken to last


class AfterStep:
    """Calls ``then`` with their number after each step of any optimizer, as one of torch's hooks; it may raise."""

    def __init__(self, doctor: "Doctor", then: Callable[[int], None]) -> None:
        from torch.optim.optimizer import register_optimizer_step_post_hook  # none is there before torch

        self._doctor, self._then = doctor, then
        self._handle = register_optimizer_step_post_hook(self)

    def __call__(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Is called by torch."""
        self._then(self._doctor.step)

    def __reduce__(self) -> Any:
        """Nothing, in a pickle with the code of a step, as ``cloudpickle`` makes one: torch's hooks come with it."""
        return SimpleNamespace, (), {"_then": nullcontext().__exit__}

    def detach(self) -> None:
        """Removes the hook."""
        self._handle.remove()


class Telling:
    """Runs the rules during a run, in its own process, and gives each finding to a callback once.

    The rules wait until they are expected to cost less than 1 % of the time so far; the first non-finite number is
    judged at once.
    """

    def __init__(self, doctor: "Doctor", on_finding: Callable[[Finding], None]) -> None:
        self._doctor, self._on_finding = doctor, on_finding
        self._judge = Judge()
        self._began = time.perf_counter()
        self._cost, self._judged = _SECONDS, 0
        self._is_odd = False

    def __call__(self, step: int) -> None:
        """Judges, if it is time."""
        odd = self._doctor.not_finite and not self._is_odd
        if not self._judge.is_due(step, not_finite=odd):
            return
        expected = self._cost * (step / self._judged if self._judged else 1.0)
        if not odd and expected > _SHARE * (time.perf_counter() - self._began):
            return
        self._is_odd |= odd
        self.tell(step)

    def tell(self, step: int, *, has_ended: bool = False) -> None:
        """Runs the rules now."""
        started = time.perf_counter()
        found = self._judge.news(self._doctor.run, step, has_ended=has_ended)
        self._cost, self._judged = time.perf_counter() - started, max(step, 1)
        for one in found:
            self._on_finding(one)
