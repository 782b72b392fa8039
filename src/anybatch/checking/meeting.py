"""Whether samples meet others of the batch by random numbers that nothing can stand in for, as of NumPy or Python.

Such numbers belong to the places in the batch, so that a split, in which a sample has another place, can't be compared
with the whole. Instead, whole batches are compared with one another, from the same random state: with the samples of
one half in another order, with those of the other half, and with both. Where no sample meets one of the other half,
what the two changes do to the sum over all items adds up, whatever is drawn for each place, or once for the batch.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from anybatch.batch.counting import count_samples
from anybatch.checking.gradients import Outcome, distance
from anybatch.checking.rig import Case, with_each
from anybatch.loss.coupling import Coupled
from anybatch.loss.losses import InPieces, LossFunction
from anybatch.records.means import Mean
from anybatch.tensors.randomness import RandomState
from anybatch.tensors.sideeffects import same
from anybatch.update.passes import Task

_LEAST = 4  # samples, of which two can change places in each half


def meets(case: Case) -> bool | None:
    """Whether samples meet others; ``None`` where that can't be told."""
    splittable, loss_fn = case.rig.splittable, case.rig.task.loss_fn
    if splittable.rows < _LEAST or isinstance(loss_fn, (Coupled, InPieces)):
        return None
    found = [_Runs(case).interact(_turned), _Runs(case).interact(_backwards)]
    with case.rig.drawn_on():  # they may meet none of the other half by chance
        found.append(_Runs(case).interact(_turned))
    return None if None in found else any(found)


def _turned(places: list[int]) -> list[int]:
    return [*places[1:], places[0]]


def _backwards(places: list[int]) -> list[int]:
    return places[::-1]


class _Runs:
    """Runs all samples in an order, from the same random state."""

    def __init__(self, case: Case) -> None:
        self._case, self._rig, self._loss_fn = case, case.rig, _totals(case.rig.task)
        self._order = list(range(case.rig.splittable.rows))
        self._as_it_is = self._gradient({})

    def interact(self, ordered: Callable[[list[int]], list[int]]) -> bool | None:
        """Whether it matters for one half in which order the other is.

        Args:
            ordered: puts the samples of a half in another order.
        """
        half = len(self._order) // 2  # the first, so that numbers that are drawn for one sample after the other stay
        halves = self._order[:half], self._order[half:]
        one, two = (dict(zip(places, ordered(places), strict=True)) for places in halves)
        whole, ends = self._as_it_is
        runs = [self._gradient(order) for order in (one, two, one | two)]
        if not all(same(ends, end) for _, end in runs):
            return None  # how much is drawn depends on what is in the samples, so that others get other numbers
        first, second, both = (_less(outcome.gradients, whole.gradients) for outcome, _ in runs)
        scale = max(whole.norm, *(distance(one) for one in (first, second, both)))
        error = distance(_less(both, first), second)
        return error > self._case.tolerance * scale if math.isfinite(error) and math.isfinite(scale) else None

    def _gradient(self, moved: Mapping[int, int]) -> tuple[Outcome, Any]:
        samples, ends = self._rig.splittable.chosen([moved.get(place, place) for place in self._order]), list[Any]()

        def ended() -> None:
            ends.append((RandomState([self._rig.device]).state_dict(), self._rig.effects.generators()))

        if (collate := samples.collate) is not None:  # after which the states are put back

            def collated(raw: list[Any]) -> Any:
                batch = collate(raw)
                ended()
                return batch

            samples.collate = collated
        found = self._rig.run(splittable=samples, loss_fn=self._loss_fn, count=count_samples)
        ended()
        return found, ends


def _less(ones: Sequence[torch.Tensor | None], others: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
    pairs = zip(ones, others, strict=True)
    return [one if other is None else -other if one is None else one - other for one, other in pairs]


def _totals(task: Task) -> LossFunction:
    """The losses of a task as sums over the items that they are means of."""
    count = task.count
    counts: list[Any] = [None]  # by name, of the batch that runs

    def counted(model: Any, batch: Any) -> Any:
        by_name = count if isinstance(count, Mapping) else {"": count}
        counts[0] = {name: one(batch) if callable(one) else 1 for name, one in by_name.items()}
        return task.loss_fn(model, batch)

    def total(name: str, loss: Any) -> Any:
        return loss.total if isinstance(loss, Mean) else loss * counts[0].get(name, counts[0].get("", 1))

    counted.user_functions = (task.loss_fn,)  # type: ignore[attr-defined]
    return with_each(counted, total)
