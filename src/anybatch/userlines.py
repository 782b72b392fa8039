"""Whose code a file is, and which of the user's lines is running."""

import contextlib
import functools
import sys
import sysconfig
from pathlib import Path
from types import CodeType, FrameType

import torch

TORCHS, OWN = f"{Path(torch.__file__).parent}/", f"{Path(__file__).parent}/"
"""How the names of files begin that are torch's, and that are our own."""
NOT_THE_USERS = ("<anybatch ", "<frozen ", TORCHS, OWN, contextlib.__file__, functools.__file__)
"""How the names of files begin that are torch's, our own, or run the user's functions for them."""
_LIBRARY = tuple({f"{sysconfig.get_path(name)}/" for name in ("stdlib", "platstdlib", "purelib", "platlib")})
USERS, LIBRARYS, _HIDDEN = 2, 1, 0
_MOST_FILES = 4096


WHOSE: dict[str, int] = {}
"""Whose code the files are that were met: 2 for the user's, 1 for that of a library, 0 for torch's and our own."""


def whose_file(file: str) -> int:
    """Whose code a file is, as ``WHOSE`` has it."""
    known = WHOSE.get(file)
    if known is None:
        if len(WHOSE) >= _MOST_FILES:
            WHOSE.clear()
        known = WHOSE[file] = _belongs_to(file)
    return known


def _belongs_to(file: str) -> int:
    if file.startswith(NOT_THE_USERS):
        return _HIDDEN
    is_library = (file.startswith(_LIBRARY) and "/anybatch/" not in file) or "/site-packages/" in file
    return LIBRARYS if is_library else USERS


def calling_frame(frame: FrameType | None) -> FrameType | None:
    """The innermost of some frames that is neither torch's nor our own, the user's or that of a library."""
    while frame is not None and not whose_file(frame.f_code.co_filename):
        frame = frame.f_back
    return frame


def user_place(depth: int = 1) -> tuple[str, int]:
    """The innermost of the user's lines; that of another library where there is none of the user's own."""
    frame: FrameType | None
    try:
        frame = sys._getframe(depth)
    except ValueError:  # nobody's code calls, as at the end of a process
        frame = sys._getframe(1)
    of_library: FrameType | None = None
    while frame is not None:
        file = frame.f_code.co_filename
        whose = WHOSE[file] if file in WHOSE else whose_file(file)
        if whose == USERS:
            break
        if whose == LIBRARYS and of_library is None:
            of_library = frame
        frame = frame.f_back
    frame = frame or of_library
    if frame is None:
        return "", 0
    code = frame.f_code
    known = PLACES.get((id(code), frame.f_lasti))
    if known is None:
        if len(PLACES) >= _MOST_FILES:
            PLACES.clear()
        known = PLACES[id(code), frame.f_lasti] = code, (code.co_filename, frame.f_lineno)
    return known[1]


PLACES: dict[tuple[int, int], tuple[CodeType, tuple[str, int]]] = {}
"""Lines that were met, by the code, which is kept so that its ``id`` stays its own, and the place in it."""
