"""Raw samples collated to plan: on tensors without numbers, which take no memory, as long as that goes well.

For real, which is faster, few are collated that take no more than gradients do later; where it does not go well, as few
at a time as fit. They are given as copies where ``collate`` may write into them.
"""

import contextlib
import functools
import logging
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence

from anybatch.planning.leftovers import clear_away
from anybatch.planning.subjects import Subject
from anybatch.records.memory import INPUTS
from anybatch.tensors.batches import Part
from anybatch.tensors.fakes import Fakes
from anybatch.tensors.layout import PLAIN
from anybatch.tensors.meter import Recording, storages_of
from anybatch.tensors.sideeffects import SideEffects
from anybatch.tensors.trees import leaves, map_leaves, tensors_within
from anybatch.tensors.writes import Writes, differ, own_array, writable

logger = logging.getLogger(__name__)


def collated(subject: Subject, part: Part) -> Any:
    """A micro-batch of raw samples, for real.

    Args:
        subject: has the samples.
        part: which of them.
    """
    keeps = functools.partial(writable, arrays_only=True)
    return subject.splittable.collated_apart(part, writable if subject.habits.collate_writes is not False else keeps)


def collated_on_fakes(subject: Subject, part: Part, scratch: Fakes) -> Any | None:
    """A micro-batch of raw samples, of tensors without numbers.

    Args:
        subject: has the samples; it learns whether ``collate`` runs on such tensors, and writes into them.
        part: which of them.
        scratch: makes the tensors.

    Returns:
        The micro-batch; ``None`` if it has to be collated for real, or may well be.
    """
    habits = subject.habits
    if habits.collates_fakes is None:
        habits.collates_fakes = _runs_on_fakes(subject, Part([0], 1))
    if not habits.collates_fakes or _is_small(subject, part):
        return None
    try:
        return _on_fakes(subject, part, scratch)
    except Exception as error:  # noqa: BLE001 - it may look at numbers in some samples only
        logger.info("collate can't run on fake tensors (%s: %.100s)", type(error).__name__, error)
        habits.collates_fakes = False
        return None


def _runs_on_fakes(subject: Subject, part: Part) -> bool:
    """Tries the first sample, and finds out from it alone whether ``collate`` writes in a way that no counter shows."""
    scratch, recording, is_through = Fakes(), Recording(counts_fakes=True), False
    try:
        _on_fakes(subject, part, scratch, recording)
        is_through = True
    except Exception as error:  # noqa: BLE001 - code of the user's, which is not meant to run on fakes
        logger.info("collate can't run on fake tensors (%s: %.100s)", type(error).__name__, error)
    scratch.let_go()
    if recording.has_survivors:
        _, left = clear_away(scratch, subject.settings.device)
        logger.info("collate keeps what it is given, so that it can't run on fake tensors: %s", left[:1])
        return False
    if not is_through:
        return False
    sample = next(subject.splittable.samples_of(part))
    own = writable(sample)
    subject.splittable.collated_apart(part, lambda _: own)
    if differ(own, sample):
        subject.habits.collate_writes = True
    return True


def _on_fakes(subject: Subject, part: Part, scratch: Fakes, recording: Recording | None = None) -> Any:
    carried = SideEffects([subject.splittable.collate], tensors=False)
    with scratch.mode:
        own = functools.partial(map_leaves, functools.partial(_fake_of, scratch))
        samples = [own(sample) for sample in subject.splittable.samples_of(part)]
        writes, items = Writes(samples), iter(samples)
        if recording is not None:
            recording.register((leaf for one in samples for _, _, leaf in leaves(one)), INPUTS, counted=False)
        del samples
        try:
            with recording or contextlib.nullcontext():
                batch = subject.splittable.collated_apart(part, lambda _: next(items))
        finally:
            carried.restore()
    if subject.habits.collate_writes is not True:
        subject.habits.collate_writes = writes.were_made
    for _, _, leaf in leaves(batch):
        if not _is_known(leaf):
            raise TypeError(f"collate gives a {type(leaf).__name__}, which may hold tensors that are not seen")
    return batch


def _fake_of(scratch: Fakes, leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return scratch.like(leaf).clone()  # a sample may be there twice
    if not _is_known(leaf):
        raise TypeError(f"a sample holds a {type(leaf).__name__}, which has no fake")
    return own_array(leaf)


def _is_known(leaf: Any) -> bool:
    return isinstance(leaf, (torch.Tensor, *PLAIN)) or type(leaf).__module__ == "numpy"


def takes_memory(subject: Subject) -> bool:
    """Whether samples take memory when they are collated for a trace: for real, or arrays, which have no fakes.

    Args:
        subject: has the samples.
    """
    if not subject.splittable.is_collated:
        return False
    first = subject.splittable.samples_of(Part([0], 1))
    return subject.habits.collates_fakes is not True or any(
        hasattr(leaf, "nbytes") and not isinstance(leaf, torch.Tensor) for one in first for _, _, leaf in leaves(one)
    )


def bytes_to_collate(subject: Subject, part: Part, bytes_of_one: int) -> int:
    """The bytes that are alive when samples are collated for real to plan, with what is there anyway.

    Args:
        subject: has the samples.
        part: which of them.
        bytes_of_one: of the largest sample, collated.
    """
    buffers = [buffer for root in subject.roots for buffer in root.buffers()]
    held = sum(tensor.nbytes for tensor in [*subject.parameters, *buffers]) + subject.batch_bytes + subject.state_bytes
    return held + _copied_bytes(subject, part) + len(part.samples) * bytes_of_one


def _copied_bytes(subject: Subject, part: Part) -> int:
    copied = 0
    for sample in subject.splittable.samples_of(part):
        for _, _, leaf in leaves(sample):
            if not isinstance(leaf, torch.Tensor) or subject.habits.collate_writes is not False:
                copied += bytes_of(leaf)
    return copied


def bytes_of(leaf: Any) -> int:
    """The bytes of a leaf; a number counts as one that a tensor is made of, and a text has a byte for each character.

    Args:
        leaf: of a sample or a batch.
    """
    data = leaf.data if isinstance(leaf, PackedSequence) else leaf
    if isinstance(data, torch.Tensor) and (data.is_nested or data.layout is not torch.strided):
        return sum(storage.nbytes() for storage in storages_of(data))
    if isinstance(data, str):
        return len(data)
    if not hasattr(data, "nbytes") and not isinstance(data, PLAIN):
        return sum(tensor.nbytes for tensor in tensors_within(data)[0])
    return int(getattr(data, "nbytes", 8))


def bytes_in(batch: Any) -> int:
    """The bytes of all leaves but texts.

    Args:
        batch: any nested container.
    """
    return sum(bytes_of(leaf) for _, _, leaf in leaves(batch) if not isinstance(leaf, str))


def _is_small(subject: Subject, part: Part) -> bool:
    """Whether samples are known to take less when they are collated than the gradients, which are not there yet."""
    known = subject.habits.collated_bytes * len(part.samples)
    if not known:
        return False
    gradients = sum(parameter.nbytes for parameter in subject.parameters if parameter.requires_grad)
    return known <= gradients and known + _copied_bytes(subject, part) <= gradients
