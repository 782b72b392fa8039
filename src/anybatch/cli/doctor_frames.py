"""Hides the doctor's frames in the tracebacks of the user's script."""

import functools
import traceback
from typing import Any

from anybatch.doctor.frames import kept


class HiddenFrames:
    """Hides the doctor's frames in all tracebacks that the module ``traceback`` walks.

    Its two functions that walk are replaced; all its others, ``logging`` and coloured tracebacks use these.
    """

    def __init__(self) -> None:
        self._replaced: dict[str, tuple[Any, Any]] = {}

    def put_on(self) -> None:
        """Replaces both functions."""
        for name in ("walk_tb", "_walk_tb_with_full_positions"):
            walk = getattr(traceback, name, None)
            if walk is not None:
                self._replaced[name] = (walk, _through_kept(walk))
                setattr(traceback, name, self._replaced[name][1])

    def take_off(self) -> None:
        """Restores them, unless the script has replaced them, too."""
        for name, (walk, replacement) in self._replaced.items():
            if getattr(traceback, name) is replacement:
                setattr(traceback, name, walk)
        self._replaced.clear()


def _through_kept(walk: Any) -> Any:
    @functools.wraps(walk)
    def walk_kept(tb: Any) -> Any:
        try:
            found = kept(tb)
        except Exception:  # noqa: BLE001 - whoever shows an error must not get another one
            found = tb
        return walk(found)

    return walk_kept


def without_own_frames(error: BaseException) -> None:
    """Removes the doctor's frames from an exception, its causes and contexts, and the exceptions of its group."""
    waiting, seen = [error], set()
    while waiting:
        one = waiting.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        one.__traceback__ = kept(one.__traceback__)
        waiting += [cause for cause in (one.__cause__, one.__context__) if cause is not None]
        if isinstance(one, BaseExceptionGroup):
            waiting += one.exceptions
