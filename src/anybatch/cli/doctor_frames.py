"""Takes the frames of the doctor out of the tracebacks of the user's script."""

import functools
import traceback
from typing import Any

from anybatch.doctor.frames import kept


class HiddenFrames:
    """Takes the frames of the doctor out of all tracebacks that the ``traceback`` module walks through.

    It has two functions for that, which all others of it use, and so do ``logging`` and what shows errors in colour.
    """

    def __init__(self) -> None:
        self._replaced: dict[str, tuple[Any, Any]] = {}

    def put_on(self) -> None:
        """Replaces both."""
        for name in ("walk_tb", "_walk_tb_with_full_positions"):
            walk = getattr(traceback, name, None)
            if walk is not None:
                self._replaced[name] = (walk, _through_kept(walk))
                setattr(traceback, name, self._replaced[name][1])

    def take_off(self) -> None:
        """Puts them back, unless the script has put others in their place."""
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
    """Takes the frames of the doctor out of an exception, out of what it came from, and out of its group."""
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
