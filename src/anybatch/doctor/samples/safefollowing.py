"""Follows a part of a run that is not ours: nothing is put back, since nothing is changed, and no fault of it shows."""

import os
import threading
import time
from contextlib import ExitStack
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_pre_hook

from anybatch.doctor.following import Follower
from anybatch.doctor.interruptions import is_interruption
from anybatch.doctor.recording.naming import user_place
from anybatch.doctor.sites import Running, Site
from anybatch.doctor.subjects import Subject
from anybatch.torch_private import function_modes

_MOST_OPERATIONS = 50_000
_MOST_SECONDS = 20.0
FUSED = (torch.nn.TransformerEncoder, torch.nn.TransformerEncoderLayer, torch.nn.MultiheadAttention)
"""Modules that out of training call fused functions only where no mode is on; the last bits of these differ."""


class _Call:
    """A function that remembers whether it was called, and what it gave or raised."""

    def __init__(self, function: Any) -> None:
        self._function = function
        self.done = False
        self.seconds = 0.0
        self.result: Any = None
        self.error: BaseException | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._function, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        before = time.perf_counter()
        try:
            self.result = self._function(*args, **kwargs)
        except BaseException as error:
            self.error = error
            raise
        finally:
            self.seconds += time.perf_counter() - before
        self.done = True
        return self.result


class SafeFollower(Follower):
    """A follower that may be entered in one place and left in another, and that lets the run go on whatever happens.

    Attributes:
        hidden: whether a reentrant checkpoint was met, whose inside is not looked at.
        failed: whether following had to be given up.
    """

    def __init__(self, subject: Subject, running: Running) -> None:
        super().__init__(subject.bits, running, lambda tensor: None)
        self.hidden = self.failed = False
        self.seconds = 0.0  # that it took beside the operations themselves
        self._off = True
        self._calls = 0
        self._hooks = ExitStack()
        self._process, self._thread = os.getpid(), threading.get_ident()
        self._operations, self._end = 0, time.monotonic() + _MOST_SECONDS

    def start(self) -> bool:
        """Enters the mode and hangs the hooks, unless a mode of somebody else is on; whether it follows now."""
        if any(type(mode).__name__ not in ("DeviceContext", "Tape") for mode in function_modes()):
            return False
        if self.failed or not self._off:
            return not self.failed
        self._off = False
        self._hooks.enter_context(self._running.attached())
        self._hooks.callback(register_module_forward_pre_hook(self._before).remove)
        if not self._calls:  # within a call that it handles it was taken off, and is put back after it
            self.__enter__()  # type: ignore[no-untyped-call]
        return True

    def stop(self) -> None:
        """Leaves the mode; where another one lies above it, it stays there and does nothing."""
        if self._off and not self._is_on_top():
            return
        self._off = True
        self._hooks.close()
        if self._is_on_top():
            self.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    @property
    def is_left(self) -> bool:
        """Whether it is on the stack of modes no more; while it handles a call it is off, and comes back after it."""
        return not self._calls and not any(mode is self for mode in function_modes())

    def _is_on_top(self) -> bool:
        modes = function_modes()
        return threading.get_ident() == self._thread and bool(modes) and modes[-1] is self

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._calls += 1
        try:
            return self._handled(func, types, args, kwargs)
        finally:
            self._calls -= 1

    def _handled(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if self._off or os.getpid() != self._process:
            return func(*args, **(kwargs or {}))
        self._operations += 1
        if self._operations > _MOST_OPERATIONS or time.monotonic() > self._end:
            self._give_up()
            return func(*args, **(kwargs or {}))
        call, before = _Call(func), time.perf_counter()
        try:
            return super().__torch_function__(call, types, args, kwargs)
        except BaseException as error:  # a fault of the follower must not reach the run
            if error is call.error or is_interruption(error):
                raise
            self._give_up()
            return call.result if call.done else func(*args, **(kwargs or {}))
        finally:
            self.seconds += time.perf_counter() - before - call.seconds

    def _give_up(self) -> None:
        """Stops following; the mode is on the stack still, and is taken off by ``stop``."""
        self.failed = self._off = True
        self._hooks.close()

    def _site(self) -> Site:
        return Site(self._running.name, *user_place(3))

    def _look_inside(self, node: Any) -> int:
        self.hidden = True  # running it again would write to buffers
        return 0

    def _before(self, module: torch.nn.Module, args: Any) -> None:
        if isinstance(module, FUSED) and not module.training and not torch.is_grad_enabled() and not self._off:
            self._give_up()
            self.stop()
