"""Counts that no proof has told from the step's own so far; a batch that tells them apart is proved again.

All labels of a row, and all but its first, are as many as long as no first label counts, as where prompts are masked.
What was proved of such a batch says nothing of one in which they are not.
"""

import contextlib
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from anybatch.batch.batches import Part, Splittable, split
from anybatch.batch.counting import count_samples
from anybatch.batch.trees import flat, like
from anybatch.checking.candidates import Candidate, ways_to_count
from anybatch.checking.cuts import Cut
from anybatch.checking.elsewhere import may_be_changed, shuffled
from anybatch.checking.reach import tensors_of
from anybatch.loss.losses import as_coupled
from anybatch.loss.weights import FORWARD
from anybatch.tensors.dispatch import unseen
from anybatch.update.passes import Task

_ROUNDING = 1e-9
_RATE = 0.3  # of the entries that another batch is made with
_RAW, _ROWS = 64, 512  # samples that are counted one by one, raw ones and others
_Key = tuple[str, str]  # the name of a loss, and how the other way is written


class _Pair(NamedTuple):
    """The count of a step and another that has been the same so far, but for a factor."""

    own: Candidate
    other: Candidate
    factor: float  # how many times as much the own one has counted

    def is_kept(self, batches: Sequence[Any], rows: Sequence[int]) -> bool:
        """Whether the own count of some batches is so many times the other."""
        own, other = (sum(map(one.number, batches, rows)) for one in self[:2])
        return abs(own - self.factor * other) <= _ROUNDING * abs(own)

    def shares(self, batches: Sequence[Any], rows: Sequence[int]) -> list[torch.Tensor]:
        """The share of each batch in what either counts; without a number where it counts nothing."""
        return [_shares(list(map(one.number, batches, rows))) for one in self[:2]]

    def are_apart(self, batches: Sequence[Any], rows: Sequence[int]) -> bool:
        """Whether the two weigh some batches otherwise."""
        own, other = self.shares(batches, rows)
        return bool(((own - other).abs() > _ROUNDING).any())


def _shares(numbers: Sequence[float]) -> torch.Tensor:
    found = torch.tensor(numbers, dtype=torch.float64, device="cpu")
    return found / found.sum()


class OtherCounts:
    """What a loss may be a mean over, as far as the proofs of one layout of batches can tell."""

    def __init__(self) -> None:
        self.pairs: dict[_Key, _Pair] = {}  # which no proof has told apart
        self._told: set[_Key] = set()  # of which nothing is to be seen any more
        self._met: set[_Key] = set()  # which the batch that is proved tells apart
        self._waits = False  # whether reading a count would wait for a device

    def look(self, task: Task, parts: Sequence[Part], exact: Sequence[Cut], most: int) -> Cut | None:
        """Some samples that tell one of them from the own count, where all cuts that were found exact do not.

        Args:
            exact: these cuts.
            most: samples at most.

        Returns:
            The samples; ``None`` where this batch has none.
        """
        self._note(task, parts)
        for cut in exact:
            batches, rows = list(cut.splittable.materialise(cut.parts)), list(cut.sizes)
            self._leave_out(key for key, pair in self.pairs.items() if pair.are_apart(batches, rows))
        self._met = self.apart_in(task, parts)
        return self._cut(task.splittable, most) if self._met else None

    def _note(self, task: Task, parts: Sequence[Part]) -> None:
        """Adds ways to count the batch that are not known yet."""
        for name, function in _own_counts(task).items():
            own, batch = Candidate("", "", function), next(task.splittable.materialise(parts))
            rows, kept = len(parts[0].samples), list[_Pair]()
            total, self._waits = own.number(batch, rows), _is_elsewhere(batch)
            for other in ways_to_count(batch, task.splittable.broadcast, tensors_of(task.loss_fn)):
                number, is_new = other.number(batch, rows), (name, other.code) not in self._told | self.pairs.keys()
                # What leaves nothing out differs from the samples only by an entry that no batch had so far.
                if is_new and number > 0 and total > 0 and (other.leaves_out or function is not count_samples):
                    kept.append(_Pair(own, other, total / number))
            changed = list(_changed(batch)) if kept else []
            for pair in kept:
                key = name, pair.other.code
                if all(pair.is_kept([one], [rows]) for one in changed):
                    self._told.add(key)  # it is the same function
                else:
                    self.pairs[key] = pair

    def _leave_out(self, keys: Iterable[_Key]) -> None:
        for key in [*keys]:
            self._told.add(key)
            self.pairs.pop(key, None)

    def _cut(self, splittable: Splittable, most: int) -> Cut | None:
        for batch, samples in _samples(splittable):
            chosen = dict[int, None]()
            for pair in map(self.pairs.__getitem__, self._met):
                numbers = [[one.number(sample, 1) for sample in samples] for one in pair[:2]]
                own, other = torch.tensor(numbers, dtype=torch.float64, device="cpu")
                ratios = (other / own).nan_to_num(math.inf)
                if len(chosen) + 2 <= most and float(ratios.max()) > float(ratios.min()):
                    chosen |= dict.fromkeys([int(ratios.argmin()), int(ratios.argmax())])
            if len(few := list(chosen)) > 1:
                return Cut(splittable.chosen(few, batch), (len(few) - 1, 1))
        return None

    def apart_in(self, task: Task, parts: Sequence[Part]) -> set[_Key]:
        """Those by which a batch would be weighed otherwise; a new factor is noted of the others."""
        batches, rows = list(task.splittable.materialise(parts)), [len(part.samples) for part in parts]
        found = set[_Key]()
        for key, pair in self.pairs.items():
            if pair.are_apart(batches, rows):
                found.add(key)
            else:
                own, other = (sum(map(one.number, batches, rows)) for one in pair[:2])
                self.pairs[key] = pair._replace(factor=own / other if other else pair.factor)
        return found

    @unseen
    def are_apart(self, task: Task, parts: Sequence[Part]) -> bool:
        """Whether a batch tells from the own count what none so far did: then it is to be proved."""
        layouts, self._met = task.splittable.layouts, set()
        if self._waits:
            return False
        with contextlib.suppress(Exception):  # what a count raises, it raises in the step itself
            rows = [one.rows for one in layouts]
            if not all(pair.is_kept(task.splittable.batches, rows) for pair in self.pairs.values()):
                self._met = self.apart_in(task, parts)
        return bool(self._met)

    @unseen
    def are_apart_in(self, batch: Any, rows: int, factors: dict[_Key, float]) -> bool:
        """The same of a batch that ``collate`` made.

        Args:
            factors: of the batches before it in this step, to which its own are added.
        """
        self._met = set()
        with contextlib.suppress(Exception):
            for key, pair in self.pairs.items():
                own, other = (one.number(batch, rows) for one in pair[:2])
                if own or other:
                    factor = factors.setdefault(key, own / other if other else math.inf)
                    if not abs(own - factor * other) <= _ROUNDING * own:
                        self._met.add(key)
        return bool(self._met)

    def conclude(self) -> None:
        """Leaves out what no proof of this batch could tell apart, so that not each one is proved."""
        self._leave_out(self._met)


def _own_counts(task: Task) -> Mapping[str, Any]:
    """The counts that weigh the losses of a task; none where the loss sees all samples, or the forward counts."""
    if task.count == FORWARD or as_coupled(task.loss_fn) is not None:
        return {}
    return task.count if isinstance(task.count, Mapping) else {"": task.count}


def _samples(splittable: Splittable) -> Iterator[tuple[int, list[Any]]]:
    """The first samples of each batch that can be cut, a batch of one each."""
    if splittable.collate is not None:
        yield 0, [splittable.collated(Part([row], 1)) for row in range(min(splittable.rows, _RAW))]
        return
    for batch, layout in enumerate(splittable.layouts):
        if layout.obstacle is None:
            rows = min(layout.rows, _ROWS)
            rest = [layout.rows - rows] if layout.rows > rows else []
            yield batch, list(itertools.islice(split(layout, [1] * rows + rest), rows))


def _is_elsewhere(batch: Any) -> bool:
    return any(isinstance(leaf, torch.Tensor) and leaf.device.type != "cpu" for leaf in flat(batch))


def _changed(batch: Any) -> Iterator[Any]:
    """The batch with other numbers, by which two functions show that they are not the same one."""
    generator, values = torch.Generator("cpu").manual_seed(0), flat(batch)

    def others(whole: float, real: float) -> Any:
        return like(batch, [_marked(one, whole, real, generator) for one in values])

    yield others(-100, 0.0)
    yield others(0, math.nan)
    yield like(batch, [shuffled(one, generator) for one in values])


def _marked(leaf: Any, whole: float, real: float, generator: torch.Generator) -> Any:
    if not may_be_changed(leaf):
        return leaf
    is_whole, is_signed = not leaf.is_floating_point(), leaf.dtype not in (torch.bool, torch.uint8)
    mark = real if not is_whole else whole if is_signed else 0
    chosen = torch.rand(leaf.shape, generator=generator, device="cpu") < _RATE
    return leaf.masked_fill(chosen.to(leaf.device), mark)
