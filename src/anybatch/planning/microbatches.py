"""The micro-batches that run to plan a step: cut, collated or stood in for, and what is left of these afterwards.

Raw samples are collated on tensors without numbers, which take no memory, as long as that goes well. For real, which is
faster, few are collated that take no more than gradients do later; where it does not go well, as few at a time as fit.
They are given as copies where ``collate`` may write into them.
"""

import contextlib
import functools
import gc
import itertools
import logging
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence

from anybatch.batch.batches import Part, Splittable, split
from anybatch.batch.layout import PLAIN, Constant, Rows, rows_of
from anybatch.batch.trees import leaves, map_leaves, tensors_within
from anybatch.batch.writes import Writes, differ, own_array, writable
from anybatch.loss.sequence import OverTime
from anybatch.memory.meter import Recording, storages_of
from anybatch.planning.fingerprints import Shape, shapes_in
from anybatch.planning.subjects import Subject
from anybatch.records.memory import INPUTS
from anybatch.tensors.fakes import Fakes
from anybatch.tensors.sideeffects import SideEffects

logger = logging.getLogger(__name__)


def clear_away(fakes: Fakes, device: torch.device) -> tuple[int, list[str]]:
    """Makes real tensors of the fake ones that are left of a trace, where they are; no cache loses anything.

    It says how many there were, and the shapes of what is left, since it hangs on weights, samples or random numbers.
    """
    fakes.let_go()
    gc.collect()
    if (found := len(fakes.alive())) == 0:
        return 0, []
    fakes.make_real(device)
    left = fakes.alive()
    logger.info(
        "%d tensors of a trace were kept by the step; %d of them are now replaced by real ones",
        found,
        found - len(left),
    )
    return found, [f"{tuple(fake.shape)} of {fake.dtype}" for fake in left]


def collated(subject: Subject, part: Part) -> Any:
    """A micro-batch of raw samples, for real."""
    keeps = functools.partial(writable, arrays_only=True)
    return subject.splittable.collated(part, writable if subject.behaviour.collate_writes is not False else keeps)


def collated_on_fakes(subject: Subject, part: Part, scratch: Fakes) -> Any | None:
    """A micro-batch of raw samples, of tensors without numbers.

    It is ``None`` if it has to be collated for real, or may well be.
    """
    behaviour = subject.behaviour
    if behaviour.collates_fakes is None:
        behaviour.collates_fakes = _runs_on_fakes(subject, Part([0], 1))
    if not behaviour.collates_fakes or _is_small(subject, part):
        return None
    try:
        return _on_fakes(subject, part, scratch)
    except Exception as error:  # noqa: BLE001 - it may look at numbers in some samples only
        logger.info("collate can't run on fake tensors (%s: %.100s)", type(error).__name__, error)
        behaviour.collates_fakes = False
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
        logger.info("collate keeps its inputs, so it can't run on fake tensors: %s", left[:1])
        return False
    if not is_through:
        return False
    sample = next(subject.splittable.samples_of(part))
    own = writable(sample)
    subject.splittable.collated(part, lambda _: own)
    if differ(own, sample):
        subject.behaviour.collate_writes = True
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
                batch = subject.splittable.collated(part, lambda _: next(items))
        finally:
            carried.restore()
    if subject.behaviour.collate_writes is not True:
        subject.behaviour.collate_writes = writes.were_made
    for _, _, leaf in leaves(batch):
        if not _is_known(leaf):
            raise TypeError(f"collate returns a {type(leaf).__name__}, which may hold tensors that can't be seen")
    return batch


def _fake_of(scratch: Fakes, leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return scratch.like(leaf).clone()  # a sample may be there twice
    if not _is_known(leaf):
        raise TypeError(f"a sample holds a {type(leaf).__name__}, which can't be faked")
    return own_array(leaf)


def _is_known(leaf: Any) -> bool:
    return isinstance(leaf, (torch.Tensor, *PLAIN)) or type(leaf).__module__ == "numpy"


def takes_memory(subject: Subject) -> bool:
    """Whether samples take memory when they are collated for a trace: for real, or arrays, which have no fakes."""
    if not subject.splittable.is_collated:
        return False
    first = subject.splittable.samples_of(Part([0], 1))
    return subject.behaviour.collates_fakes is not True or any(
        hasattr(leaf, "nbytes") and not isinstance(leaf, torch.Tensor) for one in first for _, _, leaf in leaves(one)
    )


def bytes_to_collate(subject: Subject, part: Part, bytes_of_one: int) -> int:
    """The bytes that are alive when samples are collated for real to plan, with what is there anyway."""
    held = (
        sum(one.nbytes for one in [*subject.parameters, *subject.buffers]) + subject.batch_bytes + subject.state_bytes
    )
    return held + _copied_bytes(subject, part) + len(part.samples) * bytes_of_one


def _copied_bytes(subject: Subject, part: Part) -> int:
    copied = 0
    for sample in subject.splittable.samples_of(part):
        for _, _, leaf in leaves(sample):
            if not isinstance(leaf, torch.Tensor) or subject.behaviour.collate_writes is not False:
                copied += bytes_of(leaf)
    return copied


def bytes_of(leaf: Any) -> int:
    """The bytes of a leaf; a number counts as one that a tensor is made of, and a text has a byte a character."""
    data = leaf.data if isinstance(leaf, PackedSequence) else leaf
    if isinstance(data, torch.Tensor) and (data.is_nested or data.layout is not torch.strided):
        return sum(storage.nbytes() for storage in storages_of(data))
    if isinstance(data, str):
        return len(data)
    if not hasattr(data, "nbytes") and not isinstance(data, PLAIN):
        return sum(tensor.nbytes for tensor in tensors_within(data)[0])
    return int(getattr(data, "nbytes", 8))


def bytes_in(batch: Any) -> int:
    """The bytes of all leaves but texts."""
    return sum(bytes_of(leaf) for _, _, leaf in leaves(batch) if not isinstance(leaf, str))


def _is_small(subject: Subject, part: Part) -> bool:
    """Whether samples are known to take less when they are collated than the gradients, which are not there yet."""
    known = subject.behaviour.collated_bytes * len(part.samples)
    if not known:
        return False
    gradients = sum(parameter.nbytes for parameter in subject.parameters if parameter.requires_grad)
    return known <= gradients and known + _copied_bytes(subject, part) <= gradients


def shapes_of_batches(splittable: Splittable, loss_fn: Any = None) -> tuple[Shape, ...]:
    """All dimensions of the samples of each batch, one after the other: one shape for each.

    There are none of raw samples, and where samples lie in something else than tensors and lists of plain items, which
    are looked at one by one.
    """
    if splittable.is_collated or isinstance(loss_fn, OverTime) or not all(map(_is_cut_plainly, splittable.nodes())):
        return ()
    batches = (splittable.nodes(number) for number in range(len(splittable.layouts)))
    return tuple(tuple(d for node in nodes for _, shape in shapes_in(node) for d in shape) for nodes in batches)


def shapes_differ(splittable: Splittable, loss_fn: Any = None) -> bool:
    """Whether a window has batches of several shapes."""
    return len(splittable.batches) > 1 and len(set(shapes_of_batches(splittable, loss_fn))) > 1


def lengths_by_shape(shapes: tuple[Shape, ...]) -> tuple[dict[Shape, int], bool]:
    """A length for each shape, and whether everything else about a shape follows from it."""
    found = list(dict.fromkeys(shapes))
    columns = [[one[k] for one in found] for k in range(len(found[0]))] if len({*map(len, found)}) == 1 else []
    varying = [column for column in columns if len({*column}) > 1]
    is_one = len(found) > 2 and bool(varying)
    is_one = is_one and all(len({a - b for a, b in zip(varying[0], other, strict=True)}) == 1 for other in varying)
    if is_one:
        return {shape: max(column[i] for column in varying) for i, shape in enumerate(found)}, True
    order = sorted(found, key=lambda shape: (sum(shape), shape))
    return {shape: sum(shape) * len(order) + place for place, shape in enumerate(order)}, False


def part_of_window(splittable: Splittable, part: Part) -> Any:
    """A micro-batch of as many samples as a part, of the batch that its first sample is in."""
    stops = list(accumulate(layout.rows for layout in splittable.layouts))
    number, samples = bisect_right(stops, part.samples[0]), len(part.samples)
    layout = splittable.layouts[number]
    if samples > layout.rows:
        return splittable.chosen([place % layout.rows for place in range(samples)], number).whole()
    found = next(split(layout, [samples, layout.rows - samples]))
    return writable(found) if splittable.is_copied else found


def _is_cut_plainly(node: Rows | Constant) -> bool:
    if isinstance(node, Constant):
        return True
    value = node.value
    if isinstance(value, torch.Tensor):
        return value.layout is torch.strided and not value.is_nested
    if type(value) in (list, tuple):
        return all(isinstance(item, PLAIN) for item in value)
    return hasattr(value, "dtype") and rows_of(value) is not None


def micro_batch_of(subject: Subject, part: Part) -> Any:
    """A micro-batch of the size of a part: of raw samples just these, else the one with the most in it."""
    splittable = subject.splittable
    if splittable.is_collated:
        return collated(subject, part)
    if shapes_differ(splittable, subject.loss_fn):
        return part_of_window(splittable, part)
    parts = splittable.plan(len(part.samples), is_shared=False)
    most = max(len(one.samples) for one in parts)
    full = [index for index, one in enumerate(parts) if len(one.samples) == most]
    if splittable.has_lists and len(full) > 1:
        bytes_of = [bytes_in(batch) for batch in splittable.materialise(parts)]
        chosen = max(full, key=bytes_of.__getitem__)
    else:
        chosen = full[0]
    is_cut = len(splittable.layouts) == 1 and splittable.obstacle is None
    if is_cut and not (chosen and splittable.is_copied):  # many views take memory, and so does a copy of all before
        parts, chosen = _joined_around(parts, chosen)
    return next(itertools.islice(splittable.materialise(parts), chosen, None))


def _joined_around(parts: Sequence[Part], chosen: int) -> tuple[list[Part], int]:
    """One part with all that come before it as one part, and all behind it as another; and its new place."""
    around = [parts[:chosen], parts[chosen : chosen + 1], parts[chosen + 1 :]]
    joined = [Part([i for one in some for i in one.samples], 0.0) for some in around if some]
    return joined, min(chosen, 1)


def batch_for_loss(subject: Subject, part: Part) -> Any:
    """A micro-batch that the loss may be run on: a copy if it writes into its batch, or may do so.

    Arrays are copied in any case, since writes to them can't be noticed.
    """
    batch, behaviour = micro_batch_of(subject, part), subject.behaviour
    if subject.splittable.is_copied or (subject.splittable.is_collated and not _shares_samples(subject, part, batch)):
        return batch
    return writable(batch, arrays_only=behaviour.writes_batch is False and not behaviour.looks_at_numbers)


def _shares_samples(subject: Subject, part: Part, batch: Any) -> bool:
    """Whether a collated micro-batch lies in the memory of the samples themselves."""
    own = {
        s._cdata for sample in subject.splittable.samples_of(part) for t in tensors_in(sample) for s in storages_of(t)
    }
    return any(storage._cdata in own for tensor in tensors_in(batch) for storage in storages_of(tensor))


def stand_in_of(subject: Subject, part: Part, fakes: Fakes) -> Any:
    """A micro-batch without numbers."""
    scratch, batch = Fakes(), None
    if subject.splittable.is_collated:
        batch = collated_on_fakes(subject, part, scratch)
    if batch is None:
        batch = writable(micro_batch_of(subject, part), arrays_only=True)
    found = map_leaves(lambda leaf: fakes.like(leaf) if isinstance(leaf, torch.Tensor) else leaf, batch)
    scratch.let_go()
    return found


def tensors_in(batch: Any) -> list[torch.Tensor]:
    """The tensors of a batch, also those of packed sequences, and of objects."""
    found: list[torch.Tensor] = []
    for _, _, leaf in leaves(batch):
        if isinstance(leaf, PackedSequence):
            found.append(leaf.data)
        elif isinstance(leaf, torch.Tensor):
            found.append(leaf.values() if leaf.is_nested and leaf.layout is torch.jagged else leaf)
        else:
            found += tensors_within(leaf)[0]
    return found
