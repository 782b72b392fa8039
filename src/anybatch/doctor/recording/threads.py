"""Whose events are recorded where a process has several threads: those of one that trains, at any time."""

import os
import threading
import weakref
from collections.abc import Callable
from threading import get_ident
from typing import Any, Literal

from anybatch.parallel.workers import DeviceThread
from anybatch.tensors.graph import in_backward

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
