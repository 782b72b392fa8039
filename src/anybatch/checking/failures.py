"""What an error is told as, and whose it is."""

import traceback
from pathlib import Path

import torch

_NOT_THE_USERS = (f"{Path(torch.__file__).parent}/", f"{Path(__file__).parents[1]}/")


def in_one_line(error: BaseException) -> str:
    """An error in one line, with the user's own line that it came of, where its traceback has one."""
    frames = ((frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__))
    own = [f" at {Path(file).name}:{line}" for file, line in frames if not file.startswith(_NOT_THE_USERS)]
    first, _, _ = str(error).partition("\n")
    return f"{type(error).__name__}{own[-1] if own else ''}: {first}".removesuffix(": ")


def is_own(error: BaseException) -> bool:
    """Whether an error came of a line of this package, and neither of the user's program nor of torch."""
    files = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__)]
    return bool(files) and files[-1].startswith(_NOT_THE_USERS[1])
