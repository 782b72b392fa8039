"""What optimizers hold while they step on sparse gradients, extrapolated from steps on very small tables.

Fake tensors can't tell: how many entries a coalesced gradient has depends on the numbers in it.
"""

import itertools
import logging
import math
import operator
import random
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from anybatch.planning.sparsegradients import Entries
from anybatch.planning.subjects import Subject
from anybatch.planning.updates import LocalScalars, UpdateTrace, stepped_clone, without_global_hooks
from anybatch.records.memory import ACTIVATIONS, GRADIENTS, OPTIMIZER, PARAMETERS
from anybatch.tensors.dispatch import unseen
from anybatch.tensors.meter import Allocation
from anybatch.tensors.optimizers import state_tensors
from anybatch.tensors.sparsesums import INDEX_BYTES
from anybatch.update.began import ROWS
from anybatch.update.closures import step_alone

logger = logging.getLogger(__name__)

_PROBES = 8
_UNTRACED = 6  # times its gradient is what a table is said to take where nothing could be traced
_WATCHED = 2  # parameters of a group, if they are of one kind
_FAR = 0.5  # bytes that a size may be off by, if it follows from the sizes of one table


@dataclass(frozen=True)
class _Small:
    """The sizes of a table in a probe.

    Args:
        rows: of the table.
        count: of the entries of its gradient.
        distinct: rows that these name.
    """

    rows: int
    count: int
    distinct: int

    @property
    def features(self) -> list[float]:
        return [1.0, float(self.rows), float(self.count), float(self.distinct)]


class SparseUpdates:
    """The update of a step with sparse gradients, by how many entries these have.

    Args:
        subject: what is planned.
        base: the update without the tables that have a sparse gradient.
        trained: the positions of the parameters that get a gradient.
        sparse: of these, those with a sparse one.

    Attributes:
        positions: the latter.
        is_traced: whether the optimizers could step.
        grows: whether a state is sparse itself, so that it may grow with each step.
    """

    def __init__(self, subject: Subject, base: UpdateTrace, trained: Sequence[int], sparse: Sequence[int]) -> None:
        self._subject, self._base, self.positions = subject, base, tuple(sparse)
        dense = [position for position in trained if position not in sparse]
        owned = [{id(p) for group in one.param_groups for p in group["params"]} for one in subject.optimizers]
        parameters = subject.parameters
        small, large = ({id(parameters[i]) for i in positions} for positions in (sparse, dense))
        self._optimizers = [one for one, own in zip(subject.optimizers, owned, strict=True) if own & small]
        self._is_mixed = any(own & small and own & large for own in owned)
        self._models: dict[bool, _Model | None] = {}
        self._watched = sum(_watched_bytes(one) for one in subject.optimizers)
        self._known: dict[tuple[Entries, ...], UpdateTrace] = {}
        self.grows = False
        self.is_traced = base.is_traced and (not sparse or self._model(is_summed=True) is not None)

    def at(self, entries: Sequence[Entries]) -> UpdateTrace:
        """The update with gradients of so many entries.

        Args:
            entries: of each table.
        """
        if not entries:
            return self._base
        key = tuple(entries)
        if key not in self._known:
            model = self._model(is_summed=all(one.is_summed for one in entries))
            self._known[key] = self._estimated(key) if model is None else self._made(model, key)
        return self._known[key]

    def _made(self, model: "_Model", entries: tuple[Entries, ...]) -> UpdateTrace:
        base = self._base
        peak, held, operation = model.at(entries, self._subject.granularity)
        if self._is_mixed:  # what is left over from the one may still be there in the other
            total = base.peak + peak
        elif base.peak + sum(held.values()) >= base.held + peak:
            total, operation = base.peak + sum(held.values()), base.operation
        else:
            total = base.held + peak
        return self._with(total + self._watched, held, operation)

    def _estimated(self, entries: Sequence[Entries]) -> UpdateTrace:
        gradients = state = 0
        for one in entries:
            table = self._subject.parameters[one.position]
            gradients += one.count * (INDEX_BYTES + table.nbytes // max(1, one.rows))
            state += 2 * table.nbytes
        held = {GRADIENTS: gradients, OPTIMIZER: state}
        total = self._base.peak + state + _UNTRACED * gradients
        return replace(self._with(total, held, "the update"), is_traced=False)

    def _with(self, total: int, held: dict[str, int], operation: str) -> UpdateTrace:
        found = {**self._base.at_peak}
        for category, size in held.items():
            found[category] = found.get(category, 0) + size
        found[ACTIVATIONS] = found.get(ACTIVATIONS, 0) + total - sum(found.values())
        state = self._base.state + held.get(OPTIMIZER, 0)
        return replace(
            self._base, peak=total, state=state, operation=operation, held=self._base.held + sum(held.values()),
            at_peak={category: size for category, size in found.items() if size},
        )  # fmt: skip

    def _model(self, *, is_summed: bool) -> "_Model | None":
        if is_summed not in self._models:
            self._models[is_summed] = self._probed(is_summed)
        return self._models[is_summed]

    @unseen
    def _probed(self, is_summed: bool) -> "_Model | None":
        numbers = random.Random(0)
        probes: list[dict[int, _Small]] = []
        recordings: list[LocalScalars] = []
        for _ in range(_PROBES):
            small = {}
            for position in self.positions:
                distinct = numbers.randint(1, 4)
                count = distinct if is_summed else distinct + numbers.randint(0, 4)
                small[position] = _Small(numbers.randint(4, 9), count, distinct)
            recording = self._recorded(small, is_summed)
            if recording is None:
                return None
            probes.append(small)
            recordings.append(recording)
        return _Model.of(probes, recordings)

    def _recorded(self, small: dict[int, _Small], is_summed: bool) -> LocalScalars | None:
        """The second step of the optimizers on small tables; all other parameters have no gradient."""
        recording = LocalScalars()
        with torch.no_grad(), without_global_hooks(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of a step that nobody took
            tables = {id(p): torch.nn.Parameter(p.new_empty(0, device="cpu")) for p in self._subject.parameters}
            for position, size in small.items():
                tables[id(self._subject.parameters[position])] = self._table(position, size, is_summed)
            clones = [stepped_clone(one, tables, self._subject) for one in self._optimizers]
            if None in clones:
                return None
            recording.register(tables.values(), PARAMETERS)
            recording.register((table.grad for table in tables.values()), GRADIENTS)
            state = [tensor for clone in clones for tensor in state_tensors(clone)]
            self.grows = self.grows or any(tensor.layout is torch.sparse_coo for tensor in state)
            recording.register(state, OPTIMIZER)
            del state
            with recording:
                for clone in clones:
                    step_alone(clone)
            recording.end()
        return recording

    def _table(self, position: int, size: _Small, is_summed: bool) -> torch.nn.Parameter:
        real = self._subject.parameters[position]
        table = torch.nn.Parameter(torch.zeros(size.rows, *real.shape[1:], dtype=real.dtype))
        named = [*range(size.distinct), *([0] * (size.count - size.distinct))]
        rows = torch.tensor([named if is_summed else named[::-1]])
        values = torch.ones(size.count, *real.shape[1:], dtype=real.dtype)
        table.grad = torch.sparse_coo_tensor(
            rows, values, table.shape, is_coalesced=is_summed or None, check_invariants=False
        )
        return table


def _watched_bytes(optimizer: torch.optim.Optimizer) -> int:
    """At most so much is kept of parameters and of their state while the optimizers step, see ``update.began``."""
    found = 0
    for group in optimizer.param_groups:
        rows = [p.nbytes // max(1, len(p)) if p.dim() else p.nbytes for p in group["params"]]
        found += sum(sorted(rows)[-_WATCHED:]) * 2 * ROWS
    return found


class _Model:
    """The storages of a step, each as a function of the sizes of one table.

    Args:
        lives: of the storages in one of the probes.
        tables: the position of the table whose sizes each storage follows from.
        coefficients: of a constant, the rows of the table, the entries of its gradient and the rows that they name.
        operations: the names.
    """

    def __init__(
        self, lives: Sequence[Allocation], tables: Sequence[int], coefficients: Sequence[Sequence[float]],
        operations: Sequence[str],
    ) -> None:  # fmt: skip
        self._lives, self._tables, self._coefficients = lives, tables, coefficients
        self._operations = operations

    @classmethod
    def of(cls, probes: Sequence[dict[int, _Small]], recordings: Sequence[LocalScalars]) -> "_Model | None":
        """Fits the probes; gives ``None`` where storages do not follow from the sizes of one table each.

        Args:
            probes: the sizes of each table.
            recordings: what was held with them.
        """
        first = recordings[0]
        shape = [(one.born, one.died, one.category) for one in first.allocations]
        for other in recordings[1:]:
            is_alike = shape == [(one.born, one.died, one.category) for one in other.allocations]
            if other.operations != first.operations or not is_alike:
                logger.info("the optimizers run other operations with other sparse gradients")
                return None
        features = {i: torch.tensor([p[i].features for p in probes], dtype=torch.float64) for i in probes[0]}
        tables, coefficients = [], []
        for together in zip(*(one.allocations for one in recordings), strict=True):
            sizes = torch.tensor([one.size for one in together], dtype=torch.float64)
            found = {i: torch.linalg.lstsq(own, sizes, driver="gelsd").solution for i, own in features.items()}
            far = {i: float((features[i] @ one - sizes).abs().max()) for i, one in found.items()}
            best = min(far, key=far.__getitem__)
            if far[best] > _FAR:
                logger.info("what the optimizers hold does not follow from the sizes of sparse gradients")
                return None
            tables.append(best)
            coefficients.append(found[best].tolist())
        return cls(first.allocations, tables, coefficients, first.operations)

    def at(self, entries: Sequence[Entries], granularity: int) -> tuple[int, dict[str, int], str]:
        """The peak without the parameters, what is there before by category, and the operation at the peak.

        Args:
            entries: of each table.
            granularity: what sizes are rounded up to.
        """
        real = {one.position: _Small(one.rows, one.count, one.distinct).features for one in entries}
        held: dict[str, int] = {GRADIENTS: 0, OPTIMIZER: 0}
        steps = [0] * (len(self._operations) + 1)
        for life, position, coefficients in zip(self._lives, self._tables, self._coefficients, strict=True):
            exact = max(0, round(math.fsum(map(operator.mul, real[position], coefficients))))
            size = -(-exact // granularity) * granularity
            if life.category == PARAMETERS:
                continue
            if life.born < 0:
                held[life.category] = held.get(life.category, 0) + size
            steps[max(life.born, 0)] += size
            if life.died is not None and life.died < len(steps):
                steps[max(life.died, 0)] -= size
        live = list(itertools.accumulate(steps))
        peak = max(range(len(live)), key=live.__getitem__)
        name = self._operations[peak] if peak < len(self._operations) else ""
        return max(live[peak], sum(held.values())), held, name
