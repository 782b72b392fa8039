"""What all hooks share: the journal, the numbers, the clock, and the guard around everything that is done."""

import functools
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from threading import get_ident
from typing import Any

import torch

from anybatch.doctor.interruptions import is_interruption
from anybatch.doctor.recording.cycles import Cycle, Standing
from anybatch.doctor.recording.journal import Journal
from anybatch.doctor.recording.naming import user_frame, user_place
from anybatch.doctor.recording.numbering import Counter, Numbering
from anybatch.doctor.recording.patches import Patches
from anybatch.doctor.recording.sampling import Sampling
from anybatch.doctor.recording.threads import TrainingThread
from anybatch.records.events import ThreadsAtOnce
from anybatch.records.lines import Fact
from anybatch.tensors.dispatch import is_watched, nobody_looks

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
        lock: is held by the hook that is running.
        failed: is told of errors of the doctor's own.
        depths: how many frames lie between a kind of hook and the user's line.
    """

    def __init__(self, lock: threading.Lock, failed: Callable[[BaseException], None]) -> None:
        self.usable = False
        self.known: dict[Any, Any] = {}
        self.seconds = 0.0
        self.lock, self.failed = lock, failed
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
        if is_interruption(error):
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
        scaled: losses that came out of ``GradScaler.scale``.
        templates: of facts that are recorded again and again.
        cycle: of steps that are all alike.
        threads: say whose events are recorded.
        on_leave: is told of the end of steps that were all alike, see ``Cycle``.
    """

    def __init__(self, journal: Journal, counter: Counter, sampling: Sampling) -> None:
        self.journal, self.counter, self.sampling = journal, counter, sampling
        self.emit: Callable[[Fact], int] = journal.emit
        self.numbering = Numbering(journal.emit, counter)
        self.patches = Patches()
        self.active = self._active = True
        self.sampled = self.sampled_much = True
        self.own = 0.0
        self.failure = ""
        self.in_scaler = False
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self.threads = TrainingThread(self._lock, self._knows, self._several)
        self._holder = 0  # the thread of the guarded function that runs
        self._waiting: deque[Fact] = deque()
        self.templates = Templates(self._lock, self.failed)
        self.cycle = Cycle(journal, self.templates.depths, self.templates.given_up)
        self.cycle.on_leave, self.cycle.threads = self._left, self.threads
        self.scaled = self.cycle.scaled
        self.on_leave: Callable[[Standing], None] = lambda standing: None
        journal.leave = self._leave

    def guarded(self, function: Callable[..., Any], *, everywhere: bool = False) -> Callable[..., Any]:
        """A function that is timed, that never raises, and that does nothing while another one of these runs.

        Args:
            function: of the doctor, which is called out of the user's run; ``None`` is its answer where it did not run.
            everywhere: whether it runs in other threads too while the one that is recorded is in the middle of
                something; it looks at no tensor then, and has ``tell`` take its facts.
        """
        lock, pid, clock = self._lock, self._pid, time.perf_counter
        threads, waiting = self.threads, self._waiting

        @functools.wraps(function)
        def guard(*args: Any, **kwargs: Any) -> Any:
            elsewhere = threads.ident != get_ident() and threads.elsewhere()
            if elsewhere and everywhere:
                return self._beside(function, args, kwargs)
            if elsewhere and threads.inside:
                return None
            if not lock.acquire(blocking=False) and (self._holder in (0, get_ident()) or not threads.acquires()):
                return None
            self._holder, started = get_ident(), clock()
            try:
                if waiting:
                    self.take_in()
                if not self.active or os.getpid() != pid:
                    return None
                if not is_watched():
                    return function(*args, **kwargs)
                with nobody_looks():  # by what the user counts operations with, say
                    return function(*args, **kwargs)
            except BaseException as error:  # the user's run goes on, whatever happens in here
                self.failed(error)
                if is_interruption(error):
                    raise
            finally:
                self.own += clock() - started
                self._holder = 0
                lock.release()

        return guard

    def _beside(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Runs a function of the doctor in another thread than the one that is recorded."""
        try:
            return function(*args, **kwargs) if self.active and os.getpid() == self._pid else None
        except BaseException as error:  # the user's run goes on, whatever happens in here
            self.failed(error)
            if is_interruption(error):
                raise

    def look_away(self) -> None:
        """Ends steps that were followed, and lets no hook run until ``look_again``."""
        self.cycle.leave()
        self._active, self.active = self.active, False
        self.threads.look_away()

    def look_again(self) -> None:
        """Lets hooks run as before."""
        self.threads.look_again()
        self.active = self._active and not self.threads.is_over

    @property
    def is_busy(self) -> bool:
        """Whether a hook is running whose time is counted."""
        return self._lock.locked()

    def tell(self, fact: Fact) -> None:
        """Emits a fact in any thread; that of another one comes with the next hook of the one that is recorded.

        Args:
            fact: without its number and step.
        """
        if self.threads.elsewhere():
            self._waiting.append(fact)
        else:
            self.emit(fact)

    def take_in(self) -> None:
        """Emits the facts of other threads."""
        while self._waiting:
            self.emit(self._waiting.popleft())

    def _knows(self, one: Any) -> bool:
        """Whether a model or an optimizer, or a part of it, was seen before."""
        numbering = self.numbering
        if isinstance(one, torch.nn.Module):
            return numbering.root_of(one) is not None or any(numbering.known(p) is not None for p in one.parameters())
        tensors = [tensor for group in getattr(one, "param_groups", ()) for tensor in group["params"]]
        return numbering.known_optimizer(one) >= 0 or any(numbering.known(tensor) is not None for tensor in tensors)

    def _several(self) -> None:
        """Ends the record."""
        file, line = user_place(2)
        self.cycle.follow_again()  # first, so that nothing comes behind the end
        self.emit(ThreadsAtOnce(turns=self.threads.turns, file=file, line=line))
        self.active = self.templates.usable = self.cycle.on = False

    def _leave(self) -> None:
        """Ends steps that were followed, which another thread can't while this one is in the middle of something."""
        if not (self.threads.inside and self.threads.elsewhere()):
            self.cycle.leave()

    def _left(self, standing: Standing) -> None:
        """Has the state looked at after steps that were followed; no other thread begins to train while it is."""
        held = self._lock.acquire(blocking=False)  # it is held where a hook leaves
        try:
            self.on_leave(standing)
        finally:
            if held:
                self._lock.release()

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
