"""Gradient and update norms of each layer over a run: rows in forward order, a column per sampled step."""

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from anybatch.records.events import Stepped
from anybatch.records.reading import plain
from anybatch.records.runs import Run, grouped
from anybatch.records.samples import Activations, Norms

MOST_ROWS = 64
MOST_COLUMNS = 48
_LEAST_ROWS = 12  # fewer would not show where in the model the gradient is lost
_FIRST_COLUMNS = 10  # causes show in the first steps, so these are always kept
STD_OF_ZERO = 1e-3
"""A weight with a smaller root mean square is near its zero initialization: its update-to-weight ratio is undefined."""
Cell = tuple[float | None, float | None, float | None]
_NOTHING: Cell = (None, None, None)


@dataclass(frozen=True, slots=True)
class FlowRow:
    """One layer, or several merged layers; the tuples have one entry per step of the ``Flow``."""

    name: str  # the name of the module; ``.*`` at the end stands for all modules in it
    # norms of the gradient; ``None`` if no parameter had one
    values: tuple[float | None, ...]
    parameters: int = 1  # the number of its parameters
    updates: tuple[float | None, ...] = ()  # norms of the updates; ``None`` if no step was sampled
    weights: tuple[float | None, ...] = ()  # norms of the parameters before the updates

    @property
    def ratios(self) -> tuple[float | None, ...]:
        """Update-to-weight ratios; ``None`` if unknown, or if the weights are near a zero initialization."""
        pairs = zip(self.updates, self.weights, strict=True)
        return tuple(update / weight if update is not None and weight else None for update, weight in pairs)


@dataclass(frozen=True, slots=True)
class Flow:
    """Norms of gradients over layers and steps."""

    steps: tuple[int, ...] = ()  # optimizer steps, one per column
    rows: tuple[FlowRow, ...] = ()  # the layers in forward order
    total: int = 0  # the number of sampled steps, which ``steps`` may thin out
    layers: int = 0  # the number of layers, which ``rows`` may merge

    def to_dict(self) -> dict[str, Any]:
        """The flow as plain values for JSON; ``None`` is no gradient."""
        rows = [{name: getattr(row, name) for name in ("name", "parameters", "values", "ratios")} for row in self.rows]
        flow = {"steps": self.steps, "rows": rows, "sampled_steps": self.total, "layers": self.layers}
        values: dict[str, Any] = plain(flow, str)
        return values


def flow_of(run: Run) -> Flow:
    """Collects the gradient and update norms of a run."""
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


def steps_of(run: Run) -> dict[tuple[int, int], int]:
    """The step of the run at which each optimizer made its first, second … step."""
    first: dict[int, int] = {}
    found: dict[tuple[int, int], int] = {}
    for one in run.of(Stepped):
        begun = first.setdefault(one.optimizer, one.step)
        found[one.optimizer, one.number] = one.step - (begun if begun <= 1 else 0)  # two in turn begin together
    return found


def _cells(run: Run) -> dict[int, dict[int, Cell]]:
    """For each parameter, its norms at each sampled step of its optimizers; of any optimizer if it is in none."""
    every = run.optimizers.values()
    owners = grouped((number, one.optimizer) for one in every for group in one.groups for number in group.parameters)
    steps, cells = steps_of(run), dict[int, dict[int, Cell]]()
    for one in run.of(Norms):
        step = steps.get((one.optimizer, one.number), one.step)
        for place, (number, norm) in enumerate(zip(one.parameters, one.grad, strict=False)):
            facts = run.parameters.get(number)
            if one.optimizer not in owners.get(number, {one.optimizer}) or (facts and not facts.requires_grad):
                continue
            by_step = cells.setdefault(number, {})
            if by_step.get(step, _NOTHING)[0] is None:
                known = place < min(len(one.update), len(one.weight))
                if known and one.weight[place] > STD_OF_ZERO * math.sqrt(facts.numel or 1 if facts else 1):
                    by_step[step] = norm, one.update[place], one.weight[place]
                else:
                    by_step[step] = norm, None, None
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
    """Parameters in the order in which their modules returned in a forward; unseen ones after their predecessor."""
    seen: dict[tuple[int, str], int] = {}
    for one in run.of(Activations):
        for module in one.modules:
            seen.setdefault((one.root, module.module), module.order)
    modules = {number: (facts.root, facts.module) for number, facts in run.parameters.items() if facts.root >= 0}
    nowhere = (1 << 30, "")  # behind all models
    placed: list[tuple[int, int, int]] = []
    last: dict[int, int] = {}
    for number in sorted(parameters, key=lambda one: (modules.get(one, nowhere)[0], one)):
        root, _ = where = modules.get(number, nowhere)
        last[root] = seen.get(where, last.get(root, -1))
        placed.append((root, last[root], number))
    return [number for *_, number in sorted(placed)]


def _layer(run: Run, number: int) -> str:
    facts = run.parameters.get(number)
    if facts is None:
        return f"parameter {number}"
    name = facts.name
    return name.rpartition(".")[0] or name if facts.root >= 0 and facts.registered else name


def _combined(values: Sequence[tuple[float | None, ...]]) -> tuple[float | None, ...]:
    """The norm over several tensors, per column; ``None`` if none of them has one."""
    return tuple(_norm([one for one in column if one is not None]) for column in zip(*values, strict=True))


def _norm(norms: Sequence[float]) -> float | None:
    # hypot, because the square of a norm such as 1e-170 underflows, and a zero would mean a vanished gradient.
    if not norms:
        return None
    return math.hypot(*norms) if all(map(math.isfinite, norms)) else sum(map(abs, norms))


def _fitted(rows: list[FlowRow]) -> list[FlowRow]:
    """Merges rows until they are few enough: by common prefix, or neighbours if prefixes leave too few or many."""
    if len(rows) <= MOST_ROWS:
        return rows
    for depth in range(max(row.name.count(".") for row in rows), 0, -1):
        groups = grouped(((".".join(row.name.split(".")[:depth]), _state(row)), row) for row in rows)
        if _LEAST_ROWS <= len(groups) <= MOST_ROWS:
            return [_together(members, f"{prefix}.*", state) for (prefix, state), members in groups.items()]
    return _neighbours(rows)


def _neighbours(rows: list[FlowRow]) -> list[FlowRow]:
    """Merges neighbouring rows; only rows in the same state, unless there are too many changes of state."""
    runs = [list(members) for _, members in itertools.groupby(rows, key=_state)]
    if len(runs) > MOST_ROWS // 2:
        runs = [rows]
    size = -(-len(rows) // (MOST_ROWS - len(runs)))
    parts = [run[start : start + size] for run in runs for start in range(0, len(run), size)]
    ends = [(part[0].name, part[-1].name) for part in parts]
    names = [f"{first} to {last.removeprefix(first[: first.rfind('.') + 1])}" for first, last in ends]
    return [_together(part, name, _state(part[0])) for part, name in zip(parts, names, strict=True)]


def _state(row: FlowRow) -> str:
    """Whether a row never had a gradient or only zeros; such rows are not merged with others."""
    if all(value is None for value in row.values):
        return "no gradient"
    return "zero" if all(value is None or value == 0 for value in row.values) else ""


def _together(members: Sequence[FlowRow], name: str, state: str) -> FlowRow:
    if len(members) == 1:
        return members[0]
    named = f"{name} ({len(members)} layers{', ' + state if state else ''})"
    return _joined(members, named)
