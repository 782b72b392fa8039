"""The gradient of a whole batch, in the caller's own loop or a trainer's."""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from anybatch.batch.batches import Part, Splittable
from anybatch.batch.counting import count_samples
from anybatch.checking.proving import Proofs, proofs_of
from anybatch.engine import Engine
from anybatch.errors import NotSplittable
from anybatch.interception import gradients_aside
from anybatch.loss.accumulate import DropoutPolicy
from anybatch.loss.losses import LossFunction
from anybatch.loss.sums import Sums
from anybatch.loss.weights import Count
from anybatch.options import BatchNormPolicy, Options, Verify, check_hooks, optimizers_of
from anybatch.records.results import StepResult
from anybatch.tensors.graph import OutsideLeaves
from anybatch.tensors.modules import modules_behind, modules_of
from anybatch.tensors.precision import AccumulatePolicy
from anybatch.update.batchnorm import refuse_to_split
from anybatch.update.passes import Outcome, Progress, Task, run_pass
from anybatch.update.refusals import WhySplit, unused
from anybatch.update.stepstate import GradientState, load_whole, part
from anybatch.update.transaction import Retries, Snapshot

if TYPE_CHECKING:
    from anybatch.records.certificates import Proof
    from anybatch.records.plans import Plan


def backward(
    model: torch.nn.Module,
    loss_fn: LossFunction,
    batch: Any,
    *,
    micro_batch_size: float | None = None,
    plan: "Plan | None" = None,
    count: Count = count_samples,
    broadcast: Sequence[str] = (),
    layout: Mapping[str, int | None] | None = None,
    collate: Callable[[list[Any]], Any] | None = None,
    cost: Callable[[Any], float] | None = None,
    autocast: torch.dtype | None = None,
    scaler: Any = None,
    inputs: Iterable[torch.Tensor] | None = None,
    batch_norm: BatchNormPolicy = "refuse",
    accumulate: AccumulatePolicy = "auto",
    dropout: DropoutPolicy = "native",
    group: Any = None,
    verify: Verify = "first",
) -> StepResult:
    """Adds the gradient of the whole batch to ``.grad``, as ``loss_fn(model, batch).backward()`` would.

    The batch is split into micro-batches, each weighted by its share of the count. When memory runs out, the batch is
    rolled back and starts again with micro-batches of half the size. After an exception ``.grad``, the random state and
    the buffers are unchanged.

    Args:
        model: the first argument of ``loss_fn``.
        loss_fn: ``loss_fn(model, batch)`` returns the mean over ``count(batch)`` items; or a ``Mean``, a mapping of
            names to either, a generator of losses, or a pair of the loss and metrics.
        batch: any nested container of tensors of shape ``[rows, ...]`` and lists of ``rows`` items, or a ``Window``;
            with ``collate`` a list of raw samples.
        micro_batch_size: the most samples in a micro-batch; with ``cost`` its padded cost; ``None`` for all samples.
        plan: a plan made with the same model, loss and precision; it sets the size and the memory optimizations.
        count: what the loss is the mean over: a function of a batch, a mapping of loss names to such functions, or
            ``"forward"`` where only the forward knows.
        broadcast: dotted paths of leaves that are not split.
        layout: the sample dimension by dotted path, which may have wildcards, for leaves where another one would be
            inferred, or ``None`` for a leaf that is not split: ``{"x": 1, "state.*": 1, "weights": None}``. ``0`` for a
            list or a tuple means that its items are the samples.
        collate: builds a batch from raw samples.
        cost: the cost of one raw sample, used to pack micro-batches.
        autocast: the dtype of the forward, ``torch.bfloat16`` or ``torch.float16``.
        scaler: a ``GradScaler`` that scales the losses; the caller unscales.
        inputs: the only tensors that get a gradient, as in ``torch.autograd.backward``.
        batch_norm: ``"refuse"`` to split it in training mode, ``"ghost"`` or ``"frozen"``.
        accumulate: when bfloat16 and float16 gradients are accumulated in float32: ``"auto"`` from nine micro-batches
            on, ``"fp32"`` whenever the batch is split, ``"native"`` never.
        dropout: ``"native"`` for torch's masks; ``"per-sample"`` for masks that are a function of the sample and do not
            depend on the split.
        group: the ranks whose batches together are the batch: a ``torch.distributed.ProcessGroup``; ``None`` for the
            group of a DistributedDataParallel, else the default group if there is one; ``False`` for this process
            alone. All ranks call this function; a rank without samples passes a batch with no rows.
        verify: before the first split batch of each layout, a few samples run whole and in two parts: ``"first"``
            refuses a loss whose gradients differ, ``"warn"`` warns, ``"off"`` skips this.

    Returns:
        Loss, counts and metrics of the whole batch. Nothing synchronizes with the device until a value is read.

    Raises:
        BatchError: an argument is invalid, or the batch can't be split.
        CountError: the counts are not finite, are negative or do not add up.
        LossError: the loss function broke its contract.
        NotSplittable: BatchNorm in training mode would be split, or the loss gives another gradient in parts.
        PlanMismatch: the plan was made for something else.
        DoesNotFit: a single sample runs out of memory.

    Example:
        >>> model = torch.nn.Linear(3, 1)
        >>> out = backward(model, lambda model, batch: model(batch).mean(), torch.ones(22, 3), micro_batch_size=8)
        >>> out.micro_batches, [round(value, 5) for value in model.weight.grad[0].tolist()]
        (3, [1.0, 1.0, 1.0])
    """
    options = Options(
        model=model, loss_fn=loss_fn, micro_batch_size=micro_batch_size, plan=plan, count=count, broadcast=broadcast,
        layout=layout, collate=collate, cost=cost, autocast=autocast, scaler=scaler, inputs=inputs,
        batch_norm=batch_norm, accumulate=accumulate, dropout=dropout, group=group, verify=verify,
    )  # fmt: skip
    return Gradient(options, _proofs(options))(batch)


def prove(
    model: torch.nn.Module, loss_fn: LossFunction, batch: Any, *, micro_batch_size: float, **options: Any
) -> "Proof | None":
    """Proves a split as ``backward`` does, without the pass itself; everything is left as before.

    Args:
        options: of ``backward``.

    Returns:
        ``None`` where only the pass itself would show it.

    Raises:
        NotSplittable: in micro-batches the gradient is not the whole batch's.
    """
    own = Options(model=model, loss_fn=loss_fn, micro_batch_size=micro_batch_size, **options | {"verify": "first"})
    return Gradient(own, _proofs(own)).prove(batch)


def _proofs(own: Options) -> Proofs:
    others = own.loss_fn, own.count, own.collate, own.batch_norm, own.dropout, own.autocast
    return proofs_of(own.verify, own.model, *others)


class Gradient(Engine):
    """Adds the gradient of logical batches to ``.grad``; after an exception everything is unchanged."""

    joined = 1
    """Logical batches that a trainer joins to one, of which each call gets one."""

    def __init__(self, options: Options, proofs: Proofs, **more: Any) -> None:
        self._aside: list[tuple[torch.Tensor, torch.Tensor]] = []  # gradients, while a plan is made
        super().__init__(options, proofs, **more)

    def __call__(self, batch: Any) -> StepResult:
        """Adds the gradient of a logical batch to ``.grad``.

        Raises:
            BatchError, CountError, LossError, NotSplittable, DoesNotFit: see ``anybatch.backward``.
        """
        self._intercept(batch)
        try:
            return self._once(batch)
        except NotSplittable as error:
            refusal = error
        return self._run_whole(refusal, lambda: self._once(batch))  # whose own refusal goes on

    def _once(self, batch: Any) -> StepResult:
        """Adds the gradient of a logical batch to ``.grad``, in parts unless the plan is that it runs whole."""
        self._follow_model()
        parameters, reducer, batch_norm = self._parameters(), self._settings.reducer, self._options.batch_norm
        with reducer.call("backward", parameters, adds=True, settings=self._alike):
            splittable = self._splittable(batch)
            task = self._task(splittable)
            self._proofs.is_of_part = is_of_part = self.joined > 1 and splittable.obstacle is None
            if is_of_part and batch_norm == "refuse":
                refuse_to_split(task.modules, self.joined, partial(WhySplit, verb="backward", batches=self.joined))
            with self._planned(splittable):
                result = self._run(task, parameters)
        self._limit.resolve(splittable.largest)
        result.plan = None if self._follower is None else self._follower.plan
        return result

    def prove(self, batch: Any) -> "Proof | None":
        """Proves the split of a logical batch; see the function of this name."""
        splittable, parameters = self._splittable(batch), self._parameters()
        with gradients_aside():
            before = Before(self.model, self.loss_fn, parameters)
            try:
                parts, task = splittable.plan(self._limit.value), self._task(splittable)
                self._proofs.look(task, parts, parameters, contextlib.nullcontext, before.snapshot)
            finally:
                before.restore()
        return self._proofs.latest

    def _run(self, task: Task, parameters: Sequence[torch.Tensor]) -> StepResult:
        check_hooks(parameters)
        progress, reducer, splittable = Progress(), task.settings.reducer, task.splittable
        with gradients_aside():
            before = Before(task.model, task.loss_fn, parameters)
            retries = Retries(splittable, self._limit, before.restore, progress, reducer)
            while not retries.is_done:
                with retries as parts:
                    kept, replay = self._proofs.look(task, parts, parameters, self._optimizations, before.snapshot)
                    outcome = self._attempt(kept, parts, parameters, progress, before)
                    self._proofs.conclude(task, replay, outcome.sums)
            before.commit_()
        result = outcome.result(retries.failed, splittable.rows, counts_anyway=True)
        result.proof, result.layout = self._proofs.latest, splittable.outline()
        return result

    def _attempt(
        self, task: Task, parts: list[Part], parameters: Sequence[torch.Tensor], progress: Progress, before: "Before"
    ) -> Outcome:
        only = task.settings.inputs
        outside = before.take_off()  # a failed attempt must not leave anything in the gradients that were there
        with self._optimizations():
            weights, sums = run_pass(task, parts, parameters, progress, outside=outside if only is None else None)
        task.settings.reducer.reduce_(sums, parameters, outside if only is None else None)
        check_model_was_used(task.model, only, sums)
        before.sum_()
        return Outcome(weights, sums, parts, "the count of the whole batch is 0" if weights.is_empty else "")

    def _parameters(self) -> list[torch.Tensor]:
        inputs = self._options.inputs
        return parameters_of(self.model, self.loss_fn) if inputs is None else list(inputs)

    @contextlib.contextmanager
    def _planned(self, splittable: Splittable) -> Iterator[None]:
        """A context that applies the plan for this batch, made without the gradients that were there, which stay."""
        with contextlib.ExitStack() as stack:
            try:
                stack.enter_context(super()._planned(splittable))
            finally:
                while self._aside:
                    parameter, gradient = self._aside.pop()
                    parameter.grad = gradient
            yield

    def _clear(self) -> None:
        for parameter in self._parameters():
            if parameter.grad is not None:
                self._aside.append((parameter, parameter.grad))
                parameter.grad = None

    def _alike(self) -> dict[str, str]:
        """Settings that have to be equal on all ranks."""
        from anybatch.update.boundary import settings_of

        return settings_of(self._beside.get("optimizers", ()), (), self._beside.get("clip_norm"))


class RepeatedBackward(Gradient):
    """Adds the gradient of each logical batch to ``.grad``, and keeps micro-batch sizes and plans between batches.

    It is for trainers, which own the update. Arguments that are not described here are those of ``anybatch.backward``
    and ``anybatch.TrainStep``.

    Args:
        optimizers: whose state the plan includes.
        clip_norm: what the trainer clips the gradient norm to, whose memory a plan includes; ``None`` for no clipping.
        scaler: scales the losses; the trainer unscales.

    Example:
        >>> model = torch.nn.Linear(3, 1)
        >>> gradient = RepeatedBackward(model, lambda model, batch: model(batch).mean(), micro_batch_size=8)
        >>> [gradient(torch.ones(rows, 3)).micro_batches for rows in (22, 8)]
        [3, 1]
    """

    _verb = None  # whose name a trainer's user does not know

    def __init__(
        self,
        model: torch.nn.Module,
        loss_fn: LossFunction,
        optimizers: Sequence[torch.optim.Optimizer] = (),
        *,
        clip_norm: float | None = None,
        verify: Verify = "first",
        **options: Any,
    ) -> None:
        own = Options(model=model, loss_fn=loss_fn, verify=verify, **options)
        optimizers = optimizers_of(optimizers) if optimizers else []
        super().__init__(own, Proofs(verify), optimizers=optimizers, clip_norm=clip_norm)

    def __call__(self, batch: Any) -> StepResult:
        """Adds the gradient of a logical batch; of one that counts nothing a gradient of zeros, under a scaler."""
        result, scaler = super().__call__(batch), self._settings.scaler
        if result.skipped and scaler is not None:
            scaler.scale(torch.zeros((), device=self._settings.device))  # a scaler that never scaled can't step
            parameters = self._parameters()
            if all(parameter.grad is None for parameter in parameters):  # nor one that finds no gradient
                for parameter in parameters:
                    parameter.grad = torch.zeros_like(parameter)
        return result

    def state_dict(self) -> dict[str, Any]:
        """The sizes and the plan, as plain values; a run resumed from them is bitwise the same."""
        plan = None if self._follower is None else self._follower.plan_state()
        return {"limit": self._limit.state_dict(), "plan": plan}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resumes from what ``state_dict`` returned.

        Raises:
            BatchError: the state is malformed; nothing was loaded.
        """
        load_whole(self._load_whole, state, self.state_dict(), GradientState, name=type(self).__name__)

    def _load_whole(self, state: Mapping[str, Any]) -> None:
        with part("plan"):
            if self._follower is not None and state["plan"] is not None:
                self._follower.load_plan_state(state["plan"])
        if (self._follower is None) == (state["plan"] is None):  # a size from a plan says nothing without one
            self._limit.load_state_dict(state["limit"])


def check_model_was_used(model: torch.nn.Module, inputs: Sequence[torch.Tensor] | None, sums: Sums) -> None:
    """Refuses a loss that gave no gradient to any trainable parameter of the model, or to any of the inputs."""
    if not sums.has_gradient:
        return
    wanted = 0
    for parameter in _trained(model) if inputs is None else inputs:
        if parameter.grad is not None:
            return
        wanted += 1
    if wanted:
        raise unused(model, wanted, are_inputs=inputs is not None)


def _trained(*owners: torch.nn.Module) -> Iterator[torch.Tensor]:
    for module in modules_of(*owners):
        for parameter in module._parameters.values():
            if parameter is not None and parameter.requires_grad:
                yield parameter


def parameters_of(model: Any, loss_fn: Any) -> list[torch.Tensor]:
    """Trainable parameters of the model, and of the loss if it is a module, each once."""
    return list({id(parameter): parameter for parameter in _trained(*modules_behind(model, loss_fn))}.values())


class Before:
    """``.grad``, buffers and random state before a backward."""

    def __init__(self, model: torch.nn.Module, loss_fn: Any, parameters: Sequence[torch.Tensor]) -> None:
        self._gradients = [(parameter, parameter.grad) for parameter in parameters]
        self._outside = OutsideLeaves(parameters)
        self.snapshot = Snapshot(modules_behind(model, loss_fn), None, loss_fn)

    def take_off(self) -> OutsideLeaves:
        """Sets ``.grad`` to ``None``, so that new gradients stay apart; returns what finds further leaves."""
        for parameter, _ in self._gradients:
            parameter.grad = None
        self._outside = OutsideLeaves(parameter for parameter, _ in self._gradients)
        return self._outside

    def restore(self) -> None:
        """Restores gradients, buffers and random state."""
        for parameter, gradient in self._all:
            parameter.grad = gradient
        self.snapshot.restore()

    @property
    def _all(self) -> list[tuple[torch.Tensor, torch.Tensor | None]]:
        return [*self._gradients, *self._outside.found]

    def sum_(self) -> None:
        """Adds the saved gradients to the new ones; the saved tensors do not change."""
        for parameter, gradient in self._all:
            new = parameter.grad
            if gradient is None or new is None:
                continue
            if new.layout == gradient.layout:
                new.add_(gradient)
            else:  # torch adds a sparse tensor to a dense one only with the dense one first
                parameter.grad = gradient + new if gradient.layout is torch.strided else new + gradient

    def commit_(self) -> None:
        """Writes the sums into the tensors that held the gradients before, as autograd does."""
        for parameter, gradient in self._all:
            if gradient is None:
                continue
            if parameter.grad is not None:
                if parameter.grad.layout != gradient.layout:  # autograd too makes a new tensor here
                    continue
                _copy_(gradient, parameter.grad)
            parameter.grad = gradient


def _copy_(target: torch.Tensor, source: torch.Tensor) -> None:
    try:
        target.copy_(source)
    except torch.OutOfMemoryError:  # a copy allocates nothing, so it works again; stopping would leave half the sums
        target.copy_(source)
