"""What all hooks share: the journal, the numbers, the clock, and the guard around everything that is done."""

import functools
import logging
import os
import threading
import time
from collections.abc import Callable
from typing import Any

from anybatch.doctor.recording.journal import Journal
from anybatch.doctor.recording.naming import user_place
from anybatch.doctor.recording.numbering import Counter, Numbering
from anybatch.doctor.recording.patches import Patches
from anybatch.doctor.recording.sampling import Sampling
from anybatch.records.lines import Fact

logger = logging.getLogger(__name__)


class Recording:
    """The state of one run that is recorded.

    Args:
        journal: takes the facts.
        counter: where in the run it is.
        sampling: decides which steps are sampled.

    Attributes:
        numbering: of parameters, models, optimizers and schedulers.
        patches: what was replaced.
        active: whether anything is recorded.
        sampled: whether this step is sampled.
        own: seconds that the doctor itself has taken.
        failure: the first error of its own.
        in_scaler: whether a ``GradScaler`` is calling an optimizer.
    """

    def __init__(self, journal: Journal, counter: Counter, sampling: Sampling) -> None:
        self.journal, self.counter, self.sampling = journal, counter, sampling
        self.emit: Callable[[Fact], int] = journal.emit
        self.numbering = Numbering(journal.emit, counter)
        self.patches = Patches()
        self.active = True
        self.sampled = True
        self.own = 0.0
        self.failure = ""
        self.in_scaler = False
        self.scale_of_loss: Callable[[Any], float | None] = lambda loss: None
        self._pid = os.getpid()
        self._lock = threading.Lock()

    def guarded(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """A function that is timed, that never raises, and that does nothing while another one of these runs.

        Args:
            function: of the doctor, which is called out of the user's run; ``None`` is its answer where it did not run.
        """
        lock, pid, clock = self._lock, self._pid, time.perf_counter

        @functools.wraps(function)
        def guard(*args: Any, **kwargs: Any) -> Any:
            if not lock.acquire(blocking=False):
                return None
            started = clock()
            try:
                return function(*args, **kwargs) if self.active and os.getpid() == pid else None
            except BaseException as error:  # the user's run goes on, whatever happens in here
                self.failed(error)
                if isinstance(error, (KeyboardInterrupt, SystemExit)):
                    raise
            finally:
                self.own += clock() - started
                lock.release()

        return guard

    def failed(self, error: BaseException) -> None:
        """Notes an error of the doctor's own.

        Args:
            error: that a hook raised.
        """
        if not self.failure:
            self.failure = f"{type(error).__name__}: {error}"
            logger.debug("the doctor failed", exc_info=error)

    def place(self) -> dict[str, Any]:
        """The user's line, as entries of a fact."""
        file, line = user_place(3)
        return {"file": file, "line": line}
