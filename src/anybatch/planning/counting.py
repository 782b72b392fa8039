"""What a count holds while it runs on the whole batch, before the first micro-batch does."""

import logging
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from anybatch.gradient.weights import FORWARD
from anybatch.planning.optimizer import LocalScalars
from anybatch.planning.running import tensors_in
from anybatch.planning.subjects import Subject
from anybatch.records.memory import INPUTS
from anybatch.tensors.counting import count_samples
from anybatch.tensors.fakes import Fakes
from anybatch.tensors.meter import Recording
from anybatch.tensors.trees import map_leaves

logger = logging.getLogger(__name__)

_PIECES = 32


def counted_bytes(subject: Subject) -> int:
    """The most bytes that the functions of ``count=`` hold besides the batch.

    They run on fake tensors. One that looks at numbers runs for real, on small pieces of the batch, which together hold
    at least as much as the whole.

    Args:
        subject: what is planned.

    Returns:
        The bytes; 0 where only samples are counted, where raw samples are, which nobody sees as a whole, and where the
        batch is not on the device.
    """
    count, splittable = subject.count, subject.splittable
    is_elsewhere = subject.device_type != "cpu" and not subject.batch_is_there
    if count is count_samples or count == FORWARD or splittable.is_collated or is_elsewhere:
        return 0
    functions = list(count.values()) if isinstance(count, Mapping) else [count]
    try:
        return _most(functions, splittable.batches, subject.granularity)
    except Exception as error:  # noqa: BLE001 - code of the user's, which is not meant to run on fakes
        logger.info("the count can't run on fake tensors (%s: %s)", type(error).__name__, error)
    pieces = splittable.materialise(splittable.plan(max(1, splittable.rows // _PIECES), is_shared=False))
    try:
        return sum(_held(function, piece, Recording()) for piece in pieces for function in functions)
    except Exception as error:  # noqa: BLE001 - the step itself raises it, too
        logger.info("the count can't run on a part of the batch (%s: %s)", type(error).__name__, error)
        return 0


def _most(functions: Iterable[Any], batches: Iterable[Any], granularity: int) -> int:
    found = [0]
    for batch in batches:
        fakes = Fakes()

        def like(leaf: Any, fakes: Fakes = fakes) -> Any:
            return fakes.like(leaf) if isinstance(leaf, torch.Tensor) else leaf

        stand_in = map_leaves(like, batch)
        for function in functions:
            with fakes.mode:
                recording = LocalScalars(granularity=granularity, counts_fakes=True)
                found.append(_held(function, stand_in, recording))
        fakes.let_go()
    return max(found)


def _held(function: Any, batch: Any, recording: Recording) -> int:
    recording.register(tensors_in(batch), INPUTS, counted=False)
    with recording:
        result = function(batch)
    del result
    recording.end()
    return max(recording.live_bytes(), default=0)
