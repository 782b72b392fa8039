"""What all hooks share: the journal, the numbers, the clock, and the guard around everything that is done."""

import functools
import logging
import os
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Collection
from threading import get_ident
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch

from anybatch.doctor.interruptions import is_interruption
from anybatch.doctor.recording.journal import Journal
from anybatch.doctor.recording.naming import USERS, user_place, whose_file
from anybatch.doctor.recording.numbering import Counter, Numbering
from anybatch.doctor.recording.patches import Patches
from anybatch.doctor.recording.sampling import Sampling
from anybatch.doctor.recording.scaledlosses import ScaledLosses
from anybatch.doctor.recording.threads import TrainingThread
from anybatch.records.events import Stepped, ThreadsAtOnce
from anybatch.records.lines import Fact
from anybatch.tensors.dispatch import is_watched, nobody_looks
from anybatch.torch_private import number_of_modes

logger = logging.getLogger(__name__)
_MOST_KNOWN = 2048
_MOST_ASKED = 64


class Seen(NamedTuple):
    """A fact that comes again.

    Args:
        fact: as it was recorded in full.
        state: stands for the events of the step up to it.
        owner: a weak reference to the object whose call it is.
        parameters: whose gradients it has added to, cleared or used, by number.
        code: of the user's function that makes the call.
        place: in that code.
        depth: of its frame.
    """

    fact: Any
    state: int
    owner: Callable[[], Any]
    parameters: Collection[int]
    code: CodeType
    place: int
    depth: int


class Known:
    """Facts that were recorded in full, so that what comes again and again is recorded by what differs only.

    A step that is not sampled is mostly like the one before: the same calls from the same lines of code. Each is known
    by the user's code that makes it, the place in that code, what can be seen of it cheaply, and the events of this
    step before it. Gradients need not be looked at then: a backward after the same calls adds to as many as it did.
    Whatever is seen for the first time is recorded in full, and its line is looked up, once.

    Attributes:
        usable: whether a fact may be recorded as a repetition.
        key: of the event that was asked about last, where it was not like one before.
        state: stands for the events of this step so far, in their order.
    """

    __slots__ = ("_last", "_seen", "_sites", "key", "state", "usable")

    def __init__(self) -> None:
        self._seen: dict[Any, Seen] = {}
        self._last: dict[Any, Seen] = {}  # of each kind
        self._sites: dict[Any, tuple[CodeType, int]] = {}  # of events that were asked about, until they are learnt
        self.usable = False
        self.key: Any = None
        self.state = 0

    def find(self, what: tuple[Any, ...]) -> Seen | None:
        """The fact that an event is like; ``None`` where there is none, which may be learnt by its ``key`` then.

        Args:
            what: the kind of the event, and what else of it may differ, but for the entries of ``DIFFERING``; at the
                end ``state``.
        """
        seen = self._last.get(what)
        if seen is not None:
            try:  # the frame is mostly as deep as it was; those above it are not made for that
                frame = sys._getframe(seen.depth)
            except ValueError:
                return self._look_for(what)
            if frame.f_lasti == seen.place and frame.f_code is seen.code:
                return seen
        return self._look_for(what)

    def _look_for(self, what: tuple[Any, ...]) -> Seen | None:
        """Goes through the frames as ``user_place`` does, for a fact that is known or has to be learnt."""
        self.key, depth, found = None, 0, None
        frame: FrameType | None = sys._getframe(2)
        while frame is not None:
            depth += 1
            whose = whose_file(frame.f_code.co_filename)
            if (whose and found is None) or whose == USERS:
                found = depth, frame.f_code, frame.f_lasti
            if whose == USERS:
                break
            frame = frame.f_back
        if found is None:
            return None
        depth, code, place = found
        key = id(code), place, what
        seen = self._seen.get(key)
        if seen is None:
            if len(self._sites) >= _MOST_ASKED:
                self._sites.clear()
            self.key, self._sites[key] = key, (code, depth)
            return None
        self._last[what] = seen = seen._replace(depth=depth)
        return seen

    def take_key(self) -> Any:
        """The key of the event that was asked about last, which is forgotten here."""
        key, self.key = self.key, None
        return key

    def passed(
        self, fact: Any, *what: Any, key: Any = None, owner: Any = None, parameters: Collection[int] = ()
    ) -> None:
        """Takes note of a fact that was emitted: as what the next one comes after, and as one that may come again.

        Args:
            fact: of the user's line.
            what: that it was, but for what may differ from step to step, such as the rows of a batch.
            key: of the event, where it has nothing that others like it don't have.
            owner: the object whose call it is.
            parameters: whose gradients it has added to, cleared or used, by number.
        """
        before, is_step = self.state, type(fact) is Stepped
        self.state = hash((None if is_step else before, type(fact), fact.file, fact.line, what))
        if key is not None and key[2][-1] == before and self.usable and (found := self._site(key)) is not None:
            if len(self._seen) >= _MOST_KNOWN:
                self.forget()
            else:
                reference = _nobody if owner is None else weakref.ref(owner)
                self._seen[key] = self._last[key[2]] = Seen(fact, self.state, reference, parameters, *found)

    def forget(self, key: Any = None) -> None:
        """Has the next fact of each kind recorded in full, or that of one key."""
        if key is not None:
            self._seen.pop(key, None)
            self._last.pop(key[2], None)
        else:
            self._seen.clear()
            self._last.clear()
            self._sites.clear()

    def _site(self, key: Any) -> tuple[CodeType, int, int] | None:
        """The code, the place in it and its depth, as they were when the event was asked about."""
        found = self._sites.pop(key, None)
        return None if found is None else (found[0], key[1], found[1])


def _nobody() -> None:
    return None


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
        sampled_all: whether what is dear on large models is looked at.
        own: seconds that the doctor itself has taken.
        failure: the first error of its own.
        in_scaler: whether a ``GradScaler`` is calling an optimizer.
        scaled: losses that came out of ``GradScaler.scale``.
        known: facts that come again and again.
        threads: say whose events are recorded.
        stepped: a weak reference to the optimizer that has stepped last.
        lock: is held by the hook that is running, and by whoever looks at gradients.
        root: the number of the model that runs or ran last, -1 for none.
        kept: the number of the model whose arguments were kept last.
        running: the module that runs, if one does.
        innermost: the module in it that runs, in steps that are sampled.
        arguments: of the last forward with gradient, without their graph.
        loss_calls: the numbers of calls of loss functions since the last backward.
        last_loss: the last loss of a loss function that was like one before, its version then, and its value.
    """

    def __init__(self, journal: Journal, counter: Counter, sampling: Sampling) -> None:
        self.journal, self.counter, self.sampling = journal, counter, sampling
        self.emit: Callable[[Fact], int] = journal.emit
        self.numbering = Numbering(journal.emit, counter)
        self.patches = Patches()
        self.active = self._active = True
        self._usable = False
        self.sampled = self.sampled_much = self.sampled_all = True
        self.own = 0.0
        self.saw_mode = False  # whether a mode of the user's that sees operations was on at the last look
        self.failure = ""
        self.in_scaler = False
        self._pid = os.getpid()
        self.lock = threading.Lock()
        self.threads = TrainingThread(self.lock, self._knows, self._several)
        self._holder = 0  # the thread of the guarded function that runs
        self._waiting: deque[Fact] = deque()
        self.known, self.scaled = Known(), ScaledLosses()
        self.root = self.kept = -1
        self.running: torch.nn.Module | None = None
        self.innermost: torch.nn.Module | None = None
        self.arguments: tuple[Any, Any] = ((), {})
        self.stepped: Callable[[], Any] = lambda: None
        self.loss_calls: list[int] = []
        self.last_loss: tuple[Callable[[], Any], int, float] = (lambda: None), 0, 0.0

    def guarded(self, function: Callable[..., Any], *, everywhere: bool = False) -> Callable[..., Any]:
        """A function that is timed, that never raises, and that does nothing while another one of these runs.

        Args:
            function: of the doctor, which is called out of the user's run; ``None`` is its answer where it did not run.
            everywhere: whether it runs in other threads too while the one that is recorded is in the middle of
                something; it looks at no tensor then, and has ``tell`` take its facts.
        """
        lock, pid, clock = self.lock, self._pid, time.perf_counter
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
                self.saw_mode = number_of_modes() > 0
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
        """Lets no hook run until ``look_again``."""
        self._active, self.active = self.active, False
        self._usable, self.known.usable = self.known.usable, False
        self.threads.look_away()

    def look_again(self) -> None:
        """Lets hooks run as before."""
        self.threads.look_again()
        self.active = self._active and not self.threads.is_over
        self.known.usable = self._usable and self.active

    @property
    def is_busy(self) -> bool:
        """Whether a hook is running whose time is counted."""
        return self._holder != 0

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
        self.emit(ThreadsAtOnce(turns=self.threads.turns, file=file, line=line))
        self.active = self.known.usable = False

    def failed(self, error: BaseException) -> None:
        """Notes an error of the doctor's own.

        Args:
            error: that a hook raised.
        """
        if not self.failure:
            self.failure = f"{type(error).__name__}: {error}"
            logger.debug("the doctor failed", exc_info=error)

    def gave_up(self, error: BaseException) -> None:
        """Notes an error of the doctor's own that was caught outside of ``guarded``; Ctrl-C is raised again.

        Args:
            error: that a hook raised.
        """
        self.failed(error)
        if is_interruption(error):
            raise error

    def place(self) -> dict[str, Any]:
        """The user's line, as entries of a fact."""
        file, line = user_place(3)
        return {"file": file, "line": line}
