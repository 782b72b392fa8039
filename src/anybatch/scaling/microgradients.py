"""Norms of each micro-batch's gradient, measured while gradients are accumulated, without a buffer."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.autograd.graph import get_gradient_edge

from anybatch.batch.batches import Part
from anybatch.errors import LossError
from anybatch.loss.norms import total_norm
from anybatch.loss.sums import Sums
from anybatch.loss.weights import Weights, fetched
from anybatch.scaling.noiseestimates import Measurement, pool, spreads_of
from anybatch.update.passes import Outcome, Task, Watch

_SMALL = 2**16  # bytes of a gradient that waits for others: one kernel for several takes less time
_HELD = 2**18  # bytes of gradients that wait at most
_UNKNOWN_COUNT = (
    "the count of this Mean is known only when the last micro-batch has run, and the weight of each before that is not "
    "known here; pass TrainStep count='forward', or a count= of its own"
)

Take = Callable[[Outcome, Measurement | None, str], None]


class Unmeasured(Watch):
    """Only reports that an attempt at a logical batch succeeded."""

    def __init__(self, take: Take) -> None:
        self._take = take

    def on_outcome(self, outcome: Outcome) -> None:
        """The attempt went through; see ``Watch``."""
        self._take(outcome, None, "")


class MicroGradients(Watch):
    """Measures every gradient before it is added to ``.grad``, during an attempt at a logical batch.

    In each backward, autograd passes the gradient of a parameter to ``AccumulateGrad`` once, summed over all uses of
    the parameter. Its norm is computed there, without a copy or a device synchronization.

    Args:
        take: called after the update with the measurement, or the reason why there is none.
        keep: keeps the gradients of the current micro-batch, which may then come from several backwards.
        is_first: whether a loss that needs ``keep`` may be refused with an error.
    """

    def __init__(
        self, task: Task, parts: Sequence[Part], parameters: Sequence[torch.Tensor], take: Take, *, keep: bool,
        is_first: bool,
    ) -> None:  # fmt: skip
        self._model, self._is_shared, self._parts, self._take = task.model, task.settings.reducer.is_shared, parts, take
        self._parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self._keep, self._is_first = keep, is_first
        scaler = task.settings.scaler
        self._scale = None if scaler is None else scaler.scale(torch.ones((), device=task.settings.device))
        self._handles: list[tuple[Any, Any]] = []
        self._index = -1
        self._norms: dict[int, list[torch.Tensor]] = {}
        self._fired: set[int] = set()
        self._seen: set[int] = set()
        self._kept: dict[int, torch.Tensor] = {}
        self._waiting: dict[torch.device, list[torch.Tensor]] = {}
        self._held = 0
        self._total: torch.Tensor | None = None
        self._trouble = ""

    def __enter__(self) -> "MicroGradients":
        for parameter in self._parameters:
            # Of the node and not of the tensor: torch.autograd.grad in a loss accumulates nothing, and calls hooks of
            # the tensor. Whoever keeps the node keeps the hook.
            node = get_gradient_edge(parameter).node
            self._handles.append((node, node.register_prehook(self._watch(id(parameter)))))
        return self

    def __exit__(self, *_: object) -> None:
        for _, handle in self._handles:
            handle.remove()
        for held in (self._handles, self._kept, self._waiting):
            held.clear()

    def _watch(self, key: int) -> Callable[[Sequence[torch.Tensor]], None]:
        def look(gradients: Sequence[torch.Tensor]) -> None:
            is_over = self._total is not None  # what comes now an optimizer asked for, at other weights
            if gradients[0] is not None and not self._trouble and not is_over:
                self._look(key, gradients[0])

        return look

    def _look(self, key: int, gradient: torch.Tensor) -> None:
        if key in self._fired and not self._keep:
            self._trouble = (
                f"{self._name(key)} gets its gradient in several backwards of one micro-batch, so that the gradient of "
                "the micro-batch never is there as a whole; expected one backward for each parameter: cut what yielded "
                "losses share (anybatch.cut), or let NoiseScale(step, keep_gradients=True) keep it, which takes as "
                "much memory as the gradients while it measures"
            )
            if self._is_first:
                raise LossError(self._trouble)
            return
        # What is held is the tensor itself: autograd then does not make it .grad, to which the next one is added.
        if self._keep:
            kept = self._kept.get(key)
            self._kept[key] = gradient if kept is None else (kept + gradient).detach()
        elif gradient.is_sparse or gradient.nbytes > _SMALL:
            self._add([gradient])
        else:
            waiting = self._waiting.setdefault(gradient.device, [])  # each device has a thread of its own
            waiting.append(gradient)
            self._held += gradient.nbytes
            if self._held >= _HELD:
                self._held = 0
                self._add(self._waiting.pop(gradient.device))
        self._fired.add(key)

    def _name(self, key: int) -> str:
        return next((repr(name) for name, p in self._model.named_parameters() if id(p) == key), "'a parameter'")

    def on_micro_batch(self, index: int) -> None:
        """A micro-batch begins, or is named again; see ``Watch``."""
        if index != self._index:
            self._close()
            self._index = index

    def _add(self, gradients: Sequence[torch.Tensor]) -> None:
        self._norms.setdefault(self._index, []).append(_norm_of(gradients))

    def _close(self) -> None:
        for held in (list(self._kept.values()), *self._waiting.values()):
            if held:
                self._add(held)
        self._kept.clear()
        self._waiting.clear()
        self._held = 0
        self._seen |= self._fired
        self._fired.clear()

    def on_sums(self, weights: Weights, sums: Sums) -> None:
        """All micro-batches have run; passes the sums to the other processes; see ``Watch``."""
        self._close()
        missed = [id(p) for p in self._parameters if p.grad is not None and id(p) not in self._seen]
        if missed and not self._trouble:
            self._trouble = f"the gradient of {self._name(missed[0])} was put there by something else than a backward"
        closing = 1.0 if all(weights.names(name) for name in sums.counts) else sums.closing_scale
        if closing is None and not self._trouble:
            self._trouble = _UNKNOWN_COUNT
        mine: dict[str, Any] = {"trouble": self._trouble}
        if closing is not None and not self._trouble:
            rows = [len(part.samples) for part in self._parts]
            mine |= spreads_of(self._added(closing), _columns(weights, sums, len(rows)), rows)
        sums.facts = [mine]

    def _added(self, closing: float) -> list[Any]:
        """The norm of each micro-batch's contribution to the gradient; one process does not synchronize."""
        home = next((norm.device for norms in self._norms.values() for norm in norms), torch.device("cpu"))
        scale = closing if self._scale is None else closing / self._scale.to(home)
        norms = [_joined(self._norms.get(index, ()), home) * scale for index in range(len(self._parts))]
        return torch.stack(norms).tolist() if norms and self._is_shared else norms

    def on_gradient(self) -> None:
        """Measures the norm of the whole gradient, the first time only; see ``Watch``."""
        if self._total is None and not self._trouble:
            self._total = _norm_of([parameter.grad for parameter in self._parameters if parameter.grad is not None])

    def on_outcome(self, outcome: Outcome) -> None:
        """The attempt went through; see ``Watch``."""
        total = self._total
        if total is not None:
            total = total.double() if self._scale is None else total.double() / self._scale.to(total.device)
        self._take(outcome, *pool(outcome.sums.facts, total))


def _columns(weights: Weights, sums: Sums, parts: int) -> dict[str, list[float]] | None:
    """The items of each micro-batch by the name of the loss; ``None`` if they are not known."""
    columns = {}
    for name in dict.fromkeys([*sums.terms, *sums.counts]):
        if weights.names(name) or name not in sums.counts:
            columns[name] = [weights.part(name, index) for index in range(parts)]
        elif len(sums.counts[name]) == parts:
            columns[name] = fetched(sums.counts[name])
        else:
            return None
    return columns


def _joined(norms: Sequence[torch.Tensor], home: torch.device) -> torch.Tensor:
    if not norms:
        return torch.zeros((), dtype=torch.float64, device=home)
    together: torch.Tensor = torch.linalg.vector_norm(torch.stack([norm.to(home, torch.float64) for norm in norms]))
    return together


def _norm_of(gradients: Iterable[torch.Tensor]) -> torch.Tensor:
    return total_norm(list(map(_entries, gradients)))


def _entries(gradient: torch.Tensor) -> torch.Tensor:
    """The elements of a gradient, detached; of a sparse one those that are stored, coalesced."""
    if gradient.requires_grad:
        gradient = gradient.detach()
    return gradient.coalesce().values() if gradient.is_sparse else gradient
