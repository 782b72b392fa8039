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

_ROUNDING = 1e-6  # relative: what is less makes no other gradient
_RATE = 0.3  # of the entries that another batch is made with
_RAW, _ROWS = 64, 512  # samples that are counted one by one, raw ones and others
_Key = tuple[str, str]  # the name of a loss, and how the other way is written


class _Other(NamedTuple):
    """A way to count that has given what the step's own gave, but for a factor."""

    own: Candidate  # not kept, since it may hold the model
    other: Candidate
    factor: float  # how many times as much the own one has counted

    def is_kept(self, batches: Sequence[Any], rows: Sequence[int]) -> bool:
        """Whether the own count of some batches is so many times the other."""
        own, other = (sum(map(one.number, batches, rows)) for one in self[:2])
        return abs(own - self.factor * other) <= _ROUNDING * abs(own)

    def are_apart(self, batches: Sequence[Any], rows: Sequence[int]) -> bool:
        """Whether the two weigh some batches otherwise."""
        own, other = (
            torch.tensor([*map(one.number, batches, rows)], dtype=torch.float64, device="cpu") for one in self[:2]
        )
        return bool(((own / own.sum() - other / other.sum()).abs() > _ROUNDING).any())


class OtherCounts:
    """What a loss may be a mean over, as far as the proofs of one layout of batches can tell.

    Attributes:
        known: the other ways that none has told from the own count, with the factors.
    """

    def __init__(self) -> None:
        self.known: dict[_Key, tuple[Candidate, float]] = {}
        self._told: set[_Key] = set()  # of which nothing is to be seen any more
        self._met: set[_Key] = set()  # which the batch that is proved tells apart
        self._waits = False  # whether reading a count would wait for a device

    def _others(self, task: Task) -> dict[_Key, _Other]:
        own = {name: Candidate("", "", function) for name, function in _own_counts(task).items()}
        return {key: _Other(own[key[0]], *known) for key, known in self.known.items() if key[0] in own}

    def look(self, task: Task, parts: Sequence[Part], exact: Sequence[Cut], most: int, unit: int) -> Cut | None:
        """Some samples that tell one of them from the own count, where all cuts that were found exact do not.

        Args:
            exact: these cuts.
            most: units at most.
            unit: samples of one, which stay together.

        Returns:
            The samples; ``None`` where this batch has none.
        """
        self._note(task, parts)
        for cut in exact:
            self.tell(task, cut)
        self._met = self._apart_in(task, parts)
        return self._cut(task, most, unit) if self._met else None

    def tell(self, task: Task, cut: Cut) -> None:
        """Leaves out those that would have weighed the parts of an exact cut otherwise."""
        batches, rows = list(cut.splittable.collated_from_copies().materialise(cut.parts)), list(cut.sizes)
        self._leave_out(key for key, one in self._others(task).items() if one.are_apart(batches, rows))

    def tell_all(self, task: Task, ways: Sequence[Candidate | None]) -> None:
        """Leaves all out where a loss is known to be a mean over what the step counts."""
        batch, rows, counts = task.splittable.batches[0], task.splittable.rows, _own_counts(task).values()
        for way, own in itertools.product(ways, (Candidate("", "", one) for one in counts)):
            total = 0.0 if way is None else way.number(batch, rows)
            if (
                way is None
                or not total
                or not _is_the_same(_Other(own, way, own.number(batch, rows) / total), batch, rows)
            ):
                return
        self._leave_out(self.known if ways else ())

    def _note(self, task: Task, parts: Sequence[Part]) -> None:
        """Adds ways to count the batch that are not known yet."""
        batch, rows = next(task.splittable.materialise(parts)), len(parts[0].samples)
        self._waits = _is_elsewhere(batch)
        ways = ways_to_count(batch, task.splittable.broadcast, tensors_of(task.loss_fn))
        for name, function in _own_counts(task).items():
            own = Candidate("", "", function)
            total = own.number(batch, rows)
            for other in ways:
                key, number = (name, other.code), other.number(batch, rows)
                # What leaves nothing out differs from the samples only by an entry that no batch had so far.
                is_open = other.leaves_out if function is count_samples else other.leaves_out is not None
                if is_open and key not in self._told and number > 0 and total > 0:
                    if _is_the_same(_Other(own, other, total / number), batch, rows):
                        self._told.add(key)
                    else:
                        self.known.setdefault(key, (other, total / number))

    def _leave_out(self, keys: Iterable[_Key]) -> None:
        for key in [*keys]:
            self._told.add(key)
            self.known.pop(key, None)

    def _cut(self, task: Task, most: int, unit: int) -> Cut | None:
        others = self._others(task)
        for batch, samples in _samples(task.splittable, unit):
            chosen = dict[int, None]()
            for key in self._met:
                numbers = [[one.number(sample, unit) for sample in samples] for one in others[key][:2]]
                own, other = torch.tensor(numbers, dtype=torch.float64, device="cpu")
                ratios = (other / own).nan_to_num(math.inf)
                if len(chosen) + 2 <= most and float(ratios.max()) > float(ratios.min()):
                    chosen |= dict.fromkeys([int(ratios.argmin()), int(ratios.argmax())])
            if len(chosen) > 1:
                few = [number * unit + row for number in chosen for row in range(unit)]
                return Cut(task.splittable.chosen(few, batch), (len(few) - unit, unit))
        return None

    def _apart_in(self, task: Task, parts: Sequence[Part]) -> set[_Key]:
        """Those by which a batch would be weighed otherwise; a new factor is noted of the others."""
        batches, rows = list(task.splittable.materialise(parts)), [len(part.samples) for part in parts]
        found = set[_Key]()
        for key, one in self._others(task).items():
            if one.are_apart(batches, rows):
                found.add(key)
            elif total := sum(map(one.other.number, batches, rows)):
                self.known[key] = one.other, sum(map(one.own.number, batches, rows)) / total
        return found

    @unseen
    def are_apart(self, task: Task, parts: Sequence[Part]) -> bool:
        """Whether a batch tells from the own count what none so far did: then it is to be proved."""
        self._met = set()
        if self._waits:
            return False
        with contextlib.suppress(Exception):  # what a count raises, it raises in the step itself
            batches, rows = task.splittable.batches, [one.rows for one in task.splittable.layouts]
            if not all(one.is_kept(batches, rows) for one in self._others(task).values()):
                self._met = self._apart_in(task, parts)
        return bool(self._met)

    @unseen
    def are_apart_in(self, task: Task, batch: Any, rows: int, factors: dict[_Key, float]) -> bool:
        """The same of a batch that ``collate`` made.

        Args:
            factors: of the batches before it in this step, to which its own are added.
        """
        self._met = set()
        with contextlib.suppress(Exception):
            for key, one in self._others(task).items():
                own, other = one.own.number(batch, rows), one.other.number(batch, rows)
                if own or other:
                    factor = factors.setdefault(key, own / other if other else math.inf)
                    if not abs(own - factor * other) <= _ROUNDING * own:
                        self._met.add(key)
        return bool(self._met)

    def conclude(self) -> None:
        """Leaves out what no proof of this batch could tell apart, so that not each one is proved."""
        self._leave_out(self._met)


def _is_the_same(one: _Other, batch: Any, rows: int) -> bool:
    """Whether two functions count other batches alike as well."""
    return all(one.is_kept([other], [rows]) for other in _changed(batch))


def _own_counts(task: Task) -> Mapping[str, Any]:
    """The counts that weigh the losses of a task; none where the loss sees all samples, or the forward counts."""
    if task.count == FORWARD or as_coupled(task.loss_fn) is not None:
        return {}
    return task.count if isinstance(task.count, Mapping) else {"": task.count}


def _samples(splittable: Splittable, unit: int) -> Iterator[tuple[int, list[Any]]]:
    """The first samples of each batch that can be cut, a batch of one unit each."""
    if splittable.collate is not None:
        starts = range(0, min(splittable.rows, _RAW) - unit + 1, unit)
        yield 0, [splittable.collated(Part(range(start, start + unit), unit)) for start in starts]
        return
    for batch, layout in enumerate(splittable.layouts):
        if layout.obstacle is None:
            units = min(layout.rows, _ROWS) // unit
            rest = [layout.rows - units * unit] if layout.rows > units * unit else []
            yield batch, list(itertools.islice(split(layout, [unit] * units + rest), units))


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
