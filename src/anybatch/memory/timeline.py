"""What is alive from operation to operation, with the lines that allocated it."""

import itertools
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePath
from types import FrameType
from typing import Any

import torch

from anybatch.memory.meter import BEFORE, Recording
from anybatch.records.memory import CATEGORIES, Moment, Timeline
from anybatch.tensors.graph import in_backward

_NOT_THE_USERS = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]), "<frozen")
_LARGEST = 4


class LinedRecording(Recording):
    """A recording that also notes which line of the user's called each operation."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._lines: dict[int, tuple[str, str]] = {}

    def _run(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        self._lines[len(self.operations)] = _user_line()
        return super()._run(func, args, kwargs)

    def timeline(self, most: int = 120, beside: Mapping[str, int] | None = None) -> Timeline:
        """What was alive after each operation; in each of at most so many stretches where it was most.

        Args:
            beside: bytes that were there all the time and were not recorded, by category.
        """
        live = self.live_bytes()
        bounds = [index * len(live) // most for index in range(most + 1)] if len(live) > most else range(len(live) + 1)
        chosen = [max(range(start, stop), key=live.__getitem__) for start, stop in itertools.pairwise(bounds)]
        found = [self._held(position) + Counter({(kind, ""): count for kind, count in (beside or {}).items()})
                 for position in chosen]  # fmt: skip
        kinds = [kind for kind in CATEGORIES if any(kind == one for held in found for one, _ in held)]
        layers = {
            kind: tuple(sum(count for (one, _), count in held.items() if one == kind) for held in found)
            for kind in kinds
        }
        moments = tuple(map(self._moment, chosen, found))
        return Timeline(moments, layers, len(live))

    def _held(self, position: int) -> Counter[tuple[str, str]]:
        """The bytes that were alive after an operation, by category and the line that allocated them."""
        held: Counter[tuple[str, str]] = Counter()
        for one in self.alive_after(position):
            line = "" if one.born == BEFORE else self._lines.get(one.born, ("", ""))[0]
            held[one.category, line] += one.size
        return held

    def _moment(self, position: int, held: Counter[tuple[str, str]]) -> Moment:
        line, module = self._lines.get(position, ("", ""))
        largest = tuple((count, kind, where) for (kind, where), count in held.most_common(_LARGEST))
        return Moment(self.operations[position], line, module, largest)


def _user_line() -> tuple[str, str]:
    """The innermost line that is neither torch's nor this library's, and the class whose method it is in."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename.startswith(_NOT_THE_USERS):
        frame = frame.f_back
    if frame is None:
        return "", ""
    line = f"{PurePath(frame.f_code.co_filename).name}:{frame.f_lineno}"
    owner = frame.f_code.co_qualname.rpartition(".")[0].rpartition(".")[2]
    return line, "the backward" if in_backward() else "" if owner == "<locals>" else owner
