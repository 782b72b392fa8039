"""What happens between the steps of a run: findings are given to a callback, and a run can end after some steps."""

import time
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from torch.optim.optimizer import register_optimizer_step_post_hook

from anybatch.doctor.judging import Judge
from anybatch.records.findings import Finding

if TYPE_CHECKING:
    from anybatch.doctor.recorder import Doctor

_SHARE = 0.01  # of the run's time that judging it within its own process may take
_SECONDS = 0.2  # that a first judgement is taken to last


class AfterStep:
    """Calls a function after each step of any optimizer, as one of torch's hooks.

    Args:
        then: is called with the number of steps; its exceptions reach the user's code.
    """

    def __init__(self, doctor: "Doctor", then: Callable[[int], None]) -> None:
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

    def tell(self, step: int) -> None:
        """Runs the rules now."""
        started = time.perf_counter()
        found = self._judge.news(self._doctor.run, step)
        self._cost, self._judged = time.perf_counter() - started, max(step, 1)
        for one in found:
            self._on_finding(one)
