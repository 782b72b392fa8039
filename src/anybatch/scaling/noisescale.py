"""``NoiseScale``: the gradient noise scale, which tells how large a batch is useful."""

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple, Protocol, TypedDict

import torch
from torch.autograd.graph import get_gradient_edge
from torch.nn.modules.batchnorm import _BatchNorm

from anybatch.batch.batches import Part
from anybatch.errors import BatchError, LossError, warn
from anybatch.loss.losses import as_coupled, as_over_time
from anybatch.loss.norms import total_norm
from anybatch.loss.sums import Sums
from anybatch.loss.weights import Weights, fetched
from anybatch.options import needs_closure, refuse_parts
from anybatch.records.reading import Least
from anybatch.scaling.noiseestimates import Estimate, Measurement, Moments, RatioOfMeans, estimate, pool, spreads_of
from anybatch.update.passes import Outcome, Task, Watch
from anybatch.update.stepstate import load_whole

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


_MOST_WAITING = 64  # measurements that stay on the device before they are read

_USUAL_OF = 31  # the usual batch size is the median of this many measured batches


class _Batch(NamedTuple):
    size: float
    micro_batches: int
    unit: str


_WHOLE = (
    "it shows between micro-batches, and each logical batch was one (memory= may choose so). Let NoiseScale(step, "
    "halves=True) run those that it measures as two halves; or give TrainStep micro_batch_size= in the place of "
    "memory=, such as half of the batch; or windows() of several batches"
)

_STAYS_WHOLE = (
    "it shows between micro-batches, and these batches run whole, since they have one sample, can't be cut, or would "
    "give another gradient in halves; anybatch check says why"
)


class Measurable(Protocol):
    """A step whose gradients can be measured, such as ``TrainStep``."""

    model: torch.nn.Module
    loss_fn: Any
    watcher: Callable[[Task, Sequence[Part], Sequence[torch.Tensor]], Watch] | None

    def split_next(self, size: float) -> None:
        """Runs the next logical batch, if it can be split, in smaller micro-batches."""


class _State(TypedDict):
    version: Literal[2]
    countdown: Annotated[int, Least(0)]
    batches: list[tuple[Annotated[float, Least(0)], Annotated[int, Least(1)], Literal["samples", "items"]]]
    moments: Moments


class NoiseScale:
    """Measures the gradient noise scale from the micro-batches that a step runs anyway.

    The noise scale is S / |G|^2: the variance of the gradient of one sample, summed over all parameters, divided by the
    squared norm of the true gradient (McCandlish et al. 2018, "An Empirical Model of Large-Batch Training"). Its unit
    is samples. The gradient of a much smaller batch is mostly noise: a larger batch needs fewer updates and hardly more
    samples. A much larger batch needs more samples for hardly fewer updates.

    In every ``every``-th logical batch the norm of each micro-batch's gradient is measured while gradients are
    accumulated: without an extra pass, buffer or device synchronization, and with bitwise the same training.
    Micro-batches may have any sizes, and a logical batch needs at least two. S and |G|^2 are averaged over time
    separately. In a process group each rank has a NoiseScale, and the micro-batches of all ranks count.

    Args:
        step: a ``TrainStep``, or ``None`` to call ``update`` in your own loop.
        every: measures one logical batch out of this many.
        decay: of the moving averages, per measurement.
        keep_gradients: keeps the gradient of the current micro-batch while measuring, which takes as many bytes as the
            gradients. Required for losses with several backwards: ``OverTime``, and yielded losses without a ``cut``.
        halves: splits a batch that is to be measured, but is a single micro-batch (``memory=`` may choose so), into
            two; its gradient is the same within rounding, with other dropout masks. Does not split where BatchNorm
            would see halves or the split is not exact.

    Raises:
        BatchError: an argument is invalid, the step already has a ``NoiseScale``, or its model, loss, optimizer or
            devices can't be measured.

    Example:
        >>> noise = NoiseScale(None)
        >>> noise.update(norms_sq=[25.0, 169.0], counts=[1, 1], total_norm_sq=80.0)
        >>> noise.trace, noise.signal, round(noise.value, 6)
        (34.0, 63.0, 0.539683)
    """

    def __init__(
        self,
        step: Measurable | None,
        every: int = 16,
        *,
        decay: float = 0.9,
        keep_gradients: bool = False,
        halves: bool = False,
    ) -> None:
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise BatchError(f"every={every!r}; expected an integer of at least 1")
        if isinstance(decay, bool) or not isinstance(decay, (int, float)) or not 0 < decay < 1:
            raise BatchError(f"decay={decay!r}; expected a number between 0 and 1")
        if not isinstance(keep_gradients, bool):
            raise BatchError(f"keep_gradients={keep_gradients!r}; expected True or False")
        if not isinstance(halves, bool):
            raise BatchError(f"halves={halves!r}; expected True or False")
        self.every, self._halves = every, halves
        self._ratio = RatioOfMeans(float(decay))
        self._waiting: list[Measurement] = []
        self._countdown = 0
        self._batches: deque[_Batch] = deque(maxlen=_USUAL_OF)
        self._whole = 0  # logical batches in a row that were one micro-batch when one was to be measured
        self._was_warned = self._was_asked = self._stays_whole = False
        self._step: Measurable | None = None
        self._keep = self._is_shared = self._went_well = False
        if step is not None:
            self._attach(step, keep_gradients)

    def _attach(self, step: Measurable, keep_gradients: bool) -> None:
        if not hasattr(step, "watcher"):
            raise BatchError(f"step is a {type(step).__name__}; expected an anybatch.TrainStep, or None")
        if step.watcher is not None:
            raise BatchError("this step is measured already; call remove() of the NoiseScale that it has first")
        if getattr(step, "_placements", None) is not None:
            raise BatchError(
                "the step shares its micro-batches among several devices, of which NoiseScale would see those of one; "
                "measure without devices="
            )
        refuse_parts(step.model, "NoiseScale(step)")
        if as_coupled(step.loss_fn):
            raise BatchError(
                "the loss of Coupled sees all samples together, so a micro-batch has no gradient to "
                "measure the noise of; expected a loss that is a mean over samples"
            )
        if as_over_time(step.loss_fn) and not keep_gradients:
            raise BatchError(
                "OverTime differentiates one chunk of time after another, so the gradient of a micro-batch never is "
                "there as a whole; pass keep_gradients=True, which takes as much memory as the gradients while it "
                "measures"
            )
        if any(needs_closure(optimizer) for optimizer in getattr(step, "_optimizers", ())):
            raise BatchError(
                "an optimizer that evaluates the gradient itself (LBFGS) can't be measured; expected another"
            )
        self._step, self._keep = step, keep_gradients
        step.watcher = self._watched

    def remove(self) -> None:
        """Detaches from the step; the measurements stay. A second call does nothing."""
        step, self._step = self._step, None
        if step is not None and step.watcher == self._watched:
            step.watcher = None

    def __enter__(self) -> "NoiseScale":
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def _watched(self, task: Task, parts: Sequence[Part], parameters: Sequence[torch.Tensor]) -> Watch:
        self._is_shared = task.settings.reducer.is_shared
        if self._countdown > 0 or (len(parts) < 2 and not self._is_shared):
            return Unmeasured(self._take)
        return MicroGradients(task, parts, parameters, self._take, keep=self._keep, is_first=not self._went_well)

    def _take(self, outcome: Outcome, found: Measurement | None, trouble: str) -> None:
        """Takes what was seen of a logical batch that went through."""
        self._went_well = self._went_well or found is not None
        if outcome.skipped:
            return
        self._countdown = self.every - 1 if found is not None or trouble else max(0, self._countdown - 1)
        self._note_whole(outcome)
        if found is not None:
            self._waiting.append(found)
            if len(self._waiting) >= _MOST_WAITING:
                self._catch_up()
        elif trouble and not self._was_warned:
            self._was_warned = True
            warn(f"NoiseScale left a batch out: {trouble}")

    def _note_whole(self, outcome: Outcome) -> None:
        """Has the next batch split where it is to be measured; tells, once, where that is of no use."""
        is_whole = len(outcome.parts) == 1 and not self._is_shared
        self._whole = self._whole + 1 if is_whole else 0
        self._stays_whole |= is_whole and self._was_asked
        self._was_asked = is_whole and not self._countdown and self._may_split(outcome.parts[0])
        if self._was_asked:
            self._step.split_next(math.ceil(outcome.parts[0].cost / 2))  # type: ignore[union-attr]
        elif self._whole >= self.every and not self._was_warned and not (self._waiting or self._ratio.number):
            self._was_warned = True
            warn(f"NoiseScale measured nothing so far: {_STAYS_WHOLE if self._halves else _WHOLE}")

    def _may_split(self, whole: Part) -> bool:
        """Whether a batch can be run as two halves without another result, as far as that is known."""
        if self._step is None or not self._halves or self._stays_whole or len(whole.samples) < 2:
            return False
        return not any(isinstance(one, _BatchNorm) and one.training for one in self._step.model.modules())

    def _catch_up(self) -> None:
        waiting, self._waiting = self._waiting, []
        for one in waiting:
            self._note(one.estimate(), _Batch(one.items, one.number, one.unit))

    def _note(self, found: Estimate, batch: _Batch) -> None:
        if all(map(math.isfinite, found)):
            self._ratio.add(found)
            self._batches.append(batch)

    def update(self, norms_sq: Any, counts: Any, total_norm_sq: Any) -> None:
        """Adds a measurement from your own loop or from several processes.

        Args:
            norms_sq: the squared norm of the mean gradient of each micro-batch or process.
            counts: the number of samples in each; entries without samples are ignored.
            total_norm_sq: the squared norm of the mean gradient over all samples.

        Raises:
            BatchError: the lengths differ, a value is negative or not finite, or fewer than two entries have samples.
                Nothing was added.
        """
        norms, sizes = _numbers("norms_sq", norms_sq), _numbers("counts", counts)
        (total,) = _numbers("total_norm_sq", [total_norm_sq])
        if len(norms) != len(sizes):
            raise BatchError(f"norms_sq has {len(norms)} numbers and counts {len(sizes)}; expected one of each")
        pairs = [(norm, size) for norm, size in zip(norms, sizes, strict=True) if size > 0]
        if len(pairs) < 2:
            raise BatchError(f"got {len(pairs)} micro-batches with samples; expected at least two")
        self._catch_up()
        norms, sizes = map(list, zip(*pairs, strict=True))
        self._note(estimate(norms, sizes, total), _Batch(sum(sizes), len(sizes), "samples"))

    @property
    def measurements(self) -> int:
        """Number of logical batches measured."""
        self._catch_up()
        return self._ratio.number

    @property
    def value(self) -> float | None:
        """The noise scale; infinite if no signal was found, ``None`` before the first measurement."""
        return self._ratio.value if self.measurements else None

    @property
    def unit(self) -> str:
        """What the noise scale counts: ``"samples"``, or ``"items"`` where ``count`` counts something else."""
        self._catch_up()
        return self._batches[-1].unit if self._batches else "samples"

    @property
    def trace(self) -> float | None:
        """S, the trace of the covariance of the gradient of one sample."""
        return self._ratio.means.trace if self.measurements else None

    @property
    def signal(self) -> float | None:
        """|G|^2, the estimated squared norm of the true gradient; the estimate may be negative if noise dominates."""
        return self._ratio.means.signal if self.measurements else None

    @property
    def interval(self) -> tuple[float, float]:
        """A 90 % confidence interval for the value; the upper end is infinite if the signal may be 0."""
        return self._ratio.interval if self.measurements else (0.0, math.inf)

    @property
    def advice(self) -> str:
        """One sentence on the usual batch size, the median of the last ones measured."""
        value = self.value
        if value is None:
            whole = _STAYS_WHOLE if self._halves else _WHOLE
            return f"no noise scale yet: {whole if self._whole else 'no logical batch was measured'}"
        usual = sorted(self._batches)[(len(self._batches) - 1) // 2] if self._batches else _Batch(1.0, 2, "samples")
        return _advice(value, self.interval, usual)

    def state_dict(self) -> dict[str, Any]:
        """The state as plain numbers; save it beside that of the step."""
        self._catch_up()
        batches = [list(batch) for batch in self._batches]
        return {"version": 2, "countdown": self._countdown, "batches": batches, "moments": self._ratio.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resumes from what ``state_dict`` returned.

        Raises:
            BatchError: the state has another version or is malformed. Nothing was loaded.
        """
        load_whole(self._load_whole, state, self.state_dict(), _State, name="NoiseScale")

    def _load_whole(self, state: Mapping[str, Any]) -> None:
        self._waiting.clear()
        self._countdown = state["countdown"]
        self._batches = deque((_Batch(*one) for one in state["batches"]), _USUAL_OF)
        self._ratio.load_state_dict(state["moments"])

    def __repr__(self) -> str:
        return f"NoiseScale({self.advice})"


def _numbers(name: str, values: Any) -> list[float]:
    found = values.tolist() if isinstance(values, torch.Tensor) else list(values)
    try:
        numbers = [float(value) for value in found]
    except (TypeError, ValueError):
        raise BatchError(f"{name}={values!r}; expected numbers") from None
    if not all(math.isfinite(number) and number >= 0 for number in numbers):
        raise BatchError(f"{name}={numbers}; expected finite numbers of at least 0")
    return numbers


def _advice(value: float, interval: tuple[float, float], batch: _Batch) -> str:
    """The advice in one sentence; updates against samples as in McCandlish et al. 2018, equation 2.11."""
    unit, size = batch.unit, batch.size
    low, high = interval
    if math.isinf(high):
        if low > size:
            return f"noise scale at least {_shown(low)} {unit}: a batch of {_shown(size)} is below it, larger ones pay"
        about = "the signal is lost in the noise" if math.isinf(value) else f"about {_shown(value)} {unit}"
        return f"noise scale not known well enough yet: {about}, in batches of {_shown(size)}"
    text = f"noise scale about {_shown(value)} {unit} [{_shown(low)}, {_shown(high)}]: a batch of {_shown(size)} is"
    smaller = 2.0 ** math.ceil(math.log2(max(value, 1.0)))
    if size >= 2 * smaller and size > high:
        updates = (1 + value / smaller) / (1 + value / size)
        parts = max(1, math.ceil(smaller / (size / batch.micro_batches)))
        return (
            f"{text} past it; {_shown(smaller)} ({parts} instead of {batch.micro_batches} micro-batches) would take "
            f"{updates:.2g} times the updates and {updates * smaller / size:.2g} of the {unit}"
        )
    if size <= value / 2 and size < low:
        fewer = (1 + value / (2 * size)) / (1 + value / size)
        return f"{text} below it; twice as large a batch would take {fewer:.2g} times as many updates"
    return f"{text} about as large: updates and {unit} are both about twice the least"


def _shown(number: float) -> str:
    if math.isinf(number):
        return "infinite"
    if number < 10 or number == round(number):
        return f"{number:.10g}" if number == round(number) else f"{number:.2g}"
    return str(round(number, 1 - math.floor(math.log10(number)))).removesuffix(".0")
