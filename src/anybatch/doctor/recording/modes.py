"""A mode that sees operations of a run, which goes on as it would whatever happens in it."""

import os
import sys
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from anybatch.doctor.frames import is_interruption
from anybatch.doctor.recording.patches import HIDDEN, hidden
from anybatch.doctor.seeing import Seeing
from anybatch.tensors.graph import in_backward
from anybatch.torch_private import function_modes

_BETWEEN = ("torch/overrides.py", "torch/nn/functional.py")
_OWN = (HIDDEN, f"{Path(__file__).parents[2]}/")


class SafeMode(Seeing):
    """Sees the operations of one thread, may be entered in one place and left in another, and ends where it fails."""

    beside = frozenset({"DeviceContext"})
    """The classes of other modes with which it may be on."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.failed, self.seconds = "", 0.0  # why it was given up, and what it took beside the operations
        self._off, self._entered = True, False
        self._process, self._thread = os.getpid(), threading.get_ident()

    def start(self) -> bool:
        """Enters the mode unless one of somebody else is on; whether it is on now."""
        if self.failed or any(type(mode).__name__ not in self.beside for mode in function_modes()):
            return False
        self._off = False
        if not self._entered:  # within a call that it sees it was taken off, and is put back after it
            self._entered = True
            self.__enter__()  # type: ignore[no-untyped-call]
        return True

    def stop(self) -> bool:
        """Sees no more, and leaves the mode; whether that was possible.

        Within a backward modes are those of its beginning, which are there again after it; and one that was entered
        later may still be on.
        """
        self._off, modes = True, function_modes()
        is_last = bool(modes) and modes[-1] is self and threading.get_ident() == self._thread
        if self._entered and is_last and not in_backward():
            self._entered = False
            self.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        return not self._entered

    def give_up(self, why: str) -> None:
        """Sees no more; ``stop`` takes it off the stack of modes."""
        self.failed, self._off = why[:200] or "it failed", True

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._off or threading.get_ident() != self._thread or os.getpid() != self._process:
            return func(*args, **kwargs)
        begun = self._safely(self.before, func, args, kwargs)
        result = func(*args, **kwargs)
        if begun is not None:
            self._safely(self.after, begun, result)
        return result

    def _safely(self, function: Callable[..., Any], *args: Any) -> Any:
        begin = time.perf_counter()
        try:
            return function(*args)
        except BaseException as error:  # a fault of the mode must not reach the run
            if is_interruption(error):
                raise
            self.give_up(str(error))
            return None
        finally:
            self.seconds += time.perf_counter() - begin


hidden(SafeMode.__torch_function__)  # so that warnings pass over it


def reissued(message: Any) -> bool:
    """Shows a warning that came while a mode was on as of the line that it would be of without one."""
    if not message.filename.startswith(HIDDEN) and not message.filename.endswith(_BETWEEN):
        return False
    frame: Any = sys._getframe(1)
    while frame is not None and frame.f_code is not SafeMode.__torch_function__.__code__:
        frame = frame.f_back
    while frame is not None and (
        frame.f_code.co_filename.startswith(_OWN) or frame.f_code.co_filename.endswith(_BETWEEN)
    ):
        frame = frame.f_back
    if frame is None:
        return False
    names = frame.f_globals
    warnings.warn_explicit(
        message.message, message.category, frame.f_code.co_filename, frame.f_lineno, names.get("__name__"),
        names.setdefault("__warningregistry__", {}), None, message.source,
    )  # fmt: skip
    return True
