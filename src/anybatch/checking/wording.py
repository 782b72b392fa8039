"""How numbers, names and errors are said in the text of a cause, and whose an error is."""

import math
import string
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from anybatch.userlines import OWN, whose_file


def how_far(error: float, apart: float = 0.0) -> str:
    """How far one gradient or loss is off another, relative to it, or apart where it is 0 within rounding."""
    if apart:
        return f"{apart:.2g} off, where the whole batch's is 0"
    return f"{error:.2g} off" if math.isfinite(error) else "one is not finite"


class _Text(string.Formatter):
    def format_field(self, value: Any, format_spec: str) -> Any:
        return how_far(value) if format_spec == "off" else super().format_field(value, format_spec)

    def convert_field(self, value: Any, conversion: Any) -> Any:
        return listed(value) if conversion == "l" else super().convert_field(value, conversion)


TEXT = _Text()
"""Fills the fields of a text in: ``:off`` says how far a number is off, ``!l`` lists names."""


def listed(names: Sequence[str]) -> str:
    """The first of some names, and how many more there are."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def in_one_line(error: BaseException) -> str:
    """An error in one line, with the user's own line that it came of, where its traceback has one."""
    frames = ((frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__))
    own = [f" at {Path(file).name}:{line}" for file, line in frames if whose_file(file)]
    first, _, _ = str(error).partition("\n")
    return f"{type(error).__name__}{own[-1] if own else ''}: {first}".removesuffix(": ")


def is_own(error: BaseException) -> bool:
    """Whether an error came of a line of this package, and neither of the user's program nor of torch."""
    files = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__)]
    return bool(files) and files[-1].startswith(OWN)
