"""Does a data set give pictures whose axes changed places by a reshape? One sample of each is read again."""

import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from anybatch.doctor.ask.keeping import Kept
from anybatch.doctor.ask.steps import MOVING
from anybatch.doctor.ask.trials import Line, told
from anybatch.doctor.recording.naming import whose_file
from anybatch.records.lossfacts import Probed
from anybatch.records.runs import Run

_CHANNELS = (2, 3, 4)
_LEAST_SIDE = 8


class _Reshapes(TorchFunctionMode):
    """Keeps what reads the rows, columns and channels of a picture as channels, rows and columns, or the reverse."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, list[int], list[int], Line]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name, given = getattr(func, "__name__", ""), args[0] if args else None
        if name in MOVING and isinstance(given, torch.Tensor) and isinstance(result, torch.Tensor):
            before, after = ([size for size in one.shape if size > 1] for one in (given, result))
            if given.is_contiguous() and is_turned_picture(before, after):
                self.found.append((name, before, after, _line()))
        return result


def about_samples(kept: Kept, run: Run) -> Iterator[Probed]:
    """Whether a data set of the user's turns its pictures by a reshape, which leaves the entries where they are."""
    for one in kept.datasets:
        dataset = one()
        if dataset is None:
            continue
        with _Reshapes() as seen:
            dataset[0]
        for name, before, after, line in seen.found[:1]:
            yield told("axes", line, op=name, before=before, after=after)


def is_turned_picture(before: list[int], after: list[int]) -> bool:
    """Whether channels at one end of the axes are at the other end of them then.

    Example:
        >>> [is_turned_picture(one, [3, 32, 48]) for one in ([32, 48, 3], [3, 48, 32], [4608])]
        [True, False, False]
        >>> is_turned_picture([3, 32, 48], [32, 48, 3])
        True
    """
    if len(before) != 3 or len(after) != 3:
        return False
    for first, last in ((before, after), (after, before)):
        if first[-1] in _CHANNELS and first[-1] == last[0] and min(first[:2]) >= _LEAST_SIDE:
            return sorted(first[:2]) == sorted(last[1:])
    return False


def _line() -> Line:
    frame: Any = sys._getframe(2)
    while frame is not None:
        if whose_file(frame.f_code.co_filename):
            return Line(frame.f_code.co_filename, frame.f_lineno)
        frame = frame.f_back
    return Line()
