"""The lengths of raw samples, which decide what a micro-batch of them is padded to."""

import torch

from anybatch.planning.subjects import Subject
from anybatch.tensors.batches import Part
from anybatch.tensors.trees import leaves


def lengths_of(subject: Subject) -> list[int]:
    """The one dimension that differs between collated samples.

    Several dimensions that differ, such as the lengths of a source and a target, are summed up as the longest.

    Args:
        subject: has the samples.

    Returns:
        A length for each sample; none where all are alike.
    """
    splittable = subject.splittable
    if not splittable.is_collated:
        return []
    shapes = []
    for index in range(splittable.rows):
        (batch,) = splittable.collated_apart([Part([index, index], 2)])
        shapes.append([tuple(leaf.shape[1:]) for _, _, leaf in leaves(batch) if isinstance(leaf, torch.Tensor)])
    flat = [[extent for shape in sample for extent in shape] for sample in shapes]
    if len({len(one) for one in flat}) != 1:
        return []
    varying = [k for k in range(len(flat[0])) if len({one[k] for one in flat}) > 1]
    return [max(one[k] for k in varying) for one in flat] if varying else []
