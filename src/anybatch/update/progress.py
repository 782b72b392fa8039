"""What is on during a pass over a logical batch, and who is told what is running."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch

from anybatch.batch.batches import Part
from anybatch.tensors.dispatch import without_modes
from anybatch.update.batchnorm import batch_norm_as, may_couple, refuse_to_split

if TYPE_CHECKING:
    from anybatch.update.passes import Task


class Watch:
    """Looks on at one attempt at a logical batch; this one does nothing, and others override what they need."""

    def __enter__(self) -> "Watch":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """The attempt is over, well or not."""

    def on_micro_batch(self, index: int) -> None:
        """A micro-batch begins."""

    def on_sums(self, weights: Any, sums: Any) -> None:
        """All micro-batches have run; over several processes, nothing was summed over them so far."""

    def on_gradient(self) -> None:
        """The gradient of the whole batch is in ``.grad``; it was neither unscaled nor clipped so far."""

    def on_outcome(self, outcome: Any) -> None:
        """The attempt went through."""


NOBODY = Watch()


class Progress:
    """What is running.

    Args:
        text: of it.
        watch: is notified of each micro-batch that begins.

    Attributes:
        text: may be set to what is running now.
        watch: the same, and may be another one later.

    Example:
        >>> progress = Progress()
        >>> progress.micro_batch(2, 5)
        >>> progress()
        'micro-batch 3 of 5'
    """

    __slots__ = ("_index", "_of", "text", "watch")

    def __init__(self, text: str = "the start of the step", watch: Watch = NOBODY) -> None:
        self.text, self.watch = text, watch
        self._index = self._of = 0

    def micro_batch(self, index: int, of: int) -> None:
        """Notes that a micro-batch begins; its text is made when somebody asks."""
        self.text, self._index, self._of = "", index, of
        if self.watch is not NOBODY:
            self.watch.on_micro_batch(index)

    def __call__(self) -> str:
        """What is running."""
        return self.text or f"micro-batch {self._index + 1} of {self._of}"


class Beginnings:
    """What is on during a pass, and is notified of the beginning of each micro-batch.

    Args:
        task: the logical batch.
        parts: how it is split.
        progress: is told what is running.
        stack: takes it off.
        differentiate: whether gradients are wanted.
        seed: of masks that do not depend on the split; drawn if it is not given.
    """

    def __init__(
        self,
        task: "Task",
        parts: Sequence[Part],
        progress: Progress,
        stack: contextlib.ExitStack,
        differentiate: bool,
        *,
        seed: int | None = None,
    ) -> None:
        self._parts = parts
        self._progress = progress
        self._masks: Any = None
        self._begin_statistics: Callable[[], None] | None = None
        self.seed = seed
        if not differentiate:
            stack.enter_context(torch.no_grad())
            if task.batch_norm == "refuse":
                refuse_to_split(task.modules, len(parts), lambda: task.cause(parts))
            return
        if may_couple(task.every_module):
            statistics = batch_norm_as(task.batch_norm, task.modules, len(parts), task.cause(parts))
            self._begin_statistics = stack.enter_context(statistics)
        if task.settings.dropout == "per-sample":
            from anybatch.tensors.dropouts import SampleDropout, refuse_unseen

            for module in task.modules:
                refuse_unseen(module)
            if self.seed is None:
                with without_modes():  # of the stream that is put back before a retry
                    self.seed, following = torch.randint(2**62, (2,), device="cpu").tolist()
                # How much is drawn depends on the split; what the next batch draws must not.
                stack.callback(torch.default_generator.manual_seed, following)
            self._masks = stack.enter_context(SampleDropout(self.seed, task.modules))

    def begin(self, number: int) -> None:
        """Tells everybody that a micro-batch begins."""
        self._progress.micro_batch(number, len(self._parts))
        if self._begin_statistics is not None:
            self._begin_statistics()
        if self._masks is not None:
            self._masks.begin(self._parts[number].samples)

    def each(self, batches: Iterator[Any]) -> Iterator[Any]:
        """The micro-batches, each after everybody was told."""
        self._progress.micro_batch(0, len(self._parts))  # also what makes the first one can fail
        numbers = count()  # enumerate would keep a batch while the next one is made
        acts = self._begin_statistics is not None or self._masks is not None
        for batch in batches:
            if acts:
                self.begin(next(numbers))
            else:
                self._progress.micro_batch(next(numbers), len(self._parts))
            yield batch
            del batch

    def again(self, number: int) -> None:
        """Tells everybody that a micro-batch begins for the second time."""
        self._progress.text = f"micro-batch {number + 1} of {len(self._parts)}, for the second time"
        if self._masks is not None:
            self._masks.begin(self._parts[number].samples)

    def whole(self, rows: int) -> None:
        """Begins what sees all samples."""
        self._progress.text = "the coupled loss of the whole batch"
        if self._masks is not None:
            self._masks.begin(range(rows), stage=1)
