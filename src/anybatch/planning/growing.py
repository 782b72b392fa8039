"""How large micro-batches may become, by what steps were seen to take."""

from collections.abc import Mapping
from dataclasses import astuple, dataclass
from typing import Any

from anybatch.update.transaction import SizeLimit

FIRST = 2  # samples; other operations may run for one sample alone
_FASTEST = 4.0  # times that micro-batches grow from one logical batch to the next
_SETTLED = 2  # measured steps without a change, after which nothing is measured any more


@dataclass(frozen=True)
class Seen:
    """What a step was seen to take.

    Args:
        samples: of its largest micro-batch.
        bytes: at its peak, on top of what was there before.
        micro_batches: how many there were.
    """

    samples: int
    bytes: int
    micro_batches: int


class Growth:
    """The size of micro-batches from one logical batch to the next.

    What a step takes on top of what was there before is at most proportional to the samples of a micro-batch, so no
    step is predicted too low, and the size comes nearer to the largest one that fits with each measured step.

    Args:
        seen: what is known before the first step.

    Attributes:
        seen: the last step that was measured.
    """

    def __init__(self, seen: Seen | None = None) -> None:
        self.seen = seen
        self._quiet = 0
        self._most: int | None = None  # after memory ran out
        self._wait = self._waited = SizeLimit.PATIENCE

    @property
    def may_go_on(self) -> bool:
        """Whether the size may still change."""
        return self._quiet < _SETTLED

    def measure_again(self) -> None:
        """Has the next steps measured, as the logical batch has more samples than before."""
        self._quiet = 0

    def count(self) -> None:
        """Counts a logical batch; a while after memory ran out, larger micro-batches are tried again."""
        if self._most is not None:
            self._wait -= 1
            if not self._wait:
                self._most, self._quiet = None, 0

    def needs(self, rows: int, gradients: int) -> int:
        """The bytes that a step takes whose micro-batches are as large as those that were seen.

        Args:
            rows: samples of the logical batch.
            gradients: bytes that a second micro-batch finds there.
        """
        if self.seen is None:
            return 0
        is_first_split = self.seen.micro_batches == 1 and rows > self.seen.samples
        return self.seen.bytes + (gradients if is_first_split else 0)

    def size(self, room: int, rows: int, gradients: int) -> int:
        """The samples of a micro-batch, of which there may be more than the logical batch has.

        Args:
            room: bytes that a step may take.
            rows: samples of the logical batch.
            gradients: bytes that a second micro-batch finds there.

        Returns:
            As many as fit; 0 where one sample took too much.

        Example:
            >>> Growth(Seen(samples=2, bytes=100, micro_batches=4)).size(350, 8, 0)
            7
        """
        if self.seen is None:
            return min(FIRST, self._most or FIRST)
        samples = self.seen.samples
        found = int(min(samples * room / max(self.needs(rows, gradients), 1), samples * _FASTEST))
        if not self.may_go_on and samples <= found:
            found = samples
        if found < 1:
            return 0 if samples == 1 else 1
        return min(found, self._most or found)

    def note(self, seen: Seen) -> None:
        """Notes a step.

        Args:
            seen: what it took.
        """
        is_same = self.seen is not None and seen.samples == self.seen.samples
        self._quiet = self._quiet + 1 if is_same else 0
        self.seen = seen

    def ran_out(self, most: int) -> None:
        """Notes that memory ran out.

        Args:
            most: the samples that a micro-batch has from now on at most.
        """
        if self._wait < self._waited:  # it grew back before, or was just made smaller
            self._waited = min(2 * self._waited, SizeLimit.MOST_PATIENCE)
        self._most, self._quiet, self._wait = most, 0, self._waited

    def state_dict(self) -> dict[str, Any]:
        """What was seen, as plain values."""
        seen = None if self.seen is None else astuple(self.seen)
        return {"seen": seen, "quiet": self._quiet, "most": self._most, "wait": self._wait, "waited": self._waited}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on with what ``state_dict`` gave."""
        self.seen = None if state["seen"] is None else Seen(*state["seen"])
        self._quiet, self._most = state["quiet"], state["most"]
        self._wait, self._waited = state["wait"], state["waited"]
