"""TrainStep: one optimizer step for each logical batch, in as many micro-batches as memory needs."""

import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from threading import get_ident
from typing import Any

import torch

from anybatch.backpropagation import check_model_was_used, intercept, splittable_of
from anybatch.checking.proving import Proofs, Verify
from anybatch.errors import BatchError
from anybatch.gradient.accumulate import DropoutPolicy, Settings
from anybatch.gradient.losses import LossFunction
from anybatch.gradient.sequence import OverTime
from anybatch.gradient.sums import Sums
from anybatch.gradient.weights import Count, Weights
from anybatch.observing import Observer
from anybatch.parallel.devices import devices_of_argument
from anybatch.parallel.ranks import reducer_for
from anybatch.planning.devices import check_plan, precision_of
from anybatch.planning.following import limit_by_plan
from anybatch.planning.observing import AnyFollower, follower_for
from anybatch.planning.subjects import Subject
from anybatch.records.layouts import BatchLayout
from anybatch.records.plans import Plan
from anybatch.records.results import StepResult
from anybatch.tensors.batches import Part, Splittable
from anybatch.tensors.counting import count_samples
from anybatch.tensors.modules import modules_behind, modules_of
from anybatch.tensors.precision import AccumulatePolicy
from anybatch.tensors.randomness import RandomState
from anybatch.tensors.sideeffects import SideEffects
from anybatch.update.arguments import (
    check_batch_options,
    check_blocks,
    check_devices,
    check_hooks,
    check_pass,
    check_steps_on_inputs,
    check_uncut,
    check_update,
    inputs_of,
    optimizers_of,
    schedulers_of,
    warn_of_replicas,
)
from anybatch.update.batchnorm import BatchNormPolicy
from anybatch.update.boundary import Applied, Boundary
from anybatch.update.execution import Execution, Outcome
from anybatch.update.passes import Progress, Task, device_of, devices_of, run_pass
from anybatch.update.stepstate import StepState, check_scaled, load_whole, part
from anybatch.update.trained import Trained
from anybatch.update.transaction import SizeLimit, Snapshot, is_out_of_memory, run_with_retries
from anybatch.update.weakmethods import weak_method

logger = logging.getLogger(__name__)


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
        optimizer: one, or a sequence of them; LBFGS and SAM are given a closure over the whole logical batch.
        memory: the budget that the step stays under: bytes, ``"8GiB"``, ``"free"`` for what is free on the device, or a
            share of it such as 0.5; with ``devices`` of each. The first batch is planned for; ``None`` plans nothing.
        micro_batch_size: samples in a micro-batch at most; with ``cost`` the padded cost of one; ``None`` for all.
        plan: a plan that was made before; with ``memory`` it is made again when it has to be.
        count: what the loss is the mean over, see ``anybatch.backward``.
        broadcast: dotted paths of leaves of the batch that are not split.
        layout: by dotted path the dimension of the samples, or ``None`` for what is not split, see
            ``anybatch.backward``.
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
        recorder: an ``Observer``; a ``Doctor`` attaches itself.
        blocks: names of modules that a plan may recompute, besides the children of lists and sequences.
        dropout: ``"native"``, or ``"per-sample"`` for masks that do not depend on the split.
        group: the ranks whose batches together are the logical batch, see ``anybatch.backward``; ``False`` for none.
        devices: that share the micro-batches in this process, such as ``["cuda:0", "cuda:1"]``, or a mapping of them to
            their speeds; the model lies on one of them.
        closure: whether ``optimizer.step`` is given a closure that takes the gradient of the whole batch again;
            ``None``: where it needs one, and where an optimizer from outside of torch takes one.
        verify: before the first batch of its layout that is split, some samples are run whole and in two parts:
            ``"first"`` refuses a loss that may not be split, ``"warn"`` warns of it, ``"off"`` runs nothing.

    Attributes:
        updates: how many updates were applied.
        skipped: how many logical batches gave no update.
        samples: how many samples went into applied updates.
        layout: where the samples of the last batch were found to lie, leaf by leaf; ``print`` shows it.

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
        memory: int | float | str | None = None,
        micro_batch_size: float | None = None,
        plan: Plan | None = None,
        count: Count = count_samples,
        broadcast: Sequence[str] = (),
        layout: Mapping[str, int | None] | None = None,
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
        blocks: Sequence[str] = (),
        dropout: DropoutPolicy = "native",
        group: Any = None,
        devices: Sequence[Any] | Mapping[Any, float] | None = None,
        closure: bool | None = None,
        verify: Verify = "first",
    ) -> None:
        check_pass(
            model, loss_fn, count, micro_batch_size=micro_batch_size, batch_norm=batch_norm, accumulate=accumulate,
            autocast=autocast, cost=cost, dropout=dropout,
        )  # fmt: skip
        self._batch_options = check_batch_options(broadcast, collate, cost, layout)
        check_plan(memory, plan, micro_batch_size)
        autocast = autocast or precision_of(plan)
        self._optimizers = optimizers_of(optimizer)
        check_update(model, self._optimizers, clip_norm=clip_norm, scaler=scaler, autocast=autocast, recorder=recorder)
        self.model, self.loss_fn, device = model, loss_fn, device_of(model)
        if autocast is torch.float16 and scaler is None:
            scaler = torch.amp.GradScaler(device.type)
        self._count, self._batch_norm, self._recorder, self._inputs = count, batch_norm, recorder, inputs_of(inputs)
        self._settings = Settings(device, autocast, scaler, self._inputs, accumulate, dropout=dropout)
        self._scaler, self._clip_norm, self._memory = scaler, clip_norm, memory
        self._group, self._blocks = group, check_blocks(model, blocks)
        self._follower = follower_for(model, weak_method(self._subject), memory=memory, plan=plan)
        self._limit = SizeLimit(micro_batch_size) if self._follower is None else self._follower.limit
        self._lanes = devices_of_argument(devices, model, loss_fn)
        self._prepare(schedulers_of(scheduler, self._optimizers), closure, Proofs(verify))

    def _prepare(self, schedulers: list[Any], closure: bool | None, proofs: Proofs) -> None:
        self._proofs = proofs
        self._evaluation_limit = SizeLimit(self._limit.ceiling if self._follower is None else None)
        if self._lanes is None:
            warn_of_replicas(self.model)
        self._follow_model()
        check_steps_on_inputs(self._optimizers, self._inputs)
        self._trained = Trained(self.model, self._optimizers, self._inputs)
        self._rows, self._devices = 0, devices_of(self.model)
        self._generators: tuple[int, list[Any]] = 0, []
        self.updates = self.skipped = self.samples = 0
        self.layout: BatchLayout | None = None
        self._boundary = Boundary(
            self._optimizers, self._trained.parameters, self._trained.names, scaler=self._scaler,
            clip_norm=self._clip_norm, schedulers=schedulers, closure=closure,
            on_update=weak_method(self._count_update),
        )  # fmt: skip
        self._execution = Execution(
            self._boundary, self._trained.parameters, weak_method(self._levers),
            partial(check_model_was_used, self.model, self._inputs), self._limit, weak_method(self._snapshot),
        )  # fmt: skip
        follow = getattr(self._recorder, "follow", None)
        if follow is not None:  # a doctor attaches itself
            follow(self.model, *self._optimizers)

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

        An error that comes after the update, of a scheduler or the recorder, has the note "the update was applied
        (updates=n)"; the batch given again would count twice.
        """
        intercept(
            self.model, self.loss_fn, batch, micro_batch_size=self._limit.ceiling, count=self._count,
            batch_norm=self._batch_norm, optimizer=self._optimizers, clip_norm=self._clip_norm,
            autocast=self._settings.autocast, inputs=self._inputs, accumulate=self._settings.policy,
            memory=self._memory, blocks=self._blocks, dropout=self._settings.dropout, **self._batch_options,
        )  # fmt: skip
        with self._alone():
            before = self.updates
            try:
                result = self._train(batch)
                self.skipped += bool(result.skipped)
                if result.skipped:
                    logger.info("update skipped: %s", result.skipped)
                if self._recorder is not None:
                    self._recorder(self, result)
            except BaseException as error:
                if self.updates > before:  # the scheduler or the recorder, or Ctrl-C that waited for the update
                    error.add_note(
                        f"the update was applied (updates={self.updates}): go on with the next batch, since this one "
                        "given again would count twice"
                    )
                raise
        return result

    @contextlib.contextmanager
    def _alone(self, *, may_be_within: bool = False) -> Iterator[None]:
        """Refuses a second call while one runs, which would take the gradients of the first for its own."""
        mine = get_ident(), object()
        holder = self.__dict__.setdefault("_call", mine)  # of several threads one is the first
        if holder is mine:
            try:
                yield
            finally:
                del self.__dict__["_call"]
        elif may_be_within and holder[0] == mine[0]:
            yield
        elif holder[0] == mine[0]:
            raise BatchError(
                "this TrainStep was called from within its own call (by the loss, a hook or the recorder); expected "
                "one logical batch after the other. Nothing was changed by the inner call"
            )
        else:
            raise BatchError(
                "this TrainStep runs in another thread right now; expected one call at a time, since gradients, "
                "buffers and counters are those of one logical batch. Nothing was changed by this call. Give each "
                "thread a model and a TrainStep of its own, or hold a lock around the call"
            )

    def __copy__(self) -> "TrainStep":
        raise TypeError(
            "a shallow copy of a TrainStep would share its model and count elsewhere; use copy.deepcopy(step), or "
            "build another TrainStep"
        )

    def _train(self, batch: Any) -> StepResult:
        self._follow_model()
        parameters = self._trained.parameters()
        check_hooks(parameters)
        with self._settings.reducer.call(
            "TrainStep", parameters, updates=self.updates, settings=self._boundary.settings
        ):
            splittable, before = self._prepared(batch)
            self.layout = splittable.outline()
            if self._follower is None:
                return self._run(splittable, before)
            return self._run_planned(self._follower, splittable, before)

    def _run(self, splittable: Splittable, before: Snapshot) -> StepResult:
        task, progress, boundary, reducer = self._task(splittable), Progress(), self._boundary, self._settings.reducer
        boundary.begin()

        def attempt(parts: list[Part]) -> Outcome:
            self._prove(task, parts)
            return self._execution.attempt(task, parts, progress, before)

        def roll_back() -> None:
            if not boundary.is_committed:
                boundary.roll_back()
                before.restore()

        self._rows = splittable.rows
        outcome, failed = run_with_retries(
            attempt, splittable, self._limit, roll_back, progress, reducer, before.note_weights
        )
        self._limit.settle(splittable.largest)
        result = outcome.result(failed, splittable.rows)
        result.proof, result.layout = self._proofs.latest, self.layout
        return result

    def _prove(self, task: Task, parts: list[Part]) -> None:
        parameters, clear = self._trained.parameters(), self._boundary.zero_
        self._proofs.look(task, parts, parameters, self._levers, clear=clear, update=self.updates)

    def _run_planned(self, follower: AnyFollower, splittable: Splittable, before: Snapshot) -> StepResult:
        try:
            follower.prepare(splittable, self._boundary.zero_)
            with follower.confirmed(self._settings.device, self._lanes):
                result = self._run(splittable, before)
            result.plan = follower.plan
            return result
        finally:
            follower.release()

    def _task(self, splittable: Splittable) -> Task:
        return Task(
            self.model, self.loss_fn, self._count, self._settings, self._batch_norm, splittable, self._limit.ceiling,
            "TrainStep", is_planned=self._follower is not None, devices=self._lanes,
            levers=None if self._lanes is None or self._follower is None else self._follower.applied,
        )  # fmt: skip

    def _subject(self, splittable: Splittable) -> Subject:
        """What a plan is made for."""
        return Subject(
            self.model, self.loss_fn, self._settings, splittable, self._optimizers, self._batch_norm, self._clip_norm,
            self._blocks, self._settings.device.type, is_present=True,
            count=self._count, devices=self._lanes,
        )  # fmt: skip

    def _levers(self) -> AbstractContextManager[None]:
        if self._follower is None or self._lanes is not None:  # a pass over several devices has levers on each
            return contextlib.nullcontext()
        return self._follower.applied(self.model)

    def _snapshot(self) -> Snapshot:
        modules = modules_behind(self.model, self.loss_fn)
        if self._generators[0] != id(self):  # looked for once, and again in a copy of this step
            self._generators = id(self), SideEffects([*modules, self.loss_fn], tensors=False).accessors()
        return Snapshot(modules, self._devices, self.loss_fn, self._generators[1])

    def _follow_model(self) -> None:
        """Notes where the model lies, which may have been moved, and with whom it is trained."""
        settings, device = self._settings, device_of(self.model)
        if settings.device != device:
            settings.device, self._devices = device, devices_of(self.model)
        settings.reducer = reducer_for(self.model, self._group, settings.device, settings.reducer)
        if self._lanes is not None:
            check_devices([lane.device for lane in self._lanes.lanes], self._follower, settings.reducer, self._group)
            self._lanes.check(self.model, self.loss_fn)

    def _splittable(self, batch: Any) -> Splittable:
        found = splittable_of(batch, **self._batch_options, may_be_empty=self._settings.reducer.is_shared)
        is_planned = self._follower is not None
        size = None if is_planned else self._limit.ceiling
        check_uncut(found, size, self._settings.dropout, self.loss_fn, is_planned=is_planned)
        found.most = None if self._lanes is None else self._lanes.most(found)
        return found

    def _prepared(self, batch: Any) -> tuple[Splittable, Snapshot]:
        """Lays the batch out and takes the snapshot; if memory runs out for that, once more after it was cleared."""
        for final in (False, True):
            try:
                return self._splittable(batch), self._snapshot()
            except BaseException as error:
                if final or not is_out_of_memory(error):
                    raise
            self._boundary.zero_()
            if torch.cuda.is_initialized():
                torch.cuda.empty_cache()
        raise AssertionError("unreachable")

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
        with self._alone(may_be_within=True):
            self._follow_model()
            with self._settings.reducer.call("evaluate", self._trained.parameters(), updates=self.updates):
                return self._evaluated(self._splittable(batch))

    def _evaluated(self, splittable: Splittable) -> StepResult:
        reducer = self._settings.reducer
        task = self._task(splittable)
        progress = Progress()
        modules = modules_of(*modules_behind(self.model, self.loss_fn))
        was_training = [module for module in modules if module.training]
        before = self._snapshot()
        limit_by_plan(self._follower, splittable, self._evaluation_limit)

        def attempt(parts: list[Part]) -> tuple[Weights, Sums, list[Part]]:
            with self._levers():
                weights, sums = run_pass(task, parts, (), progress, differentiate=False)
                reducer.reduce_(sums, ())
                return weights, sums, parts

        self.model.eval()
        for module in was_training:
            module.training = False
        try:
            (weights, sums, parts), failed = run_with_retries(
                attempt, splittable, self._evaluation_limit, before.restore, progress, reducer
            )
        finally:
            for module in was_training:
                module.training = True
        self._evaluation_limit.settle(splittable.largest)
        return Outcome(weights, sums, Applied("", None), parts).result(failed, splittable.rows)

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
            "plan": None if self._follower is None else self._follower.state_dict(),
            "loss": self.loss_fn.state_dict() if isinstance(self.loss_fn, OverTime) else None,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from a saved state, bitwise.

        Args:
            state: what ``state_dict`` gave.

        Raises:
            BatchError: it is of another version, a part of it is not what was saved, or it was saved with a scaler and
                there is none, or the reverse. Nothing was loaded then.
        """
        check_scaled(state, has_scaler=self._scaler is not None)
        load_whole(self._load_whole, state, self.state_dict(), StepState, name="TrainStep")

    def _load_whole(self, state: Mapping[str, Any]) -> None:
        with part("plan"):
            if self._follower is not None and state.get("plan") is not None:
                self._follower.load_state_dict(state["plan"])
        self._limit.load_state_dict(state["limit"])
        self._evaluation_limit.load_state_dict(state["evaluation_limit"])
        counters = state["counters"]
        self.updates, self.skipped, self.samples = counters["updates"], counters["skipped"], counters["samples"]
        with part("scaler"):
            if self._scaler is not None and state["scaler"]:
                self._scaler.load_state_dict(state["scaler"])
        with part("loss"):
            if isinstance(self.loss_fn, OverTime) and state.get("loss") is not None:
                self.loss_fn.load_state_dict(state["loss"])
        with part("random"):
            RandomState.load_state_dict(state["random"])

    def __repr__(self) -> str:
        proof = self._proofs.latest
        what = f"TrainStep({type(self.model).__name__}, micro_batch_size={self._limit.value}, updates={self.updates})"
        return what if proof is None else f"{what}\n  {proof}"

    def _count_update(self) -> None:
        self.updates += 1
        self.samples += self._settings.reducer.rows(self._rows)
