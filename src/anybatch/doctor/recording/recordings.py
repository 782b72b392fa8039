"""What all hooks share: the journal, the numbers, the clock, and the guard around everything that is done."""

import functools
import logging
import os
import threading
import time
from collections.abc import Callable
from typing import Any

from anybatch.doctor.recording.cycles import Cycle
from anybatch.doctor.recording.journal import Journal
from anybatch.doctor.recording.naming import user_frame, user_place
from anybatch.doctor.recording.numbering import Counter, Numbering
from anybatch.doctor.recording.patches import Patches
from anybatch.doctor.recording.sampling import Sampling
from anybatch.records.lines import Fact

logger = logging.getLogger(__name__)
_MOST_TEMPLATES = 256


class Templates:
    """Facts that others were like, so that what is done again and again is recorded by what differs only.

    A step that is not sampled is mostly like the one before: the same calls from the same lines of code. A hook then
    looks up, by all that it can see cheaply, the fact that it recorded the last time. Whatever it sees for the first
    time is recorded in full.

    Attributes:
        usable: whether a fact may be recorded as a repetition.
        known: the facts, by what makes another one like them.
        seconds: that hooks took with repetitions.
        locked: whether a hook is running that records in full.
        failed: is told of errors of the doctor's own.
        depths: how many frames lie between a kind of hook and the user's line.
    """

    def __init__(self, locked: Callable[[], bool], failed: Callable[[BaseException], None]) -> None:
        self.usable = False
        self.known: dict[Any, Any] = {}
        self.seconds = 0.0
        self.locked, self.failed = locked, failed
        self.depths: dict[str, int] = {}
        self._codes: list[Any] = []  # kept alive, since their ids are in the keys

    def given_up(self, error: BaseException) -> None:
        """Is told why a hook could not tell whether a fact is like one before, which is then recorded in full.

        Args:
            error: that was raised.

        Raises:
            KeyboardInterrupt, SystemExit: it was one of these, which are the user's.
        """
        if isinstance(error, (ValueError, IndexError)):  # the user's line does not lie as deep as it did
            self.depths.clear()
            return
        self.failed(error)
        if isinstance(error, (KeyboardInterrupt, SystemExit)):
            raise error

    def forget(self) -> None:
        """Has the next fact of each kind recorded in full."""
        self.known.clear()
        self.depths.clear()
        self._codes.clear()

    def learn(self, key: Any, fact: Any) -> None:
        """Takes note of a fact.

        Args:
            key: of what others have in common with it; ``None`` where that is not known.
            fact: that was emitted, and what else is to be found with it.
        """
        if key is not None:
            if len(self.known) >= _MOST_TEMPLATES:
                self.forget()
            else:
                self.known[key] = fact

    def look_for_site(self, kind: str, depth: int) -> bool:
        """Finds out how many frames there are between a hook and the user's line, which is then taken to stay so.

        What tells the line from others is read off that frame, which takes a fraction of the time of ``user_place``.

        Args:
            kind: of the hook.
            depth: how many frames to leave out.

        Returns:
            Whether it is news.
        """
        found = user_frame(depth + 1)
        if found is None:
            return False
        self._codes.append(found[1].f_code)
        away = found[0] - 2  # seen from the hook
        is_new = self.depths.get(kind) != away
        self.depths[kind] = away
        return is_new


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
        sampled_much: whether more is looked at than gradients and weights.
        own: seconds that the doctor itself has taken.
        failure: the first error of its own.
        in_scaler: whether a ``GradScaler`` is calling an optimizer.
        scaled: nodes of losses that came out of ``GradScaler.scale``, by ``id``.
        templates: of facts that are recorded again and again.
        cycle: of steps that are all alike.
    """

    def __init__(self, journal: Journal, counter: Counter, sampling: Sampling) -> None:
        self.journal, self.counter, self.sampling = journal, counter, sampling
        self.emit: Callable[[Fact], int] = journal.emit
        self.numbering = Numbering(journal.emit, counter)
        self.patches = Patches()
        self.active = True
        self.sampled = self.sampled_much = True
        self.own = 0.0
        self.failure = ""
        self.in_scaler = False
        self.scaled: dict[int, Any] = {}
        self.scale_of_loss: Callable[[Any], float | None] = lambda loss: None
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self.templates = Templates(self._lock.locked, self.failed)
        self.cycle = Cycle(journal, self.templates.depths, self.templates.given_up)

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
