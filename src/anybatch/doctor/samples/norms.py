"""Norms around one optimizer step: of gradients, weights and their change."""

import weakref
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from anybatch.doctor.samples.flatcopies import ENTRIES, Layout, norms, plain, strides
from anybatch.records.runs import grouped
from anybatch.records.samples import Norms

if TYPE_CHECKING:
    from anybatch.doctor.recording.numbering import Numbering

_GATES, _OF_A_GATE = (4, 3), 8  # of an LSTM and a GRU, and the rows of each: fewer may be equal by chance
_STILL = 0.5  # share of entries that did not move from which on the optimizer's state is looked at by its norm


@dataclass(slots=True, eq=False)
class _Bucket:
    """Parameters of one precision on one device, and what was seen of them around the last step that was looked at."""

    numbers: list[int]  # of them
    references: "list[weakref.ref[torch.Tensor]]"  # to them
    layout: Layout  # of their copies
    begins_equal: list[int]  # positions of matrices that began with equal rows, which then may stay equal
    parameters: list[torch.Tensor | None] = field(default_factory=list)  # held around a step only
    views: list[torch.Tensor | None] = field(default_factory=list)
    before: torch.Tensor | None = None
    after: torch.Tensor | None = None
    before_versions: list[int] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    graded: list[bool] = field(default_factory=list)  # whether each has a dense gradient
    compared: list[int] = field(default_factory=list)  # numbers of those whose rows of the gradient were compared
    figures: dict[str, torch.Tensor] = field(default_factory=dict)


@dataclass(slots=True)
class _Plan:
    """What is looked at around the steps of one optimizer."""

    optimizer: "weakref.ref[Any]"
    key: tuple[Any, ...]
    buckets: list[_Bucket]
    owned: frozenset[int]
    still: set[int] = field(default_factory=set)
    state_norms: dict[int, float] = field(default_factory=dict)
    state_versions: dict[int, int] = field(default_factory=dict)
    had_state: frozenset[int] = frozenset()
    sparse: dict[int, tuple[float, float]] = field(default_factory=dict)
    count: int = -1  # of the last step that was looked at
    others: bool = False  # whether steps came between that were not


class NormSampler:
    """Takes norms around steps of optimizers.

    Args:
        entries: how many numbers of embeddings are copied; of other large tensors evenly spaced entries are.

    The norms of gradients and weights are exact. Those of changes, and the shares of entries, are estimated from at
    most 4096 evenly spaced entries of a tensor, see ``flatcopies.strides``.
    """

    def __init__(self, numbering: "Numbering", *, entries: int = ENTRIES) -> None:
        self._numbering, self._entries = numbering, entries
        self._plans: dict[int, _Plan] = {}
        self._owners: dict[int, int] = {}

    def before(self, optimizer: Any) -> None:
        """Copies what is needed before a step."""
        plan = self._plan(optimizer)
        with torch.no_grad():
            plan.sparse = {}
            for bucket in plan.buckets:
                layout = bucket.layout
                bucket.parameters = [reference() for reference in bucket.references]
                bucket.views = layout.fitting(bucket.parameters)
                bucket.before = layout.copy(bucket.views)
                bucket.figures = {"weight": layout.whole_norms(bucket.before, bucket.views)}
                if bucket.after is not None:
                    bucket.figures["moved"] = layout.changed(bucket.after, bucket.before)
                bucket.before_versions = _versions(bucket.parameters)
                self._gradients(plan, bucket)
            tensors = self._states(plan, optimizer)
            plan.had_state = frozenset(tensors)
            plan.state_versions = {number: tensor._version for number, tensor in tensors.items()}
            plan.state_norms = _norms_of(tensors, plan.still)

    def after(self, optimizer: Any, count: int = 0) -> Norms:
        """Compares with what was copied; what steps between have changed is not taken for a write outside of steps."""
        plan = self._plans[id(optimizer)]
        with torch.no_grad():
            is_late = not plan.sparse and not any(any(bucket.graded) for bucket in plan.buckets)
            for bucket in plan.buckets:
                if is_late:  # a closure has made the gradients within the step
                    self._gradients(plan, bucket)
                layout, before = bucket.layout, bucket.before
                after = bucket.after = layout.copy(layout.fitting(bucket.views))
                if before is not None:
                    bucket.figures["update"] = layout.norms(after - before)
                    bucket.figures["changed"] = layout.changed(after, before)
            plan.others = count - plan.count > 1
            plan.count = count
            found = self._read(plan, optimizer)
        for bucket in plan.buckets:
            bucket.parameters, bucket.views, bucket.before = [], [], None
        return found

    def _plan(self, optimizer: Any) -> _Plan:
        known = self._plans.get(id(optimizer))
        own = [tensor for group in optimizer.param_groups for tensor in group["params"]]
        if known is None or known.optimizer() is not optimizer:
            for tensor in own:
                self._owners.setdefault(id(tensor), id(optimizer))
        elsewhere = [
            tensor
            for _, tensor in self._numbering.tracked()
            if self._owners.get(id(tensor)) is None and not tensor.is_inference()
        ]
        tensors = list({id(tensor): tensor for tensor in (*own, *elsewhere)}.values())
        key = (  # lists side by side, which are made in a fraction of the time of a tuple for each
            [id(tensor) for tensor in tensors],
            [tensor.dtype for tensor in tensors],
            [tensor.device for tensor in tensors],
            [tensor.shape for tensor in tensors],
        )
        if known is None or known.optimizer() is not optimizer or known.key != key:
            buckets = self._buckets(tensors)
            owned = frozenset(self._numbering.parameter(tensor) for tensor in own)
            known = self._plans[id(optimizer)] = _Plan(weakref.ref(optimizer), key, buckets, owned)
        return known

    def _buckets(self, tensors: Iterable[torch.Tensor]) -> list[_Bucket]:
        kinds: dict[tuple[torch.dtype, torch.device], list[tuple[torch.Tensor, torch.Tensor]]] = {}
        for tensor in tensors:
            view = plain(tensor)
            if view is not None and view.numel():
                kinds.setdefault((view.dtype, view.device), []).append((tensor, view))
        found = []
        for pairs in kinds.values():
            numbers = [self._numbering.parameter(tensor) for tensor, _ in pairs]
            views = [view for _, view in pairs]
            embeds = [self._is_table(number) for number in numbers]
            layout = Layout(views, strides(views, embeds, self._entries))
            begins = [place for place, number in enumerate(numbers) if self._begins_equal(number)]
            found.append(_Bucket(numbers, [weakref.ref(tensor) for tensor, _ in pairs], layout, begins))
        return found

    def _begins_equal(self, number: int) -> bool:
        """Whether a parameter is a matrix that began with equal rows, or a table with equal columns, which may stay."""
        facts = self._numbering.facts(number)
        is_one = len(facts.shape) < 2 or min(facts.shape[:2] if self._is_table(number) else facts.shape[:1]) < 2
        return not is_one and (facts.equal_rows or facts.constant is not None)

    def _gradients(self, plan: _Plan, bucket: _Bucket) -> None:
        layout = bucket.layout
        grads = [one.grad if one is not None and one.is_leaf else None for one in bucket.parameters]
        for position, grad in enumerate(grads):
            if grad is not None and grad.layout is not torch.strided:
                plan.sparse[bucket.numbers[position]] = _sparse(grad)
                grads[position] = None
        dense = layout.fitting(grads)
        bucket.graded = [view is not None for view in dense]
        if any(bucket.graded):
            flat = layout.copy(dense)
            bucket.figures["grad"] = layout.whole_norms(flat, dense)
            bucket.figures["zeros"] = layout.zeros(flat)
            pairs = [(place, one) for place in bucket.begins_equal if (one := dense[place]) is not None]
            bucket.compared = [bucket.numbers[place] for place, _ in pairs]
            if pairs:
                bucket.figures["equal"] = torch.stack(
                    [_rows_equal(one.t() if self._is_table(bucket.numbers[place]) else one) for place, one in pairs]
                ).float()

    def _is_table(self, number: int) -> bool:
        return self._numbering.facts(number).role == "embedding"

    def _states(self, plan: _Plan, optimizer: Any) -> dict[int, torch.Tensor]:
        """One tensor of the optimizer's state for each parameter that has some, the largest kind first."""
        found: dict[int, torch.Tensor] = {}
        for bucket in plan.buckets:
            for number, parameter in zip(bucket.numbers, bucket.parameters, strict=True):
                if number in plan.owned and (kept := kept_of(optimizer, parameter)):
                    found[number] = kept[0]
        return found

    def _moved(self, plan: _Plan, optimizer: Any, unchanged: dict[int, float]) -> dict[int, bool]:
        tensors = self._states(plan, optimizer)
        plan.still = {number for number, share in unchanged.items() if share > _STILL}
        if not plan.still:
            return dict.fromkeys(tensors, True)
        now = _norms_of(tensors, {number for number in plan.still if number in plan.state_norms})
        found = {}
        for number, tensor in tensors.items():
            if number not in plan.had_state:
                found[number] = True
            elif number in now:
                found[number] = now[number] != plan.state_norms[number]
            else:  # versions don't grow where the step is fused
                found[number] = tensor._version != plan.state_versions[number] or number not in plan.still
        return found

    def _read(self, plan: _Plan, optimizer: Any) -> Norms:
        """All results in one transfer for each precision and device."""
        scale = getattr(optimizer, "grad_scale", None)
        factor = 1.0 / float(scale) if isinstance(scale, torch.Tensor) and scale.numel() == 1 else 1.0
        numbers, columns = list[int](), defaultdict[str, list[Any]](list)
        equal, since, silent = list[int](), list[int](), list[int]()
        for bucket in plan.buckets:
            values = _fetched(bucket.figures)
            found = _columns(bucket, values, factor)
            for position, number in enumerate(bucket.numbers) if plan.sparse else ():
                if number in plan.sparse:
                    found["grad"][position], found["grad_zeros"][position] = plan.sparse[number]
            equal += [number for number, same in zip(bucket.compared, values.get("equal", ()), strict=False) if same]
            now = _versions(bucket.parameters)
            self._since(plan, bucket, values.get("moved", []), found["unchanged"], now, since, silent)
            bucket.versions = now
            numbers += bucket.numbers
            for name, part in found.items():
                columns[name] += part
        moved = self._moved(plan, optimizer, dict(zip(numbers, columns["unchanged"], strict=True)))
        entries: dict[str, Any] = {name: tuple(column) for name, column in columns.items()}
        return Norms(
            optimizer=self._numbering.optimizer(optimizer),
            number=plan.count,
            parameters=tuple(numbers),
            **entries,
            state_moved=tuple(moved.get(number) for number in numbers),
            equal_grad_rows=tuple(equal), since=tuple(since), silent=tuple(silent),
        )  # fmt: skip

    def _since(
        self, plan: _Plan, bucket: _Bucket, moved: list[float], same: list[float], now: list[int], since: list[int],
        silent: list[int],
    ) -> None:  # fmt: skip
        """What changed though no optimizer stepped: between two samples, or within the step of another optimizer."""
        between = moved or [0.0] * len(same)
        for position, number in enumerate(bucket.numbers):
            owned = number in plan.owned
            if owned and not between[position]:
                continue
            outside = bool(between[position]) and not (owned and plan.others)
            written = (
                outside and bool(bucket.versions) and bucket.versions[position] != bucket.before_versions[position]
            )
            if not owned and same[position] < 1.0:
                outside = True
                written = written or now[position] != bucket.before_versions[position]
            if outside:
                since.append(number)
                if not written:
                    silent.append(number)


def kept_of(optimizer: Any, parameter: torch.Tensor | None) -> list[torch.Tensor]:
    """What an optimizer keeps of the gradients of a parameter."""
    state = optimizer.state.get(parameter)
    entries = state.items() if isinstance(state, dict) else ()
    return [one for name, one in entries if name != "step" and isinstance(one, torch.Tensor)]


def _rows_equal(grad: torch.Tensor) -> torch.Tensor:
    """Whether a matrix, or each gate of a GRU or LSTM, has equal rows that are not zero; on a CPU ends mostly tell."""
    found = torch.zeros((), dtype=torch.bool, device=grad.device)
    for gates in (1, *(one for one in _GATES if len(grad) % one == 0 and len(grad) >= one * _OF_A_GATE)):
        rows = grad.unflatten(0, (gates, -1))
        if not grad.is_cpu or torch.equal(rows[0, 0], rows[0, -1]):
            found = found | (rows[:, 1:] == rows[:, :1]).all() & (rows[:, 0] != 0).any()
    return found


def _versions(tensors: Sequence[torch.Tensor | None]) -> list[int]:
    try:
        return [-1 if one is None else one._version for one in tensors]
    except RuntimeError:  # made in inference mode, where versions are not counted
        return [-1 if one is None or one.is_inference() else one._version for one in tensors]


def _columns(bucket: _Bucket, values: Mapping[str, list[float]], factor: float) -> dict[str, list[Any]]:
    """Norms of gradients, weights and changes, the shares that stayed, and those that are zero, by position."""
    count = len(bucket.numbers)
    graded = bucket.graded if "grad" in values else [False] * count
    grads: list[Any] = [norm * factor for norm in values.get("grad", [0.0] * count)]
    zeros: list[Any] = values.get("zeros", [0.0] * count)
    return {
        "grad": [norm if has else None for norm, has in zip(grads, graded, strict=True)],
        "weight": values["weight"],
        "update": [norm * scale for norm, scale in zip(values["update"], bucket.layout.scales, strict=True)],
        "unchanged": [1.0 - share for share in values["changed"]],
        "grad_zeros": [share if has else None for share, has in zip(zeros, graded, strict=True)],
    }


def _sparse(grad: torch.Tensor) -> tuple[float, float]:
    """The norm of a sparse gradient, and its share of zeros."""
    if grad.layout is not torch.sparse_coo:
        return float(grad.norm()), 0.0
    values = grad.detach().coalesce().values()
    filled = int(values.count_nonzero())
    return float(values.norm()), 1.0 - filled / max(grad.numel(), 1)


def _norms_of(tensors: dict[int, torch.Tensor], numbers: Iterable[int]) -> dict[int, float]:
    chosen = {number: view for number in numbers if number in tensors and (view := plain(tensors[number])) is not None}
    kinds = grouped(((tensor.dtype, tensor.device), number) for number, tensor in chosen.items())
    found: dict[int, float] = {}
    for group in kinds.values():
        found.update(zip(group, norms([chosen[number] for number in group]).tolist(), strict=True))
    return found


def _fetched(figures: Mapping[str, torch.Tensor]) -> dict[str, list[float]]:
    """The figures in one transfer."""
    flat = torch.cat(list(figures.values())).tolist()  # made the widest among them, which keeps each number
    found, start = dict[str, list[float]](), 0
    for name, value in figures.items():
        found[name] = flat[start : start + value.numel()]
        start += value.numel()
    return found
