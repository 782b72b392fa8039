"""What a coupled loss takes when so many micro-batches keep the graph of their first pass."""

from collections.abc import Sequence
from dataclasses import dataclass

from anybatch.planning.encoders import Curve, OutputFacts
from anybatch.planning.jointlosses import LossTrace

FIRST, JOINING, LOSS, BACKWARD, SECOND = (
    "the first pass of the encoder", "joining the outputs", "the coupled loss", "the backward of the encoder",
    "the second pass of the encoder",
)  # fmt: skip

_INDEX_BYTES = 8  # of a sample's position, by which rows are put in order


@dataclass(frozen=True)
class Around:
    """Bytes besides those of encoder and loss.

    Args:
        throughout: parameters, buffers, the optimizer's state, the logical batch.
        inputs: copies of micro-batches that are there throughout.
        replay: what each micro-batch that is encoded twice keeps for that, such as small buffers.
        whole: a copy of the logical batch that the loss looks at.
        shared_gradients: of parameters that get a gradient from the loss and from the encoder.
        moved: the part of a micro-batch's bytes that a kept graph may hold as a copy.
    """

    throughout: int
    inputs: int = 0
    replay: int = 0
    whole: int = 0
    shared_gradients: int = 0
    moved: bool = False


@dataclass(frozen=True)
class Encoded:
    """A micro-batch.

    Args:
        rows: how many samples it has.
        curve: what it takes.
        inputs: bytes of its tensors.
    """

    rows: int
    curve: Curve
    inputs: int


class KeptGraphs:
    """The peak of a step with a coupled loss, by the number of graphs that are kept.

    The first micro-batches are encoded without a graph, the last ones with theirs; after the loss the graphs go back
    and are freed, the last one first, and each of the others is encoded again, in the same order.

    Args:
        micro_batches: in order.
        outputs: of the encoder.
        loss: on the outputs of all samples.
        around: what else is there.
        in_order: whether the samples of the micro-batches are in the order of the batch.
    """

    def __init__(
        self, micro_batches: Sequence[Encoded], outputs: OutputFacts, loss: LossTrace, around: Around, *, in_order: bool
    ) -> None:
        self._parts = micro_batches
        self._outputs = outputs
        self._loss = loss
        self.around = around
        self._in_order = in_order
        self._rows = sum(part.rows for part in micro_batches)
        self._peaks: dict[int, tuple[int, str]] = {}

    def gradients_at_peak(self, kept: int) -> int:
        """The bytes of gradients of parameters where the peak is.

        Args:
            kept: graphs of the last micro-batches.
        """
        of_outputs = sum(column.bytes_of(self._rows) for column in self._outputs.own if column.differs)
        of_loss = max(0, self._loss.after - of_outputs)
        where = self.peak(kept)[1]
        if where == SECOND or (where == BACKWARD and kept > 1):
            return self._parts[-1].curve.gradients + max(0, of_loss - self.around.shared_gradients)
        return of_loss if where in (LOSS, BACKWARD) else 0

    @property
    def count(self) -> int:
        """How many micro-batches there are."""
        return len(self._parts)

    def most(self, budget: int) -> int | None:
        """The largest number of graphs that fits in a budget; ``None`` if not even none does.

        Args:
            budget: bytes.
        """
        if self.peak(self.count)[0] <= budget:
            return self.count
        low, high = 1, self.count - 1  # what is held grows with the number, from one to all but one
        best = 0 if self.peak(0)[0] <= budget else None
        while low <= high:
            middle = (low + high) // 2
            if self.peak(middle)[0] <= budget:
                best, low = middle, middle + 1
            else:
                high = middle - 1
        return best

    def smallest(self) -> int:
        """The number of graphs with the least memory."""
        return min({0, min(1, self.count), self.count}, key=lambda kept: (self.peak(kept)[0], -kept))

    def peak(self, kept: int) -> tuple[int, str]:
        """The most bytes alive in the pass, and where.

        Args:
            kept: graphs of the last micro-batches.
        """
        if kept not in self._peaks:
            stages = self._stages(kept)
            where = max(stages, key=lambda name: stages[name])
            self._peaks[kept] = (stages[where], where)
        return self._peaks[kept]

    def _stages(self, kept: int) -> dict[str, int]:
        parts, around = self._parts, self.around
        twice = len(parts) - kept
        graphs = [part.curve.graph + part.inputs * around.moved for part in parts[twice:]]
        base = around.throughout + around.inputs + twice * around.replay
        base += 0 if self._in_order else _INDEX_BYTES * self._rows
        loose = sum(part.rows for part in parts[:twice]) * self._outputs.row_bytes
        stages = {
            FIRST: base + self._first(parts, twice, graphs),
            JOINING: base + sum(graphs) + self._joining(loose),
            LOSS: base + sum(graphs) + around.whole + self._loss_peak(kept, loose),
        }
        after = base + self._loss.after
        later = after - around.shared_gradients
        if kept:
            most = [after + sum(graphs[:-1]) + parts[-1].curve.first]
            if kept > 1:
                most += [
                    later + sum(graphs[:i]) + parts[twice + i].curve.later for i in range(max(0, kept - 3), kept - 1)
                ]
            stages[BACKWARD] = max(most)
        if twice:
            stages[SECOND] = max(self._again(after, later, part.curve, is_first=not kept and i == twice - 1)
                                 for i, part in enumerate(parts[:twice]))  # fmt: skip
        return stages

    def _again(self, after: int, later: int, curve: Curve, *, is_first: bool) -> int:
        if is_first:
            return after + max(curve.forward, curve.first)
        return later + max(curve.gradients + curve.forward, curve.later)

    def _first(self, parts: Sequence[Encoded], twice: int, graphs: Sequence[int]) -> int:
        """Without graphs a forward takes no more than with one; the last one always has a graph for a moment."""
        most, held = 0, 0
        for number, part in enumerate(parts):
            most = max(most, held + part.curve.forward)
            held += part.rows * self._outputs.row_bytes if number < twice else graphs[number - twice]
        return most

    def _joining(self, loose: int) -> int:
        """Outputs of micro-batches are there beside the joined ones until their turn is over."""
        if self.count == 1 and self._in_order:
            return loose
        share = loose / max(1, self._outputs.row_bytes)
        waiting = float(loose)
        most, joined = waiting, 0
        for column in self._outputs.own:
            made = column.bytes_of(self._rows)
            joined += made
            most = max(most, waiting + joined + (0 if self._in_order else made))
            waiting -= share * column.row_bytes
        return int(most)

    def _loss_peak(self, kept: int, loose: int) -> int:
        """What is joined of a single micro-batch is what the encoder gave."""
        if self.count > 1 or not self._in_order:
            return self._loss.peak
        joined = sum(column.bytes_of(self._rows) for column in self._outputs.own)
        return self._loss.peak - joined + (0 if kept else loose)
