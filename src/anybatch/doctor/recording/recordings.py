"""What all hooks share: whose events are recorded, the journal, numbers, clock, scaled losses, and a guard."""

import functools
import gc
import logging
import os
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from threading import get_ident
from typing import Any, Literal

import torch

from anybatch.doctor.frames import is_interruption
from anybatch.doctor.recording.journal import Counter, Journal
from anybatch.doctor.recording.numbering import Numbering
from anybatch.doctor.recording.patches import Patches, hidden
from anybatch.parallel.workers import DeviceThread
from anybatch.records.events import ThreadsAtOnce
from anybatch.records.lines import Fact
from anybatch.records.repeats import DIFFERING
from anybatch.tensors.dispatch import nobody_looks
from anybatch.tensors.graph import in_backward
from anybatch.torch_private import number_of_function_modes, number_of_modes, without_torch_function
from anybatch.userlines import PLACES, USERS, WHOSE, user_place

_PATIENCE = 0.02  # seconds
_LONGEST_HOOK = 60.0
_NOBODY = -1
Does = Literal["backward", "updates", "forward", "looks"]
"""What a thread is about to do: a backward; any other change of gradients or weights; to call a model with autograd on;
or to call it without."""


class TrainingThread:
    """The thread whose events are recorded.

    A hook reads gradients, and what another thread does to them at that moment crashes the process: a backward writes
    to them without the interpreter's lock, and they are freed without it. So there is one thread at a time. Another
    one takes its place when it goes on with the training of the same model while nothing runs here, as with a step in
    each ``asyncio.to_thread``, or when the first one is gone. Where both train at once, or train models of their own,
    the record ends. What other threads do without gradients is left out, such as playing an environment.

    The threads of ``TrainStep(devices=...)`` work on copies, which nobody looks at. Autograd's own threads belong to
    the one that called it.

    Args:
        lock: is held by the hook that is running.
        knows: whether a model or an optimizer was seen before.
        several: is called once, when two threads are seen to train at once; no hook runs from then on.

    Attributes:
        ident: of the thread, 0 before the first event.
        inside: whether it is in a forward, a backward or ``zero_grad``; ``admits`` says so too. Between looking at this
            and at ``ident``, and setting them, nothing may be called: there the interpreter may go on with another
            thread.
        trains: whether it has done more than calling models.
        turns: how often another thread has taken the place of one that still lived.
    """

    __slots__ = (
        *("ident", "inside", "is_over", "taken", "trains", "turns"),
        *("_before", "_ended", "_knows", "_lock", "_overlapping", "_owner", "_pid", "_several"),
    )

    def __init__(self, lock: threading.Lock, knows: Callable[[Any], bool], several: Callable[[], None]) -> None:
        self._lock, self._knows, self._several = lock, knows, several
        self.taken: Callable[[], None] = lambda: None  # is called when another thread has taken the place
        self._pid, self._ended = os.getpid(), threading.Event()
        self.ident = self.turns = self._before = 0
        self.inside = self.trains = self.is_over = False
        self._owner: threading.Thread | None = None
        self._overlapping: weakref.WeakSet[threading.Thread] = weakref.WeakSet()

    def elsewhere(self) -> bool:
        """Whether this is another thread than the one that is recorded, once there is one."""
        return self.ident not in (0, get_ident()) and (self.ident == _NOBODY or not in_backward())

    def look_away(self) -> None:
        """Has no thread recorded until ``look_again``."""
        self._before, self.ident = self.ident, _NOBODY

    def look_again(self) -> None:
        """Has the thread recorded that was so before."""
        self.ident = self._before

    def admits(self, does: Does, one: Any = None) -> bool:
        """Whether what another thread is about to do is to be recorded; asked before each such event."""
        if self.ident == _NOBODY:
            return False
        if in_backward():  # a checkpoint that is computed again, or an optimizer that steps in a hook
            return True
        thread, me = threading.current_thread(), get_ident()
        if isinstance(thread, DeviceThread) or os.getpid() != self._pid:
            return False
        if self.is_over:
            self._ended.wait(_LONGEST_HOOK)
            return False
        there = self._owner is not None and self._owner.is_alive()
        others = there and self.trains
        if others and does == "looks":
            return False
        overlaps, trains = others and thread in self._overlapping, does in ("backward", "updates")
        is_free = not overlaps and (not others or one is None or self._knows(one))
        if is_free and not (others and self.inside):
            self.ident, self.inside, self.trains, self._owner = me, does != "updates", others or trains, thread
            self.turns += there
            return not there or self._takes_over(me) or self.admits(does, one)
        if trains:
            self._ends()
        else:
            self._overlapping.add(thread)
        return False

    def acquires(self) -> bool:
        """Takes the lock, where need be when a hook of another thread has ended; false where the record has."""
        while not self._lock.acquire(timeout=_PATIENCE):
            if self._ended.is_set():
                return False
        return True

    def _takes_over(self, me: int) -> bool:
        """Waits until a hook of the other thread has ended; whether nobody else has taken over meanwhile."""
        if not self.acquires():
            return False
        try:
            if self.ident == me:
                self.taken()
            return self.ident == me
        finally:
            self._lock.release()

    def _ends(self) -> None:
        """Waits until a hook of another thread has ended, and lets none run any more."""
        if self.is_over:
            self._ended.wait(_LONGEST_HOOK)
            return
        self.is_over = True
        self._lock.acquire()  # for good
        try:
            self._several()
        finally:
            self._ended.set()


FIRST = 10
"""Steps from the beginning that are all sampled: causes show there."""
EVERY = 25
"""Steps between two samples after that."""
DEAREST = 0.01
"""The share of the run's time that the doctor may take; samples that would take more are left out."""
_MUCH = frozenset({0, 1, 5, 9})  # of the first steps
_RARELY = 4  # samples between two dear ones
_LEAST_SECONDS = 2.5  # that a run is taken to last


@dataclass(slots=True)
class Sampling:
    """Decides what is sampled.

    The first ten steps and the steps ``every``, twice, four times ``every`` and so on are always sampled; the others
    between them as long as all samples together stay within their share of the time.

    Example:
        >>> sampling = Sampling()
        >>> [step for step in range(80) if sampling.wants(step)]
        [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 25, 50, 75]
        >>> sampling.review(75, own=3.0, total=60.0)
        >>> [step for step in range(220) if sampling.wants(step)][10:]
        [25, 50, 100, 200]
    """

    every: int = EVERY  # steps between two samples
    thinned: int = 0  # how many samples were left out
    _own: float = 0.0
    _cost: float = 0.0
    _is_over: bool = False

    def wants(self, step: int) -> bool:
        """Whether a step is sampled."""
        if step < FIRST:
            return True
        return step % self.every == 0 and not (self._is_over and self._may_go(step))

    def wants_much(self, step: int) -> bool:
        """Whether more is looked at than gradients and weights, on a step that is sampled."""
        return step in _MUCH or step >= FIRST

    def wants_all(self, step: int) -> bool:
        """Whether what is dear on large models is taken as well."""
        return step in _MUCH or (step >= FIRST and step % (_RARELY * self.every) == 0)

    def review(self, step: int, *, own: float, total: float, sampled: bool = False) -> None:
        """Decides whether there is time for a sample, by the seconds of the doctor and of the whole run so far."""
        if sampled:
            self._cost = own - self._own
        self._own = own
        self._is_over = own + self._cost > DEAREST * max(total, _LEAST_SECONDS)
        if self._is_over and step >= FIRST and step % self.every == 0 and self._may_go(step):
            self.thinned += 1

    def _may_go(self, step: int) -> bool:
        times = step // self.every
        return bool(times & (times - 1))


_SCALED = "anybatch.doctor.scaled"


FACTORS = frozenset({"MulBackward0", "DivBackward0"})


class ScaledLosses:
    """The losses that came out of ``GradScaler.scale`` and whose backward has not run yet; their nodes are marked.

    Example:
        >>> losses, loss = ScaledLosses(), torch.ones(1, requires_grad=True).sum() * torch.tensor(8.0)
        >>> losses.scale = 8.0
        >>> losses.add(loss)
        >>> losses.taken(loss + 1), losses.taken(loss), losses.taken(loss)
        (None, 8.0, None)
    """

    __slots__ = ("pending", "scale")

    def __init__(self) -> None:
        self.scale = 1.0  # when it was last read
        self.pending = False  # whether a loss was scaled since the last ``update``, so that gradients may be scaled

    @property
    def in_force(self) -> float:
        """The scale of gradients that may be scaled, 1 where none was."""
        return self.scale if self.pending else 1.0

    def add(self, loss: torch.Tensor) -> None:
        """Takes note of a loss."""
        node: Any = loss.grad_fn
        if node is not None:
            node.metadata[_SCALED] = True

    def taken(self, loss: torch.Tensor) -> float | None:
        """The scale of a loss whose backward runs, if it is one of these, which it is for the first one only."""
        node: Any = loss.grad_fn
        while node is not None and not node.metadata.pop(_SCALED, False):  # it may be divided by a number of steps
            node = node.next_functions[0][0] if node.name() in FACTORS else None
        return None if node is None else self.scale


logger = logging.getLogger(__name__)
_MOST_KNOWN = 2048


class Depth:
    """How many functions of a kind run within each other."""

    count = 0


class Recording:
    """The state of one run that is recorded."""

    def __init__(self, journal: Journal, counter: Counter, sampling: Sampling) -> None:
        self.journal, self.counter, self.sampling = journal, counter, sampling
        self.emit: Callable[[Fact], int] = journal.emit
        self.numbering = Numbering(journal.emit)  # of parameters, models, optimizers and schedulers
        self.patches = Patches()  # what was replaced
        self.active = self._active = True  # whether anything is recorded
        # whether this step is sampled, also for more than gradients and weights, and for what is dear on large models;
        # and whether more is done in it than to note its calls: it is sampled, followed or written down
        self.sampled = self.sampled_much = self.sampled_all = self.looks = True
        self.own = 0.0  # seconds that the doctor itself has taken
        self.saw_mode = False  # whether a mode of the user's that sees operations was on at the last look
        self.failure = ""  # the first error of its own
        # counts the calls of a ``GradScaler`` that run, within one of which it calls an optimizer
        self.in_scaler = Depth()
        self._pid = os.getpid()
        self.lock = threading.Lock()  # is held by the hook that is running, and by whoever looks at gradients
        self.threads = TrainingThread(self.lock, self._knows, self._several)  # say whose events are recorded
        self._holder = 0  # the thread of the guarded function that runs
        self._waiting: deque[Fact] = deque()
        self._known: dict[Any, Fact] = {}
        self.scaled = ScaledLosses()  # losses that came out of ``GradScaler.scale``
        self.root = self.kept = -1  # of the models that ran last, and whose arguments were kept last, -1 for none
        self.running: torch.nn.Module | None = None  # the module that runs, if one does
        self.innermost: torch.nn.Module | None = None  # the module in it that runs, in steps that are sampled
        self.arguments: tuple[Any, Any] = ((), {})  # of the last forward with gradient, without their graph
        self.stepped: Callable[[], Any] = lambda: None  # a weak reference to the optimizer that has stepped last
        self.loss_calls: list[int] = []  # the numbers of calls of loss functions since the last backward

    def note(
        self, kind: type[Fact], same: Any, values: tuple[Any, ...] = (), entries: Any = None, *,
        place: tuple[str, int] | None = None,
    ) -> Any:  # fmt: skip
        """Notes a call that one of the user's lines makes: as a row where it is like one before, else as a fact.

        Args:
            kind: of the fact.
            same: all that is the same in calls that are alike.
            values: of the entries that differ, see ``records.repeats.DIFFERING``.
            entries: the names of the entries in ``same``, or what gives these entries; without them only what is like
                one before is noted.
            place: the user's line, where it is known.

        Returns:
            The row, whose second entry is its number, or the fact, where a value that has to be waited for may be
            filled in; ``None`` where nothing is noted.
        """
        if place is None:
            frame = sys._getframe(2)  # as ``user_place`` does, which is called where the line is new
            while frame is not None and WHOSE.get(frame.f_code.co_filename, USERS) != USERS:
                frame = frame.f_back  # type: ignore[assignment]
            met = None if frame is None else PLACES.get((id(frame.f_code), frame.f_lasti))
            is_users = met is not None and WHOSE.get(frame.f_code.co_filename) == USERS
            place = met[1] if met is not None and is_users else user_place(2)
        key = kind, same, place
        like = self._known.get(key)
        if like is not None:
            counter = self.counter
            counter.at = at = counter.at + 1
            row = [like, at, counter.step, *values]
            if self.journal.is_full:
                self.journal.dropped += 1
            else:
                self.journal.rows.append(row)
            return row
        if entries is None:
            return None
        given: dict[str, Any] = entries() if callable(entries) else dict(zip(entries, same, strict=True))
        given |= dict(zip(DIFFERING[kind], values, strict=True))
        make: Any = kind
        fact: Fact = make(**given, file=place[0], line=place[1])
        self.emit(fact)
        if not self.journal.is_full:  # else it may have been left out itself
            self._known[key] = fact
            if len(self._known) > _MOST_KNOWN:
                self._known.clear()
        return fact

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
            if not lock.acquire(False) and (self._holder in (0, get_ident()) or not threads.acquires()):
                return None
            self._holder, started = get_ident(), clock()
            collects = self.sampled and gc.isenabled()
            try:
                if collects:  # it would go through all that is noted of a large model again and again
                    gc.disable()
                if waiting:
                    self.take_in()
                if not self.active or os.getpid() != pid:
                    return None
                if not (number_of_modes() or number_of_function_modes()):
                    with without_torch_function():  # a class of tensors that writes down what is called
                        return function(*args, **kwargs)
                self.saw_mode = number_of_modes() > 0
                with nobody_looks():  # by what the user counts operations with, say
                    return function(*args, **kwargs)
            except BaseException as error:  # the user's run goes on, whatever happens in here
                self.failed(error)
                if is_interruption(error):
                    raise
            finally:
                if collects:
                    gc.enable()
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
        self.threads.look_away()

    def look_again(self) -> None:
        """Lets hooks run as before."""
        self.threads.look_again()
        self.active = self._active and not self.threads.is_over

    def tell(self, fact: Fact) -> None:
        """Emits a fact in any thread; that of another one comes with the next hook of the one that is recorded."""
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
        self.active = False

    def failed(self, error: BaseException) -> None:
        """Notes an error of the doctor's own."""
        if not self.failure:
            self.failure = f"{type(error).__name__}: {error}"
            logger.debug("the doctor failed", exc_info=error)

    def around(
        self, before: Callable[..., Any] | None, after: Callable[..., Any], does: Does, *, owned: bool = False,
        when: Callable[[Any, Any], bool] | None = None, outermost: Depth | None = None,
    ) -> Callable[[Any], Callable[..., Any]]:  # fmt: skip
        """Makes what is called in the place of a function: it goes on as it was, whatever is noted of it.

        Args:
            before: is given the arguments, and notes what will be gone; ``None`` where those behind the first will do.
            after: is given the first argument, what ``before`` gave, unless that is ``None``, and the result.
            does: what the function does.
            owned: whether the first argument is a model or an optimizer.
            when: says of the first argument and the others whether the call is seen.
            outermost: is the same for functions that call each other, of which the first alone is seen.
        """
        threads, depth, is_traced = self.threads, outermost or Depth(), torch.compiler.is_dynamo_compiling
        note_before, note_after = None if before is None else self.guarded(before), self.guarded(after)

        def make(original: Callable[..., Any]) -> Callable[..., Any]:
            def call(first: Any, /, *args: Any, **kwargs: Any) -> Any:
                if is_traced():
                    return original(first, *args, **kwargs)
                me = get_ident()
                was, is_other = threads.inside, threads.ident != me
                if (
                    (outermost is not None and depth.count)
                    or (when is not None and not when(first, args))
                    or (is_other and not threads.admits(does, first if owned else None))
                ):
                    return original(first, *args, **kwargs)
                threads.inside = True
                depth.count += 1
                try:
                    begun = args if note_before is None else note_before(first, args, kwargs)
                    result = original(first, *args, **kwargs)
                    if begun is not None:
                        note_after(first, begun, result)
                    return result
                finally:
                    depth.count -= 1
                    if threads.ident == me:
                        threads.inside = was and not is_other

            hidden(call)
            return call

        return make

    def place(self) -> dict[str, Any]:
        """The user's line, as entries of a fact."""
        file, line = user_place(3)
        return {"file": file, "line": line}
