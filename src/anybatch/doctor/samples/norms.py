"""Norms around one optimizer step: of gradients, weights and their change."""

import math
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from anybatch.doctor.samples.flatcopies import ENTRIES, Buffer, norms, plain, strides
from anybatch.records.samples import Norms

if TYPE_CHECKING:
    from anybatch.doctor.recording.numbering import Numbering

_STILL = 0.5  # share of entries that did not move from which on the optimizer's state is looked at by its norm


class _Bucket:
    """Parameters of one precision on one device, and what was seen of them last.

    Args:
        numbers: of them.
        references: to them.
        buffer: the layout of their copies.
    """

    def __init__(
        self, numbers: list[int], references: "list[weakref.ref[torch.Tensor]]", buffer: Buffer
    ) -> None:  # fmt: skip
        self.numbers, self.references, self.buffer = numbers, references, buffer
        self.was_stepped = False  # whether ``after`` holds what the last step that was looked at has left
        self.parameters: list[torch.Tensor | None] = []  # these and their views are held around a step only
        self.views: list[torch.Tensor | None] = []
        self.versions: list[int] = []
        self.before_versions: list[int] = []
        self.results: dict[str, torch.Tensor] = {}
        self.graded: list[bool] = []  # whether each has a dense gradient


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
    sparse: dict[int, tuple[float, float, float]] = field(default_factory=dict)
    number: int = 0
    count: int = -1  # of the last step that was looked at
    others: bool = False  # whether steps came between that were not


class NormSampler:
    """Takes norms around steps of optimizers.

    Args:
        numbering: numbers of parameters.
        entries: how many numbers of embeddings are copied; of other large tensors evenly spaced entries are.

    The norms of gradients and weights are exact. Those of changes, and the shares of entries, are estimated from at
    most 4096 evenly spaced entries of a tensor, see ``flatcopies.strides``.

    Example:
        >>> from anybatch.doctor.recording.numbering import Numbering
        >>> model = torch.nn.Linear(2, 1, bias=False)
        >>> numbering = Numbering(lambda fact: None)
        >>> number = numbering.root(model)
        >>> sgd = torch.optim.SGD(model.parameters(), lr=0.5)
        >>> model(torch.ones(1, 2)).sum().backward()
        >>> sampler = NormSampler(numbering)
        >>> sampler.before(sgd)
        >>> sgd.step()
        >>> round(sampler.after(sgd).update[0], 4)
        0.7071
    """

    def __init__(self, numbering: "Numbering", *, entries: int = ENTRIES) -> None:
        self._numbering, self._entries = numbering, entries
        self._plans: dict[int, _Plan] = {}
        self._owners: dict[int, int] = {}

    def before(self, optimizer: Any) -> None:
        """Copies what is needed before a step.

        Args:
            optimizer: that is about to step.
        """
        plan = self._plan(optimizer)
        with torch.no_grad():
            plan.sparse = {}
            for bucket in plan.buckets:
                buffer, results = bucket.buffer, bucket.results
                results.clear()
                bucket.parameters = [reference() for reference in bucket.references]
                bucket.views = buffer.fitting(bucket.parameters)
                results["exact weight"] = _exact(bucket, bucket.views)  # reads all, so that single entries are near
                buffer.fill(1, bucket.views)
                if bucket.was_stepped:
                    buffer.mark(1, 3, 1)
                bucket.before_versions = _versions(bucket.parameters)
                self._gradients(plan, bucket)
            self._state_before(plan, optimizer)

    def after(self, optimizer: Any, count: int = 0) -> Norms:
        """Compares with what was copied.

        Args:
            optimizer: that has stepped.
            count: of its steps before this one; what those have changed that were not looked at is not taken for a
                write outside of steps.

        Returns:
            The norms, without the numbers of the event and of the step.
        """
        plan = self._plans[id(optimizer)]
        with torch.no_grad():
            if not plan.sparse and not any(any(bucket.graded) for bucket in plan.buckets):
                for bucket in plan.buckets:  # a closure has made the gradients within the step
                    self._gradients(plan, bucket)
            for bucket in plan.buckets:
                self._changes(bucket)
            plan.others = count - plan.count > 1
            found = self._read(plan, optimizer)
        plan.count = count
        for bucket in plan.buckets:
            bucket.parameters, bucket.views = [], []
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
            embeds = [self._numbering.facts(number).role == "embedding" for number in numbers]
            begins = [self._begins_equal(number) for number in numbers]
            buffer = Buffer(views, strides(views, embeds, self._entries), [n for n, flag in enumerate(begins) if flag])
            found.append(_Bucket(numbers, [weakref.ref(tensor) for tensor, _ in pairs], buffer))
        return found

    def _begins_equal(self, number: int) -> bool:
        """Whether a parameter is a matrix that began with equal rows, which then may stay equal."""
        facts = self._numbering.facts(number)
        return len(facts.shape) > 1 and facts.shape[0] > 1 and (facts.equal_rows or facts.constant is not None)

    def _gradients(self, plan: _Plan, bucket: _Bucket) -> None:
        buffer, results = bucket.buffer, bucket.results
        grads = [one.grad if one is not None and one.is_leaf else None for one in bucket.parameters]
        for position, grad in enumerate(grads):
            if grad is not None and grad.layout is not torch.strided:
                plan.sparse[bucket.numbers[position]] = _sparse(grad)
                grads[position] = None
        dense = buffer.fitting(grads)
        bucket.graded = [view is not None for view in dense]
        if not any(bucket.graded):
            return
        results["exact grad"] = _exact(bucket, dense)
        buffer.fill(0, dense)
        results["ends"] = buffer.ends()
        buffer.mark_zeros()
        if buffer.rows:
            results["rows"] = buffer.equal_rows(dense).float()

    def _changes(self, bucket: _Bucket) -> None:
        buffer = bucket.buffer
        buffer.fill(3, buffer.fitting(bucket.views))
        buffer.mark(2, 3, 1)
        buffer.subtract(3, 1, 2)
        bucket.results["figures"] = buffer.figures().reshape(-1)

    def _state_before(self, plan: _Plan, optimizer: Any) -> None:
        tensors = self._states(plan, optimizer)
        plan.had_state = frozenset(tensors)
        plan.state_versions = {number: tensor._version for number, tensor in tensors.items()}
        plan.state_norms = _norms_of(tensors, plan.still)

    def _states(self, plan: _Plan, optimizer: Any) -> dict[int, torch.Tensor]:
        """One tensor of the optimizer's state for each parameter that has some, the largest kind first."""
        found: dict[int, torch.Tensor] = {}
        states, owned = optimizer.state, plan.owned
        for bucket in plan.buckets:
            for number, parameter in zip(bucket.numbers, bucket.parameters, strict=True):
                state = states.get(parameter) if number in owned else None
                if type(state) is dict or isinstance(state, dict):
                    for name, value in state.items():
                        if name != "step" and isinstance(value, torch.Tensor):
                            found[number] = value
                            break
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
        numbers, columns = list[int](), tuple(list[Any]() for _ in range(5))
        largest, equal, since, silent = [0.0], list[int](), list[int](), list[int]()
        for bucket in plan.buckets:
            buffer = bucket.buffer
            values = _fetched(bucket)
            largest += [max(map(abs, values["ends"])) * factor] if "ends" in values else []
            found = _columns(bucket, values["figures"], factor)
            # of entries that do not stand for others
            largest += [norm for norm in found[0] if norm is not None and (norm != norm or norm == math.inf)]
            for position, number in enumerate(bucket.numbers) if plan.sparse else ():
                if number in plan.sparse:
                    found[0][position], found[4][position], top = plan.sparse[number]
                    largest.append(top)
            shown = zip(buffer.rows, values.get("rows", ()), strict=False)
            equal += [bucket.numbers[p] for p, flag in shown if flag and self._all_rows_equal(bucket, p)]
            now = _versions(bucket.parameters)
            self._since(plan, bucket, (values["figures"][4], found[3]), now, since, silent)
            bucket.versions, bucket.was_stepped = now, True
            numbers += bucket.numbers
            for column, part in zip(columns, found, strict=True):
                column.extend(part)
        moved = self._moved(plan, optimizer, dict(zip(numbers, columns[3], strict=True)))
        top = next((value for value in largest if value != value), max(largest))  # nan comes first
        plan.number += 1
        return Norms(
            optimizer=self._numbering.optimizer(optimizer),
            number=plan.number - 1,
            parameters=tuple(numbers),
            grad=tuple(columns[0]), weight=tuple(columns[1]), update=tuple(columns[2]), unchanged=tuple(columns[3]),
            grad_zeros=tuple(columns[4]),
            max_grad=top,
            state_moved=tuple(moved.get(number) for number in numbers),
            equal_grad_rows=tuple(equal), since=tuple(since), silent=tuple(silent),
        )  # fmt: skip

    def _since(
        self, plan: _Plan, bucket: _Bucket, shares: tuple[list[float], list[float]], now: list[int],
        since: list[int], silent: list[int],
    ) -> None:  # fmt: skip
        """What changed though no optimizer stepped: between two samples, or within the step of another optimizer."""
        moved, same = shares
        between = moved if bucket.was_stepped else [0.0] * len(moved)
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

    def _all_rows_equal(self, bucket: _Bucket, position: int) -> bool:
        parameter = bucket.references[position]()
        grad = plain(parameter.grad) if parameter is not None else None
        return grad is not None and bool((grad[1:] == grad[:1]).all())


def _exact(bucket: _Bucket, tensors: Sequence[torch.Tensor | None]) -> torch.Tensor:
    """Norms of tensors that are not copied whole, side by side; zeros for those that are missing."""
    large = [tensors[position] for position in bucket.buffer.large]
    present = [one for one in large if one is not None]
    if present and len(present) == len(large):
        return norms(present)
    found = iter(norms(present).unbind() if present else ())
    zero = bucket.buffer.masks.new_zeros(())
    return torch.stack([zero if one is None else next(found) for one in large]) if large else zero[None][:0]


def _versions(tensors: Sequence[torch.Tensor | None]) -> list[int]:
    try:
        return [-1 if one is None else one._version for one in tensors]
    except RuntimeError:  # made in inference mode, where versions are not counted
        return [-1 if one is None or one.is_inference() else one._version for one in tensors]


def _columns(bucket: _Bucket, figures: list[list[float]], factor: float) -> tuple[list[Any], ...]:
    """Norms of gradients, weights and changes, the shares that stayed, and those that are zero, by position."""
    grads, weights, updates, zeros, _, changed = figures
    found: list[Any] = grads if factor == 1.0 else [norm * factor for norm in grads]
    shares: list[Any] = zeros
    if not all(bucket.graded):
        found = [norm if graded else None for norm, graded in zip(found, bucket.graded, strict=True)]
        shares = [share if graded else None for share, graded in zip(zeros, bucket.graded, strict=True)]
    moved = [norm * scale for norm, scale in zip(updates, bucket.buffer.scales, strict=True)]
    return found, weights, moved, [1.0 - share for share in changed], shares


def _sparse(grad: torch.Tensor) -> tuple[float, float, float]:
    """The norm of a sparse gradient, its share of zeros, and its largest entry."""
    if grad.layout is not torch.sparse_coo:
        return float(grad.norm()), 0.0, float("nan")
    values = grad.detach().coalesce().values()
    filled = int(values.count_nonzero())
    largest = float(values.abs().max()) if values.numel() else 0.0
    return float(values.norm()), 1.0 - filled / max(grad.numel(), 1), largest


def _norms_of(tensors: dict[int, torch.Tensor], numbers: Iterable[int]) -> dict[int, float]:
    chosen = {number: view for number in numbers if number in tensors and (view := plain(tensors[number])) is not None}
    kinds: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    for number, tensor in chosen.items():
        kinds.setdefault((tensor.dtype, tensor.device), []).append(number)
    found: dict[int, float] = {}
    for group in kinds.values():
        found.update(zip(group, norms([chosen[number] for number in group]).tolist(), strict=True))
    return found


def _fetched(bucket: _Bucket) -> dict[str, Any]:
    """The results in one transfer, in the order of the parameters."""
    results, buffer = bucket.results, bucket.buffer
    flat = torch.cat(list(results.values())).tolist()  # made the widest among them, all of which keeps each number
    found: dict[str, Any] = {}
    start = 0
    for name, value in results.items():
        found[name] = flat[start : start + value.numel()]
        start += value.numel()
    count = len(buffer.shapes)
    rows = [found["figures"][row * count : (row + 1) * count] for row in range(6)]
    found["figures"] = figures = [buffer.by_position(row) for row in rows]
    for row, name in enumerate(("exact grad", "exact weight")):
        for position, norm in zip(buffer.large, found.get(name, ()), strict=False):
            figures[row][position] = norm
    return found
