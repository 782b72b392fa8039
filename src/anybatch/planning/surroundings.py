"""What is in memory besides the encoder and the loss of a coupled step."""

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.modules.batchnorm import _NormBase

from anybatch.gradient.coupling import Coupled
from anybatch.levers.checkpointing import SMALL
from anybatch.planning.curve import Profile
from anybatch.planning.encoders import Curve, OutputFacts
from anybatch.planning.jointlosses import LossTrace
from anybatch.planning.keeping import Around, Encoded
from anybatch.planning.subjects import Subject
from anybatch.tensors.modules import modules_behind, modules_of
from anybatch.tensors.trees import leaves


def around_of(
    subject: Subject, outputs: OutputFacts, loss: LossTrace, profile: Profile, curve: Curve, parts: Sequence[Encoded]
) -> Around:
    """Adds it up, without the state of the optimizer.

    Args:
        subject: what is planned.
        outputs: of the encoder.
        loss: on all of them.
        profile: of the encoder.
        curve: of its largest micro-batch.
        parts: the micro-batches.
    """
    coupled, constants, splittable = subject.loss_fn, profile.constants, subject.splittable
    moved = subject.device_type == "cuda" and not subject.batch_is_there
    inputs = min(2, len(parts)) * max(part.inputs for part in parts) if moved else 0
    if splittable.is_collated and not moved:
        inputs = sum(part.inputs for part in parts)  # what a collate made at random is kept for the second pass
    joins = len(splittable.batches) > 1 and not splittable.is_collated
    looks = isinstance(coupled, Coupled) and coupled.takes_batch and (moved or joins)
    reached, in_loss = set(profile.fit.trace.trained), set(loss.trained)
    known = subject.gradient_bytes(in_loss - reached)  # which the encoder alone does not reach
    return Around(
        throughout=curve.fixed + constants.batch + constants.buffers + max(0, constants.unreached - known),
        inputs=inputs,
        replay=_replayed_bytes(subject) + outputs.mark_bytes,
        whole=_bytes_of(splittable.batches) if looks else 0,
        shared_gradients=subject.gradient_bytes(reached & in_loss),
        moved=moved,
    )


def _bytes_of(batches: Sequence[Any]) -> int:
    return sum(leaf.nbytes for batch in batches for _, _, leaf in leaves(batch) if isinstance(leaf, torch.Tensor))


def _replayed_bytes(subject: Subject) -> int:
    """What a micro-batch that is encoded twice keeps of the buffers, see ``tensors.state``."""
    found = 0
    for module in modules_of(*modules_behind(subject.model, getattr(subject.loss_fn, "encode", None))):
        normalises = isinstance(module, _NormBase)
        found += sum(
            buffer.nbytes
            for buffer in module._buffers.values()
            if buffer is not None and (normalises or buffer.nbytes <= SMALL)
        )
    return found


def clock_of(subject: Subject) -> float:
    """The time when everything that was begun on the device is done.

    Args:
        subject: has the device.
    """
    if subject.settings.device.type == "cuda":
        torch.cuda.synchronize(subject.settings.device)
    return time.perf_counter()
