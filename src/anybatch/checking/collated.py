"""What raw samples become in ``collate``: padded to the longest of them, and other ones by numbers drawn there."""

from collections.abc import Sequence
from typing import Any

import torch

from anybatch.batch.batches import Part, Splittable
from anybatch.batch.trees import flat, like
from anybatch.checking.causes import reason
from anybatch.checking.gradients import Comparison
from anybatch.checking.meeting import meets
from anybatch.checking.rig import Case
from anybatch.checking.standins import StandIns
from anybatch.records.certificates import Reason
from anybatch.tensors.randomness import RandomState
from anybatch.tensors.sideeffects import SideEffects, same

OTHERS = "numpy or Python"
"""What draws numbers for which nothing can stand in: also a generator of the user's own."""
_ORDER = "randperm"


class Draws:
    """Sees what draws random numbers: torch, or what nothing can stand in for."""

    def __init__(self, effects: SideEffects, stand_ins: StandIns | None) -> None:
        self._random, self._effects, self._own = RandomState(), effects, effects.generators()
        self._of_torch = {} if stand_ins is None else stand_ins.draws
        self._before = dict(self._of_torch)
        self._of_torch.clear()

    def met(self) -> list[str]:
        """The operations of torch that have drawn by now, and ``OTHERS``."""
        operations = [draw.operation for draw in self._of_torch]
        self._of_torch.update(self._before)
        others = self._random.moved()[1] or not same(self._own, self._effects.generators())
        return operations + [OTHERS] * others


def padded_or_drawn(
    case: Case, comparison: Comparison, padded: Splittable, splits: Sequence[Sequence[Part]], drawn: Sequence[str]
) -> list[Reason]:
    """Tells the length of the padding from what else ``collate`` does with samples, where one of them is the cause.

    Args:
        comparison: becomes that of the same numbers, where these are all there is to it.
        padded: the batch of all samples, which has the whole's gradient also in parts.
        splits: those parts.
        drawn: what draws in ``collate``, see ``Draws``.
    """
    for is_left in (False, True):
        held = case.compared(splits=splits, splittable=_as_long_as_own(case.rig.splittable, padded, is_left))
        if held.error <= case.tolerance:
            if OTHERS not in drawn:
                # Other draws of torch are of samples, though they may be other ones where the padding is longer.
                return [reason("collated together", "collate")] if set(drawn) <= {_ORDER} else [reason("padding")]
            met = meets(case)
            if met is not False:
                return [reason("drawn together") if met else reason("not held", "collate", {"meet": None})]
            comparison.each, comparison.error = held.each, held.error
            case.notes.append(reason("drawn", "collate", {"operations": [OTHERS]}, shown=["`collate`"]))
            return []
    return [reason("padding")]


def _as_long_as_own(samples: Splittable, padded: Splittable, is_left: bool) -> Splittable:
    """The rows of a padded batch, each part as long as that of its own samples, with the numbers of the whole."""
    raw, collate = samples.whole(), samples.collate

    def cut(chosen: list[int]) -> Any:
        own = padded.chosen(chosen).whole()
        lengths = flat(collate([raw[row] for row in chosen]))  # type: ignore[misc]
        return like(own, [_shortened(*pair, is_left) for pair in zip(flat(own), lengths, strict=True)])

    return Splittable([list(range(padded.rows))], collate=cut)


def _shortened(leaf: Any, other: Any, is_left: bool) -> Any:
    """A leaf of the lengths of another."""
    if not isinstance(leaf, torch.Tensor) or not isinstance(other, torch.Tensor) or leaf.dim() != other.dim():
        return leaf
    for dim, (size, wanted) in enumerate(zip(leaf.shape, other.shape, strict=True)):
        if dim and wanted < size:
            leaf = leaf.narrow(dim, size - wanted if is_left else 0, wanted)
    return leaf
