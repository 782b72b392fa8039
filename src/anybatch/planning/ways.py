"""The two ways to run a step on a model in parts, of which a budget may allow both: in parts, and all gathered."""

import contextlib
import logging
import statistics
import time
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from anybatch.parallel.keeping import Keeping
from anybatch.planning.growing import Growth, Seen

logger = logging.getLogger(__name__)

_TIMED = 3  # steps of either way


class _Way:
    """What is known of one way.

    Attributes:
        growth: how large its micro-batches may be.
        seconds: of a sample, in the last steps in which nothing else was measured.
    """

    def __init__(self, seen: Seen | None = None) -> None:
        self.growth = Growth(seen)
        self.seconds: deque[float] = deque(maxlen=_TIMED)

    @property
    def time(self) -> float | None:
        """The seconds of a sample, once there are enough steps."""
        return statistics.median(self.seconds) if len(self.seconds) == _TIMED else None

    def state_dict(self) -> dict[str, Any]:
        """Sizes and times as plain values."""
        return {"growth": self.growth.state_dict(), "seconds": list(self.seconds)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Sets what ``state_dict`` gave."""
        self.growth.load_state_dict(state["growth"])
        self.seconds = deque(state["seconds"], maxlen=_TIMED)


class Ways:
    """Which of the two ways a step takes.

    The first one is that of the user's switch. Where that is parts, it is timed once the size of its micro-batches has
    settled; where everything gathered fits into the budget on all ranks, that is tried and timed too.
    """

    def __init__(self) -> None:
        self._first = self._chosen = _Way()
        self._kept: _Way | None = None
        self._has_room: bool | None = None
        self._keeping: Keeping | None = None
        self._saved: Mapping[str, Any] | None = None

    @property
    def growth(self) -> Growth:
        """That of the way that is taken."""
        return self._chosen.growth

    @property
    def went_as_chosen(self) -> bool:
        """Whether the other ranks wanted the same for this step."""
        return self._keeping is None or self._keeping.is_kept is (self._chosen is self._kept)

    def begin_again(self) -> None:
        """Forgets what was seen."""
        self._first = self._chosen = _Way()
        self._kept = self._has_room = None

    def choose(self, keeping: Keeping | None, room: int, rows: int, gradients: int) -> None:
        """Takes the way that the ranks agreed on before, and tells them what is known here.

        Args:
            keeping: where they agree; ``None`` where nothing lies in parts.
            room: bytes that a step may take.
            rows: samples of the logical batch.
            gradients: bytes that a second micro-batch finds there.
        """
        self._chosen, self._keeping = self._first, keeping if keeping is not None and keeping.is_free else None
        if self._keeping is None:
            return
        keeping = self._keeping
        if self._saved is not None:
            keeping.load_state_dict(self._saved)
            keeping.begin()
            self._saved = None
        if self._has_room is None:
            self._look_for_room(keeping, room)
        elif self._kept is not None and not self._kept.growth.size(room, rows, gradients):
            self._has_room = False  # one sample took more than that
        keeping.has_room = self._has_room
        keeping.seconds = self._first.time, None if self._kept is None else self._kept.time
        if not self._has_room:
            keeping.take_back()
        if keeping.wants and self._kept is not None:
            self._chosen = self._kept

    def _look_for_room(self, keeping: Keeping, room: int) -> None:
        seen = self._first.growth.seen
        if seen is None or self._first.time is None:
            return
        gathered = keeping.whole_bytes()
        most = int((room - gathered) * seen.samples / max(seen.bytes, 1))
        self._has_room = most >= 1
        if self._has_room:
            samples = min(most, seen.samples)
            self._kept = _Way(Seen(samples, gathered + seen.bytes * samples // seen.samples, 2))

    def give_up_keeping(self) -> int | None:
        """Goes on in parts after memory ran out with everything gathered, from the next attempt on.

        Returns:
            The samples of a micro-batch that fit in parts; ``None`` if nothing was kept gathered.
        """
        if self._keeping is None or self._chosen is self._first:
            return None
        self._keeping.has_room = self._has_room = False
        self._keeping.take_back()
        self._chosen, seen = self._first, self._first.growth.seen
        logger.info("memory ran out with everything gathered: the step goes on in parts")
        return 1 if seen is None else seen.samples

    @contextlib.contextmanager
    def timed(self, device: torch.device, rows: int) -> Iterator[None]:
        """Notes how long a call takes, as long as the way is not chosen for good.

        Args:
            device: where the model lies.
            rows: samples of the logical batch.
        """
        keeping, way = self._keeping, self._chosen
        if keeping is None or keeping.faster is not None or not rows:
            yield
            return
        begun = time.perf_counter()
        yield
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        if self.went_as_chosen and way is self._chosen:
            way.seconds.append((time.perf_counter() - begun) / rows)
        if keeping.faster is not None and None not in keeping.seconds:
            logger.info(
                "parameters %s: a sample took %.3g s in parts, %.3g s with everything gathered during a step",
                "stay gathered" if keeping.faster else "lie in parts", *keeping.seconds,
            )  # fmt: skip

    def state_dict(self) -> dict[str, Any]:
        """What is known, as plain values."""
        return {
            "first": self._first.state_dict(), "kept": None if self._kept is None else self._kept.state_dict(),
            "has_room": self._has_room,
            "keeping": self._saved if self._keeping is None else self._keeping.state_dict(),
        }  # fmt: skip

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on with what ``state_dict`` gave."""
        self._first.load_state_dict(state["first"])
        self._chosen, self._kept = self._first, None if state["kept"] is None else _Way()
        if self._kept is not None:
            self._kept.load_state_dict(state["kept"])
        self._has_room, self._saved = state["has_room"], state["keeping"]
