"""How much gradient arrived in each layer over a run, and how far it moved: rows in forward order, columns of steps."""

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from anybatch.records.plainvalues import plain
from anybatch.records.runs import Run
from anybatch.records.samples import Activations, Norms

MOST_ROWS = 64
MOST_COLUMNS = 48
_LEAST_ROWS = 12  # fewer would not show where in the model the gradient is lost
_FIRST_COLUMNS = 10  # causes show in the first steps, so these stay
STD_OF_ZERO = 1e-3
"""A weight whose root mean square is below this has just begun at zero: its ratio says nothing."""
Cell = tuple[float | None, float | None, float | None]
_NOTHING: Cell = (None, None, None)


@dataclass(frozen=True, slots=True)
class FlowRow:
    """One layer, or several that were put together."""

    name: str  # of the module, with ``.*`` where it stands for all in it
    # norms of the gradient, ``None`` where no parameter had one; exactly 0.0, ``inf`` and ``nan`` as seen
    values: tuple[float | None, ...]
    parameters: int = 1  # how many it has
    updates: tuple[float | None, ...] = ()  # norms of the changes, ``None`` where no step was sampled
    weights: tuple[float | None, ...] = ()  # norms of the parameters before them

    @property
    def ratios(self) -> tuple[float | None, ...]:
        """Changes relative to the parameters; ``None`` for those that begin at zero, whose ratio says nothing."""
        pairs = zip(self.updates, self.weights, strict=True)
        return tuple(update / weight if update is not None and weight else None for update, weight in pairs)


@dataclass(frozen=True, slots=True)
class Flow:
    """Norms of gradients over layers and steps."""

    steps: tuple[int, ...] = ()  # of the optimizers, one for each column
    rows: tuple[FlowRow, ...] = ()  # the layers, the first of the forward first
    total: int = 0  # how many steps were sampled, of which these are some
    layers: int = 0  # how many layers there are, which the rows may put together

    def to_dict(self) -> dict[str, Any]:
        """The flow as plain values for JSON; ``None`` is no gradient."""
        rows = [{name: getattr(row, name) for name in ("name", "parameters", "values", "ratios")} for row in self.rows]
        flow = {"steps": self.steps, "rows": rows, "sampled_steps": self.total, "layers": self.layers}
        values: dict[str, Any] = plain(flow, str)
        return values


def flow_of(run: Run) -> Flow:
    """Gathers the gradients of a run."""
    cells = _cells(run)
    steps = sorted({step for by_step in cells.values() for step in by_step})
    odd = {step for by_step in cells.values() for step, (norm, *_) in by_step.items() if not math.isfinite(norm or 0.0)}
    shown = _columns(steps, odd)
    layers: dict[str, list[FlowRow]] = {}
    for parameter in _forward_order(run, cells):
        gradients, updates, weights = zip(*(cells[parameter].get(step, _NOTHING) for step in shown), strict=True)
        name = _layer(run, parameter)
        layers.setdefault(name, []).append(FlowRow(name, gradients, 1, updates, weights))
    rows = [_joined(members, name) for name, members in layers.items()]
    return Flow(tuple(shown), tuple(_fitted(rows)), len(steps), len(rows))


def _joined(members: Sequence[FlowRow], name: str) -> FlowRow:
    """Several rows as one."""
    return FlowRow(
        name, _combined([one.values for one in members]), sum(one.parameters for one in members),
        _combined([one.updates for one in members]), _combined([one.weights for one in members]),
    )  # fmt: skip


def _cells(run: Run) -> dict[int, dict[int, Cell]]:
    """For each parameter the norms at each sampled step of the optimizer that has it, or of any if none has."""
    owner = {
        number: optimizer.optimizer
        for optimizer in run.optimizers.values()
        for group in optimizer.groups
        for number in group.parameters
    }
    cells: dict[int, dict[int, Cell]] = {}
    for one in run.of(Norms):
        for place, (number, norm) in enumerate(zip(one.parameters, one.grad, strict=False)):
            facts = run.parameters.get(number)
            if owner.get(number, one.optimizer) != one.optimizer or (facts is not None and not facts.requires_grad):
                continue
            by_step = cells.setdefault(number, {})
            if by_step.get(one.number, _NOTHING)[0] is None:
                known = place < min(len(one.update), len(one.weight))
                if known and one.weight[place] > STD_OF_ZERO * math.sqrt(facts.numel or 1 if facts else 1):
                    by_step[one.number] = norm, one.update[place], one.weight[place]
                else:
                    by_step[one.number] = norm, None, None
    return cells


def _columns(steps: Sequence[int], odd: set[int]) -> list[int]:
    if len(steps) <= MOST_COLUMNS:
        return list(steps)
    first_odd = [step for step in steps if step in odd][:1]
    kept = {*steps[:_FIRST_COLUMNS], steps[-1], *first_odd}
    rest = [step for step in steps if step not in kept]
    room = MOST_COLUMNS - len(kept)
    kept.update(rest[index * len(rest) // room] for index in range(room))
    return sorted(kept)


def _forward_order(run: Run, parameters: Iterable[int]) -> list[int]:
    """In the order in which their modules ended in a forward, as far as that was seen; else as they were found."""
    seen: dict[tuple[int, str], int] = {}
    for one in run.of(Activations):
        for module in one.modules:
            seen.setdefault((one.root, module.module), module.order)

    def position(number: int) -> tuple[int, float, int]:
        facts = run.parameters.get(number)
        if facts is None or facts.root < 0:
            return (1 << 30, 0.0, number)
        order = seen.get((facts.root, facts.module))
        return (facts.root, math.nan if order is None else float(order), number)

    ordered = sorted(parameters, key=lambda number: (position(number)[0], number))
    known: dict[int, float] = {}
    last: dict[int, float] = {}
    for number in ordered:
        root, order, _ = position(number)
        known[number] = last.get(root, -1.0) if math.isnan(order) else order
        last[root] = known[number]
    return sorted(ordered, key=lambda number: (position(number)[0], known[number], number))


def _layer(run: Run, number: int) -> str:
    facts = run.parameters.get(number)
    if facts is None:
        return f"parameter {number}"
    name = facts.name
    return name.rpartition(".")[0] or name if facts.root >= 0 and facts.registered else name


def _combined(values: Sequence[tuple[float | None, ...]]) -> tuple[float | None, ...]:
    """The norm over several tensors, ``None`` where none of them has a gradient."""
    return tuple(_norm([one for one in column if one is not None]) for column in zip(*values, strict=True))


def _norm(norms: Sequence[float]) -> float | None:
    # The square of a norm such as 1e-170 would be zero, and zero means something else here.
    if not norms:
        return None
    return math.hypot(*norms) if all(map(math.isfinite, norms)) else sum(map(abs, norms))


def _fitted(rows: list[FlowRow]) -> list[FlowRow]:
    """Rows put together until they are few enough: by a common prefix, or neighbours where that leaves too few."""
    if len(rows) <= MOST_ROWS:
        return rows
    for depth in range(max(row.name.count(".") for row in rows), 0, -1):
        groups: dict[tuple[str, str], list[FlowRow]] = {}
        for row in rows:
            groups.setdefault((".".join(row.name.split(".")[:depth]), _state(row)), []).append(row)
        if _LEAST_ROWS <= len(groups) <= MOST_ROWS:
            return [_together(members, f"{prefix}.*", state) for (prefix, state), members in groups.items()]
    return _neighbours(rows)


def _neighbours(rows: list[FlowRow]) -> list[FlowRow]:
    """Rows put together with those beside them; as long as it works, only with those that are in the same state."""
    runs = [list(members) for _, members in itertools.groupby(rows, key=_state)]
    if len(runs) > MOST_ROWS // 2:
        runs = [rows]
    size = -(-len(rows) // (MOST_ROWS - len(runs)))
    parts = [run[start : start + size] for run in runs for start in range(0, len(run), size)]
    return [_together(part, _from_to(part[0].name, part[-1].name), _state(part[0])) for part in parts]


def _from_to(first: str, last: str) -> str:
    """Two names as a range; what both begin with is written once."""
    prefix = first.rpartition(".")[0]
    return f"{first} to {last.removeprefix(f'{prefix}.') if prefix else last}"


def _state(row: FlowRow) -> str:
    """Says of a row that never had a gradient; such rows are not hidden among others."""
    if all(value is None for value in row.values):
        return "no gradient"
    return "zero" if all(value is None or value == 0 for value in row.values) else ""


def _together(members: Sequence[FlowRow], name: str, state: str) -> FlowRow:
    if len(members) == 1:
        return members[0]
    named = f"{name} ({len(members)} layers{', ' + state if state else ''})"
    return _joined(members, named)
