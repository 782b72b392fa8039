"""What is on during a pass over a logical batch, and is told of the beginning of each micro-batch."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from anybatch.tensors.batches import Part
from anybatch.tensors.dispatch import without_modes
from anybatch.tensors.dropouts import SampleDropout, refuse_unseen
from anybatch.tensors.moving import numbered
from anybatch.update.batchnorm import batch_norm_as, refuse_to_split

if TYPE_CHECKING:
    from anybatch.update.passes import Progress, Task


class Beginnings:
    """What is on during a pass, and is told of the beginning of each micro-batch.

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
        progress: "Progress",
        stack: contextlib.ExitStack,
        differentiate: bool,
        *,
        seed: int | None = None,
    ) -> None:
        self._parts = parts
        self._progress = progress
        self._masks: SampleDropout | None = None
        self._begin_statistics: Callable[[], None] | None = None
        self.seed = seed
        if not differentiate:
            stack.enter_context(torch.no_grad())
            if task.batch_norm == "refuse":
                refuse_to_split(task.modules, len(parts), task.cause(parts))
            return
        statistics = batch_norm_as(task.batch_norm, task.modules, len(parts), task.cause(parts))
        self._begin_statistics = stack.enter_context(statistics)
        if task.settings.dropout == "per-sample":
            for module in task.modules:
                refuse_unseen(module)
            if self.seed is None:
                with without_modes():  # of the stream that is put back before a retry
                    self.seed, following = torch.randint(2**62, (2,), device="cpu").tolist()
                # How much is drawn depends on the split; what the next batch draws must not.
                stack.callback(torch.default_generator.manual_seed, following)
            self._masks = stack.enter_context(SampleDropout(self.seed, task.modules))

    def begin(self, number: int) -> None:
        """Tells everybody that a micro-batch begins.

        Args:
            number: of the micro-batch.
        """
        self._progress.text = f"micro-batch {number + 1} of {len(self._parts)}"
        if self._begin_statistics is not None:
            self._begin_statistics()
        if self._masks is not None:
            self._masks.begin(self._parts[number].samples)

    def each(self, batches: Iterator[Any]) -> Iterator[Any]:
        """The micro-batches, each after everybody was told.

        Args:
            batches: as many as there are parts.
        """
        self._progress.text = f"micro-batch 1 of {len(self._parts)}"
        for index, batch in numbered(batches):
            self.begin(index)
            yield batch
            del batch  # before the next one is made

    def again(self, number: int) -> None:
        """Tells everybody that a micro-batch begins for the second time.

        Args:
            number: of the micro-batch.
        """
        self._progress.text = f"micro-batch {number + 1} of {len(self._parts)}, for the second time"
        if self._masks is not None:
            self._masks.begin(self._parts[number].samples)

    def whole(self, rows: int) -> None:
        """Begins what sees all samples.

        Args:
            rows: how many there are.
        """
        self._progress.text = "the coupled loss of the whole batch"
        if self._masks is not None:
            self._masks.begin(range(rows), stage=1)
