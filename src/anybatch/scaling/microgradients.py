"""The gradient of each micro-batch by itself, seen on its way into the sum, without a buffer of its own."""

import contextlib
from collections.abc import Callable, Sequence
from functools import partial
from types import TracebackType
from typing import Any, NamedTuple, Protocol

import torch

from anybatch.batch.batches import Part
from anybatch.errors import LossError
from anybatch.loss.norms import total_norm
from anybatch.loss.sums import Sums
from anybatch.loss.weights import Weights, fetched
from anybatch.scaling.manynorms import HELD, SMALL, joined, joined_where_small, plain
from anybatch.scaling.pooling import Pooled, facts_of, in_proportion, pool, trouble_in
from anybatch.update.passes import Outcome, Task
from anybatch.update.progress import Watch

_UNKNOWN_COUNT = (
    "the count of this Mean is known only when the last micro-batch has run, and the weight of each before that is not "
    "known here; pass TrainStep count='forward', or a count= of its own"
)


class Measurement(NamedTuple):
    """What was seen of one logical batch; its tensors are not fetched from the device.

    Args:
        norms: of what each micro-batch adds to the gradient.
        total: the norm of the gradient.
        counts: the items of each micro-batch.
        unit: what an item is.
    """

    norms: torch.Tensor
    total: torch.Tensor
    counts: list[float]
    unit: str


class _Nodes(torch.autograd.Function):
    """Has the nodes that accumulate the gradients of all its arguments behind it, at the price of one operation."""

    @staticmethod
    def forward(ctx: Any, *tensors: torch.Tensor) -> torch.Tensor:
        return tensors[0].new_empty(0)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        raise NotImplementedError("nothing goes back through this node")


class Measurable(Protocol):
    """A step whose gradients can be measured, such as ``TrainStep``."""

    model: torch.nn.Module
    loss_fn: Any
    watcher: Callable[[Task, Sequence[Part], Sequence[torch.Tensor]], Watch] | None


class MicroGradients:
    """Looks at every gradient on its way into ``.grad`` while its block runs.

    Autograd gives a parameter its gradient once a backward, with all uses of the parameter summed. It is looked at
    there, before it is added up: no copy is kept, and nothing waits for the device.

    Args:
        parameters: all that may get a gradient.
        names: gives their names by id.
        keep: keeps the gradients of the running micro-batch, so that they may come in several backwards.
        is_first: whether a loss that needs ``keep`` may be refused with an error.

    Attributes:
        trouble: why nothing can be said about this batch; empty if there is no reason.
    """

    def __init__(
        self, parameters: Sequence[torch.Tensor], names: Callable[[], dict[int, str]], *, keep: bool, is_first: bool
    ) -> None:
        self._parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self._names = names
        self._keep = keep
        self._is_first = is_first
        self._attached: list[tuple[Any, Any]] = []
        self._index = -1
        self._norms: dict[int, list[torch.Tensor]] = {}
        self._fired: set[int] = set()
        self._seen: set[int] = set()
        self._kept: dict[int, torch.Tensor] = {}
        self._waiting: dict[torch.device, list[torch.Tensor]] = {}
        self._held = 0
        self._total: torch.Tensor | None = None
        self._told = False
        self.trouble = ""

    def __enter__(self) -> "MicroGradients":
        with torch.enable_grad():
            # Of the node and not of the tensor: torch.autograd.grad in a loss accumulates nothing, and calls hooks of
            # the tensor. Whoever keeps the node keeps the hook.
            found = _Nodes.apply(*self._parameters) if self._parameters else None  # type: ignore[no-untyped-call]
        nodes = () if found is None else found.grad_fn.next_functions
        for parameter, (node, _) in zip(self._parameters, nodes, strict=True):
            self._attached.append((node, node.register_prehook(self._watch(id(parameter)))))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for _, handle in self._attached:
            handle.remove()
        self._attached.clear()
        self._kept.clear()
        self._waiting.clear()

    def _watch(self, key: int) -> Callable[[Sequence[torch.Tensor]], None]:
        def look(gradients: Sequence[torch.Tensor]) -> None:
            is_over = self._total is not None  # what comes now an optimizer asked for, at other weights
            if gradients[0] is not None and not self.trouble and not is_over:
                self._look(key, gradients[0])

        return look

    def _look(self, key: int, gradient: torch.Tensor) -> None:
        if key in self._fired and not self._keep:
            name = self._names().get(key, "a parameter")
            self.trouble = (
                f"{name!r} gets its gradient in several backwards of one micro-batch, so that the gradient of the "
                "micro-batch never is there as a whole; expected one backward for each parameter: cut what yielded "
                "losses share (anybatch.cut), or let NoiseScale(step, keep_gradients=True) keep it, which takes as "
                "much memory as the gradients while it measures"
            )
            if self._is_first:
                raise LossError(self.trouble)
            return
        # What is held is the tensor itself: autograd then does not make it .grad, to which the next one is added.
        if self._keep:
            kept = self._kept.get(key)
            self._kept[key] = gradient if kept is None else (kept + gradient).detach()
        elif gradient.is_sparse or gradient.nbytes > SMALL:
            self._add([gradient])
        else:
            waiting = self._waiting.setdefault(gradient.device, [])  # each device has a thread of its own
            waiting.append(gradient)
            self._held += gradient.nbytes
            if self._held >= HELD:
                self._held = 0
                self._add(self._waiting.pop(gradient.device))
        self._fired.add(key)

    def begin(self, index: int) -> None:
        """Begins a micro-batch.

        Args:
            index: of it; the one that is running may be named again.
        """
        if index != self._index:
            self._close()
            self._index = index

    def _add(self, gradients: Sequence[torch.Tensor]) -> None:
        self._norms.setdefault(self._index, []).append(total_norm(list(joined_where_small(map(plain, gradients)))))

    def _close(self) -> None:
        for held in (list(self._kept.values()), *self._waiting.values()):
            if held:
                self._add(held)
        self._kept.clear()
        self._waiting.clear()
        self._held = 0
        self._seen |= self._fired
        self._fired.clear()

    def complete(self) -> None:
        """Notes the norm of the whole gradient, which is in ``.grad`` now; does nothing the second time."""
        if self._total is not None or self.trouble:
            return
        if not self._told:  # after that there are gradients of other processes
            self._close()
            self._check_seen()
        gradients = [parameter.grad for parameter in self._parameters if parameter.grad is not None]
        if not self.trouble:
            self._total = total_norm(list(joined_where_small(map(plain, gradients))))

    def _check_seen(self) -> None:
        missed = [id(p) for p in self._parameters if p.grad is not None and id(p) not in self._seen]
        if missed and not self.trouble:
            name = self._names().get(missed[0], "a parameter")
            self.trouble = f"the gradient of {name!r} was put there by something else than a backward"

    def facts(self, parts: Sequence[Part], scale: torch.Tensor | None, weights: Weights, sums: Sums) -> dict[str, Any]:
        """What other processes have to know of the micro-batches of this one, before gradients are summed over them.

        Args:
            parts: the samples of each micro-batch.
            scale: what a ``GradScaler`` had multiplied everything by.
            weights: the counts.
            sums: what was added up.
        """
        self._close()
        self._check_seen()
        self._told = True
        closing = _closing_scale(weights, sums)
        if closing is None or self.trouble:
            return {"trouble": self.trouble or _UNKNOWN_COUNT}
        home = next((norm.device for norms in self._norms.values() for norm in norms), torch.device("cpu"))
        norms = [joined(self._norms.get(index, []), home) for index in range(len(parts))]
        scaled = torch.stack(norms) * closing / (1.0 if scale is None else scale.to(home)) if norms else torch.zeros(0)
        return facts_of(scaled.tolist(), columns_of(weights, sums, parts), [len(part.samples) for part in parts])

    def pooled(self, told: Sequence[Any], scale: torch.Tensor | None) -> Pooled | None:
        """What was seen by all processes together.

        Args:
            told: the facts of each.
            scale: what a ``GradScaler`` had multiplied everything by.

        Returns:
            The measurement; ``None`` if there are not two micro-batches with items.
        """
        self.trouble = trouble_in(told)
        if self.trouble or self._total is None:
            return None
        total = self._total.double()
        return pool(told, total if scale is None else total / scale.to(total.device))

    def measurement(self, outcome: Outcome, scale: torch.Tensor | None) -> Measurement | None:
        """What was seen.

        Args:
            outcome: of the attempt.
            scale: what a ``GradScaler`` had multiplied everything by.

        Returns:
            The measurement; ``None`` if there are not two micro-batches with items.
        """
        counts, unit = counts_of(outcome.weights, outcome.sums, outcome.parts)
        used = [index for index, count in enumerate(counts) if count > 0]
        if self.trouble or len(used) < 2 or self._total is None:
            return None
        closing = _closing_scale(outcome.weights, outcome.sums)
        if closing is None:
            self.trouble = _UNKNOWN_COUNT
            return None
        home = self._total.device
        norms = torch.stack([joined(self._norms.get(index, []), home) for index in used])
        total = self._total.double()
        if scale is not None:
            norms, total = norms / scale.to(home), total / scale.to(home)
        return Measurement(norms * closing, total, [counts[index] for index in used], unit)


def _closing_scale(weights: Weights, sums: Sums) -> float | None:
    """What gradients were multiplied by when all micro-batches had run; ``None`` if it is not known."""
    if all(weights.names(name) for name in sums.counts):
        return 1.0
    return getattr(sums, "closing_scale", None)


def counts_of(weights: Weights, sums: Sums, parts: Sequence[Part]) -> tuple[list[float], str]:
    """The items of each micro-batch, and what they are called.

    Where losses have counts that are not in proportion to each other, or that are not known for each micro-batch, there
    is no common item but the sample.

    Args:
        weights: the counts that were given.
        sums: has the counts that ``Mean`` s brought along.
        parts: the samples of each micro-batch.

    Returns:
        One count a micro-batch, and ``"samples"`` or ``"items"``.
    """
    rows: list[float] = [len(part.samples) for part in parts]
    columns = list((columns_of(weights, sums, parts) or {}).values())
    if not columns or any(not in_proportion(columns[0], other) for other in columns[1:]) or columns[0] == rows:
        return rows, "samples"
    return columns[0], "items"


def columns_of(weights: Weights, sums: Sums, parts: Sequence[Part]) -> dict[str, list[float]] | None:
    """The items of each micro-batch by the name of the loss; ``None`` if they are not known."""
    columns = {}
    for name in dict.fromkeys([*sums.terms, *sums.counts]):
        if weights.names(name) or name not in sums.counts:
            columns[name] = [weights.part(name, index) for index in range(len(parts))]
        elif len(sums.counts[name]) == len(parts):
            columns[name] = fetched(sums.counts[name])
        else:
            return None
    return columns


class MeasuredAttempt(Watch):
    """Looks on at an attempt at a logical batch, and measures the gradients of its micro-batches.

    Args:
        seen: looks at the gradients.
        task: the logical batch.
        parts: how it is split.
        take: takes what was seen, or why nothing can be said; called after the update.
    """

    def __init__(
        self,
        seen: MicroGradients,
        task: Task,
        parts: Sequence[Part],
        take: Callable[[Outcome, Measurement | Pooled | None, str], None],
    ) -> None:
        self._seen, self._reducer, self._take = seen, task.settings.reducer, take
        scaler = task.settings.scaler
        self._scale = None if scaler is None else scaler.scale(torch.ones((), device=task.settings.device))
        self._telling = self._reducer.telling(partial(seen.facts, parts, self._scale))
        self._told: Sequence[Any] = ()
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> "MeasuredAttempt":
        self._stack.enter_context(self._seen)
        self._told = self._stack.enter_context(self._telling)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stack.__exit__(kind, error, traceback)

    def on_micro_batch(self, index: int) -> None:
        """A micro-batch begins.

        Args:
            index: of it, from 0.
        """
        self._seen.begin(index)

    def on_gradient(self) -> None:
        """The gradient of the whole batch is in ``.grad``."""
        self._seen.complete()

    def on_outcome(self, outcome: Outcome) -> None:
        """The attempt went through.

        Args:
            outcome: what it gave.
        """
        found: Measurement | Pooled | None = None
        if not outcome.skipped:
            shared = self._reducer.is_shared
            found = (
                self._seen.pooled(self._told, self._scale) if shared else self._seen.measurement(outcome, self._scale)
            )
        self._take(outcome, found, self._seen.trouble)


class UnmeasuredAttempt(Watch):
    """Only tells that an attempt went through.

    Args:
        take: see ``MeasuredAttempt``.
    """

    def __init__(self, take: Callable[[Outcome, Measurement | Pooled | None, str], None]) -> None:
        self._take = take

    def on_outcome(self, outcome: Outcome) -> None:
        """The attempt went through.

        Args:
            outcome: what it gave.
        """
        self._take(outcome, None, "")
