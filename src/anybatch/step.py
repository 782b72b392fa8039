"""TrainStep: one optimizer step for each logical batch, in as many micro-batches as memory needs."""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from anybatch.backpropagation import check_model_was_used, intercept, splittable_of
from anybatch.errors import BatchError
from anybatch.gradient.accumulate import Settings
from anybatch.gradient.losses import LossFunction
from anybatch.gradient.sums import Sums, values_of
from anybatch.gradient.weights import Count, Weights, fetched
from anybatch.records.results import Attempt, StepResult
from anybatch.tensors.batches import Part, Splittable
from anybatch.tensors.counting import count_samples
from anybatch.tensors.modules import modules_behind
from anybatch.tensors.precision import AccumulatePolicy
from anybatch.tensors.randomness import RandomState
from anybatch.update.arguments import (
    check_batch_options,
    check_pass,
    check_recorder,
    check_scaler,
    check_update,
    inputs_of,
    needs_closure,
    optimizers_of,
    schedulers_of,
)
from anybatch.update.batchnorm import BatchNormPolicy
from anybatch.update.boundary import Applied, Boundary
from anybatch.update.passes import Progress, Task, device_of, devices_of, result_of, run_pass
from anybatch.update.transaction import SizeLimit, Snapshot, is_out_of_memory, run_with_retries

logger = logging.getLogger(__name__)

_NOTHING_TO_COUNT = "the count of the whole batch is 0"


class Observer(Protocol):
    """Is told of every logical batch, after its update; recorders and progress bars hang on this.

    Example:
        >>> def observer(step: TrainStep, result: StepResult) -> None:
        ...     history.append((step.updates, result))
        >>> history = []
    """

    def __call__(self, step: "TrainStep", result: StepResult) -> None:
        """Takes the result of a logical batch.

        Args:
            step: the step that ran.
            result: what it gave; reading its numbers waits for the device.
        """


class _Outcome(NamedTuple):
    """What an attempt that went through gave, and the attempts within it that did not."""

    weights: Weights
    sums: Sums
    applied: Applied
    parts: list[Part]
    failed: tuple[Attempt, ...] = ()

    def result(self, failed: tuple[Attempt, ...], rows: int) -> StepResult:
        """The result with the whole trail of attempts."""
        skipped, grad_norm = self.applied
        last = Attempt(
            max(part.cost for part in self.parts),
            len(self.parts),
            0 if skipped else rows,
            "skipped" if skipped else "done",
        )
        return result_of(self.weights, self.sums, self.parts, (*failed, last), skipped=skipped, grad_norm=grad_norm)


class TrainStep:
    """Runs one optimizer step for each logical batch, with the gradient of the whole batch.

    A call zeroes the gradients, goes through the micro-batches, unscales, clips, and steps the optimizers, the scaler
    and the schedulers, each once. When memory runs out the logical batch starts again from where it was, with
    micro-batches of half the size; after a while without trouble the size grows back. An exception in the loss leaves
    weights, random state, buffers, scaler and counters as they were. ``.grad`` stays readable, unscaled and clipped,
    until the next call.

    Args:
        model: the first argument of ``loss_fn``; complete, on its device.
        loss_fn: see ``anybatch.backward``.
        optimizer: one, or a sequence of them; LBFGS is given a closure over the whole logical batch.
        micro_batch_size: samples in a micro-batch at most; with ``cost`` the padded cost of one; ``None`` for all.
        count: what the loss is the mean over, see ``anybatch.backward``.
        broadcast: dotted paths of leaves of the batch that are not split.
        collate: makes a batch of raw samples; the batch is then a list of them.
        cost: the cost of one raw sample, by which they are packed.
        autocast: ``torch.bfloat16`` or ``torch.float16``, the precision of the forward; the latter makes its own
            ``GradScaler`` unless one is given.
        scaler: a ``GradScaler``.
        clip_norm: what the norm of the whole gradient is clipped to; ``float("inf")`` to measure it only.
        scheduler: one or a sequence; each steps once an update, and not when the update was skipped.
        batch_norm: ``"refuse"`` to split BatchNorm in training mode, ``"ghost"`` or ``"frozen"``.
        inputs: the only tensors that get a gradient.
        accumulate: when low-precision gradients are accumulated in float32: ``"auto"``, ``"fp32"`` or ``"native"``.
        recorder: an ``Observer``.

    Attributes:
        updates: how many updates were applied.
        skipped: how many logical batches gave no update.
        samples: how many samples went into applied updates.

    Raises:
        BatchError: an argument is none that can be meant; the text says what to write instead.

    Example:
        >>> import torch.nn.functional as F
        >>> model = torch.nn.Linear(4, 2)
        >>> step = TrainStep(
        ...     model,
        ...     lambda model, batch: F.cross_entropy(model(batch["x"]), batch["y"]),
        ...     torch.optim.SGD(model.parameters(), lr=0.1),
        ...     micro_batch_size=8,
        ...     clip_norm=1.0,
        ... )
        >>> out = step({"x": torch.ones(22, 4), "y": torch.zeros(22, dtype=torch.long)})
        >>> out.micro_batches, out.count, step.updates
        (3, 22, 1)
    """

    def __init__(
        self,
        model: torch.nn.Module,
        loss_fn: LossFunction,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        *,
        micro_batch_size: float | None = None,
        count: Count = count_samples,
        broadcast: Sequence[str] = (),
        collate: Callable[[list[Any]], Any] | None = None,
        cost: Callable[[Any], float] | None = None,
        autocast: torch.dtype | None = None,
        scaler: Any = None,
        clip_norm: float | None = None,
        scheduler: Any = None,
        batch_norm: BatchNormPolicy = "refuse",
        inputs: Iterable[torch.Tensor] | None = None,
        accumulate: AccumulatePolicy = "auto",
        recorder: Observer | None = None,
    ) -> None:
        check_pass(
            model, loss_fn, count, micro_batch_size=micro_batch_size, batch_norm=batch_norm, accumulate=accumulate,
            autocast=autocast, cost=cost,
        )  # fmt: skip
        check_batch_options(broadcast, collate, cost)
        check_scaler(scaler)
        check_recorder(recorder)
        self._optimizers = optimizers_of(optimizer)
        check_update(model, self._optimizers, clip_norm=clip_norm, scaler=scaler, autocast=autocast)
        device = device_of(model)
        if autocast is torch.float16 and scaler is None:
            scaler = torch.amp.GradScaler(device.type)
        self.model, self.loss_fn = model, loss_fn
        self.updates = self.skipped = self.samples = 0
        self._count = count
        self._batch_norm = batch_norm
        self._batch_options = {"broadcast": tuple(broadcast), "collate": collate, "cost": cost}
        self._scaler = scaler
        self._recorder = recorder
        self._inputs = inputs_of(inputs)
        self._settings = Settings(device, autocast, scaler, self._inputs, accumulate)
        self._limit = SizeLimit(micro_batch_size)
        self._evaluation_limit = SizeLimit(micro_batch_size)
        self._takes_closure = any(needs_closure(one) for one in self._optimizers)
        self._prepare_caches()
        self._boundary = Boundary(
            self._optimizers, self._all_parameters, self._names, scaler=scaler, clip_norm=clip_norm,
            schedulers=schedulers_of(scheduler), on_update=self._count_update,
        )  # fmt: skip

    def _prepare_caches(self) -> None:
        self._parameters: list[torch.Tensor] = []
        self._parameter_counts: list[int] = []
        self._rows = 0
        self._devices = devices_of(self.model)
        self._model_was_used = False

    def __call__(self, batch: Any) -> StepResult:
        """Trains on one logical batch.

        Args:
            batch: any nested container of tensors of shape ``[rows, ...]`` and lists of ``rows`` items, a ``Window``,
                or with ``collate`` a list of raw samples.

        Returns:
            What it gave. Nothing waits for the device until its numbers are read.

        Raises:
            BatchError, CountError, LossError, NotSplittable: see ``anybatch.backward``; nothing was changed.
            DoesNotFit: one sample alone runs out of memory; nothing was changed.
            UpdateInterrupted: an optimizer failed within its update, which was not applied again.
        """
        intercept(
            self.model, self.loss_fn, batch, micro_batch_size=self._limit.ceiling, count=self._count,
            batch_norm=self._batch_norm, **self._batch_options,
        )  # fmt: skip
        self._follow_model()
        splittable, before = self._prepared(batch)
        task = Task(self.model, self.loss_fn, self._count, self._settings, self._batch_norm, splittable)
        progress = Progress()
        boundary = self._boundary
        boundary.begin()

        def attempt(parts: list[Part]) -> _Outcome:
            if self._takes_closure:
                return self._run_with_closure(task, progress)
            weights, sums, skipped = self._gradient(task, parts, progress)
            applied = Applied(skipped, None) if skipped else boundary.apply(progress)
            if applied.skipped:  # as if the batch had not been, but for the scale
                before.restore()
            return _Outcome(weights, sums, applied, parts)

        def roll_back() -> None:
            if not boundary.is_committed:
                boundary.roll_back()
                before.restore()

        self._rows = splittable.rows
        outcome, failed = run_with_retries(attempt, splittable, self._limit, roll_back, progress)
        self._limit.settle(splittable.largest)
        result = outcome.result((*failed, *outcome.failed), splittable.rows)
        self.skipped += bool(result.skipped)
        if result.skipped:
            logger.info("update skipped: %s", result.skipped)
        if self._recorder is not None:
            self._recorder(self, result)
        return result

    def _follow_model(self) -> None:
        """Notes where the model lies, which may have been moved."""
        if self._settings.device != device_of(self.model):
            self._settings.device = device_of(self.model)
            self._devices = devices_of(self.model)

    def _prepared(self, batch: Any) -> tuple[Splittable, Snapshot]:
        """Lays the batch out and takes the snapshot; if memory runs out for that, once more after it was cleared."""
        for final in (False, True):
            try:
                return splittable_of(batch, **self._batch_options), Snapshot(
                    modules_behind(self.model, self.loss_fn), self._devices
                )
            except BaseException as error:
                if final or not is_out_of_memory(error):
                    raise
            self._boundary.zero_()
            if torch.cuda.is_initialized():
                torch.cuda.empty_cache()
        raise AssertionError("unreachable")

    def _gradient(self, task: Task, parts: list[Part], progress: Progress) -> tuple[Weights, Sums, str]:
        """Fills ``.grad``; gives the reason if there is nothing to update with."""
        self._boundary.zero_()
        parameters = self._all_parameters()
        weights, sums = run_pass(task, parts, parameters, progress)
        if weights.is_empty or _means_are_empty(sums):
            self._boundary.zero_()
            return weights, sums, _NOTHING_TO_COUNT
        if not self._model_was_used:
            check_model_was_used(self.model, self._inputs, sums)
            self._model_was_used = True
        return weights, sums, ""

    def _run_with_closure(self, task: Task, progress: Progress) -> "_Outcome":
        """Lets the optimizer evaluate the gradient as often as it likes; retries are in the closure."""
        first: list[_Outcome] = []

        def closure() -> float:
            before = Snapshot(modules_behind(self.model, self.loss_fn), self._devices)

            def attempt(parts: list[Part]) -> _Outcome:
                weights, sums, skipped = self._gradient(task, parts, progress)
                grad_norm = None if skipped else self._boundary.prepare(progress)
                return _Outcome(weights, sums, Applied(skipped, grad_norm), parts)

            def roll_back() -> None:
                self._boundary.zero_()
                before.restore()

            outcome, failed = run_with_retries(attempt, task.splittable, self._limit, roll_back, progress)
            if not first:
                first.append(outcome._replace(failed=failed))
            progress.text = "optimizer.step"
            return float(sum(values_of(outcome.sums).values()))

        self._boundary.apply_with_closure(closure, progress, skipped=lambda: first[0].applied.skipped)
        return first[0]

    def evaluate(self, batch: Any) -> StepResult:
        """Computes the loss and the metrics of a logical batch, in evaluation mode and without gradient.

        It has its own micro-batch size: memory that runs out here does not make training smaller.

        Args:
            batch: as for training.

        Returns:
            The loss, the counts and the metrics of the whole batch.

        Raises:
            BatchError, CountError, LossError: see ``anybatch.backward``.
            DoesNotFit: one sample alone runs out of memory.
        """
        splittable = splittable_of(batch, **self._batch_options)
        self._follow_model()
        task = Task(self.model, self.loss_fn, self._count, self._settings, self._batch_norm, splittable)
        progress = Progress()
        was_training = [module for module in self.model.modules() if module.training]
        before = Snapshot(modules_behind(self.model, self.loss_fn), self._devices)

        def attempt(parts: list[Part]) -> tuple[Weights, Sums, list[Part]]:
            return (*run_pass(task, parts, (), progress, differentiate=False), parts)

        self.model.eval()
        try:
            (weights, sums, parts), failed = run_with_retries(
                attempt, splittable, self._evaluation_limit, before.restore, progress
            )
        finally:
            for module in was_training:
                module.training = True
        self._evaluation_limit.settle(splittable.largest)
        return _Outcome(weights, sums, Applied("", None), parts).result(failed, splittable.rows)

    def state_dict(self) -> dict[str, Any]:
        """The state of the scaler and the random generators, the counters and the sizes: tensors and plain values.

        The model, the optimizers, the schedulers and the loader keep their own.
        """
        return {
            "version": 1,
            "counters": {"updates": self.updates, "skipped": self.skipped, "samples": self.samples},
            "limit": self._limit.state_dict(),
            "evaluation_limit": self._evaluation_limit.state_dict(),
            "scaler": None if self._scaler is None else self._scaler.state_dict(),
            "random": RandomState(devices_of(self.model)).state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from a saved state, bitwise.

        Args:
            state: what ``state_dict`` gave.

        Raises:
            BatchError: it is of another version, or was saved with a scaler and there is none, or the reverse.
        """
        version = state.get("version") if isinstance(state, Mapping) else None
        if version != 1:
            raise BatchError(
                f"the state, a {type(state).__name__}, has version {version!r}; expected 1, from TrainStep.state_dict()"
            )
        if (state["scaler"] is None) != (self._scaler is None):
            raise BatchError(
                f"the state was saved {'without' if state['scaler'] is None else 'with'} a GradScaler; build "
                "TrainStep with "
                "the same autocast= and scaler="
            )
        self._limit.load_state_dict(state["limit"])
        self._evaluation_limit.load_state_dict(state["evaluation_limit"])
        counters = state["counters"]
        self.updates, self.skipped, self.samples = counters["updates"], counters["skipped"], counters["samples"]
        if self._scaler is not None and state["scaler"]:
            self._scaler.load_state_dict(state["scaler"])
        RandomState.load_state_dict(state["random"])

    def _count_update(self) -> None:
        self.updates += 1
        self.samples += self._rows

    def _all_parameters(self) -> list[torch.Tensor]:
        """The parameters of the optimizers and the model, or the inputs in its place; anew when a group was added."""
        counts = [len(group["params"]) for one in self._optimizers for group in one.param_groups]
        if counts != self._parameter_counts:
            found = {id(p): p for one in self._optimizers for group in one.param_groups for p in group["params"]}
            found.update((id(p), p) for p in (self.model.parameters() if self._inputs is None else self._inputs))
            self._parameters = list(found.values())
            self._parameter_counts = counts
        return self._parameters

    def _names(self) -> dict[int, str]:
        return {id(p): name for name, p in self.model.named_parameters()}


def _means_are_empty(sums: Sums) -> bool:
    """Whether every loss was a ``Mean``, and all of them were over no items."""
    if not sums.counts or any(name not in sums.counts for name in sums.terms):
        return False
    return all(sum(fetched(counts)) == 0 for counts in sums.counts.values())
