"""TrainStep: one optimizer step for each logical batch, in as many micro-batches as memory needs."""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from threading import get_ident
from typing import TYPE_CHECKING, Any, Protocol

import torch

from anybatch.accelerators import release_cache
from anybatch.backpropagation import check_model_was_used
from anybatch.batch.batches import Part, Splittable
from anybatch.batch.counting import count_samples
from anybatch.checking.proving import Proofs
from anybatch.engine import Engine, Owner, weak_method
from anybatch.errors import BatchError, NotSplittable
from anybatch.interception import gradients_aside
from anybatch.loss.accumulate import DropoutPolicy
from anybatch.loss.losses import LossFunction, as_over_time
from anybatch.loss.sums import Sums, total_of
from anybatch.loss.weights import Count, Weights
from anybatch.options import (
    BatchNormPolicy,
    Options,
    Verify,
    check_hooks,
    check_steps_on_inputs,
    optimizers_of,
    warn_of_replicas,
)
from anybatch.records.layouts import BatchLayout
from anybatch.records.results import StepResult
from anybatch.records.tunings import BatchAdvice
from anybatch.tensors.modules import devices_of, modules_behind
from anybatch.tensors.precision import AccumulatePolicy
from anybatch.tensors.randomness import RandomState
from anybatch.update.boundary import Boundary
from anybatch.update.closures import Again
from anybatch.update.passes import NOBODY, Outcome, Progress, Task, Watch, run_pass
from anybatch.update.stepstate import StepState, check_scaled, load_whole, part
from anybatch.update.transaction import Retries, SizeLimit, Snapshot, is_out_of_memory

if TYPE_CHECKING:
    from anybatch.parallel.devices import Devices
    from anybatch.planning.observing import AnyFollower
    from anybatch.records.plans import Plan

logger = logging.getLogger(__name__)


class Observer(Protocol):
    """A function that a step calls after each logical batch, for recorders and progress bars.

    Example:
        >>> def observer(step: TrainStep, result: StepResult) -> None:
        ...     history.append((step.updates, result))
        >>> history = []
    """

    def __call__(self, step: "TrainStep", result: StepResult) -> None:
        """Receives the step and the result of its latest logical batch."""


class TrainStep(Engine):
    """Runs one optimizer step per logical batch, with the gradient of the whole batch.

    A call zeroes the gradients, runs the micro-batches, unscales, clips, and steps the optimizers, the scaler and the
    schedulers once each. When memory runs out, the logical batch is rolled back and starts again with micro-batches of
    half the size; after a while without trouble the size grows back. After an exception in the loss, weights, random
    state, buffers, scaler and counters are unchanged. ``.grad`` stays readable, unscaled and clipped, until the next
    call.

    Args:
        model: the first argument of ``loss_fn``; complete, on its device.
        loss_fn: see ``anybatch.backward``.
        optimizer: one optimizer or a sequence; LBFGS and SAM get a closure over the whole logical batch.
        memory: the budget for peak memory: bytes, ``"8GiB"``, ``"free"`` for the free memory of the device, or a
            fraction of its memory such as 0.5 or ``"50%"``; with ``devices``, of each device. The step makes a plan on
            the first batch; ``None`` makes no plan.
        micro_batch_size: the most samples in a micro-batch; with ``cost`` its padded cost; ``None`` for all samples.
        plan: a plan made before; with ``memory`` a new one is made when it no longer matches.
        count: what the loss is the mean over, see ``anybatch.backward``.
        broadcast: dotted paths of leaves of the batch that are not split.
        layout: the sample dimension by dotted path, ``None`` for a leaf that is not split; see ``anybatch.backward``.
        collate: builds a batch from raw samples; the argument of a call is then a list of raw samples.
        cost: the cost of one raw sample, used to pack micro-batches.
        autocast: ``torch.bfloat16`` or ``torch.float16``, the precision of the forward; float16 creates a
            ``GradScaler`` unless one is given.
        scaler: a ``GradScaler``.
        clip_norm: the maximum norm of the whole gradient of what the optimizers have, or of ``inputs`` where these are
            given, too; ``float("inf")`` only measures the norm.
        scheduler: one scheduler or a sequence; each steps once per update, and not when the update is skipped.
        batch_norm: ``"refuse"`` to split BatchNorm in training mode, ``"ghost"`` or ``"frozen"``.
        inputs: the only tensors that get a gradient.
        accumulate: when low-precision gradients are accumulated in float32: ``"auto"``, ``"fp32"`` or ``"native"``.
        recorder: an ``Observer``; a ``Doctor`` attaches itself to the model and the optimizers.
        blocks: names of modules that a plan may checkpoint, besides the children of ``ModuleList`` and ``Sequential``.
        dropout: ``"native"``, or ``"per-sample"`` for masks that do not depend on the split.
        group: the ranks whose batches together are the logical batch, see ``anybatch.backward``; ``False`` for none.
        devices: devices of this process that share the micro-batches, such as ``["cuda:0", "cuda:1"]``, or a mapping
            from device to relative speed; the model is on one of them.
        closure: whether ``optimizer.step`` gets a closure that recomputes the gradient of the whole batch; ``None``:
            where it needs one, and for optimizers from outside of torch that accept one.
        verify: before the first split batch of each layout, a few samples run whole and in two parts: ``"first"``
            refuses a loss whose gradients differ, ``"warn"`` warns, ``"off"`` skips this.

    Attributes:
        updates: number of updates applied.
        skipped: number of logical batches without an update.
        samples: number of samples in applied updates.
        watcher: called at the start of each attempt at a logical batch; returns an ``anybatch.update.passes.Watch``,
            which is notified of each micro-batch. ``None`` for none; ``NoiseScale`` sets it.
        layout: the sample dimension found in each leaf of the last batch; ``print`` shows it.

    Raises:
        BatchError, CountError, LossError: an argument is invalid; the message says what to write instead.

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

    _verb = "TrainStep"

    def __init__(
        self,
        model: torch.nn.Module,
        loss_fn: LossFunction,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        *,
        memory: int | float | str | None = None,
        micro_batch_size: float | None = None,
        plan: "Plan | None" = None,
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
        options = Options(
            model=model, loss_fn=loss_fn, micro_batch_size=micro_batch_size, memory=memory, plan=plan, count=count,
            broadcast=broadcast, layout=layout, collate=collate, cost=cost, autocast=autocast, scaler=scaler,
            inputs=inputs, batch_norm=batch_norm, accumulate=accumulate, dropout=dropout, group=group, verify=verify,
            optimizer=optimizers_of(optimizer), clip_norm=clip_norm, scheduler=scheduler, recorder=recorder,
            blocks=blocks,
        )  # fmt: skip
        several = _read_devices(devices, model, loss_fn)
        super().__init__(options, Proofs(verify), devices=several, makes_scaler=True)
        self._optimizers = options.optimizer
        self._evaluation_limit = SizeLimit(self._limit.ceiling if self._follower is None else None)
        self._follow_model()
        check_steps_on_inputs(self._optimizers, options.inputs)
        self._boundary = Boundary(
            model, self._optimizers, scaler=self._settings.scaler, clip_norm=clip_norm, schedulers=options.scheduler,
            closure=closure,
        )  # fmt: skip
        self._prepare()

    def _prepare(self) -> None:
        """Sets what is empty or zero before the first logical batch."""
        self._self = Owner(self)  # refuses to be pickled, and can be copied
        follow = getattr(self._options.recorder, "follow", None)
        if follow is not None:  # a doctor attaches itself
            follow(self.model, *self._optimizers)
        self._known: tuple[list[int], list[torch.Tensor], list[torch.Tensor]] = [], [], []
        self._devices = devices_of(self.model)
        self._generators: tuple[int, list[Any]] = 0, []
        self._rows, self._was_used = 0, False
        self.watcher: Callable[[Task, Sequence[Part], Sequence[torch.Tensor]], Watch] | None = None
        self.updates = self.skipped = self.samples = 0
        self.layout: BatchLayout | None = None

    def _following(self) -> "AnyFollower":
        from anybatch.planning.observing import follower_for

        options = self._options
        return follower_for(self.model, weak_method(self._subject), memory=options.memory, plan=options.plan)

    def __call__(self, batch: Any) -> StepResult:
        """Trains on one logical batch.

        Args:
            batch: any nested container of tensors of shape ``[rows, ...]`` and lists of ``rows`` items, a ``Window``,
                or with ``collate`` a list of raw samples.

        Returns:
            Loss, counts, metrics and gradient norm of the whole batch. Nothing synchronizes with the device until a
            value is read.

        Raises:
            BatchError, CountError, LossError, NotSplittable, PlanMismatch: see ``anybatch.backward``; nothing was
                changed. With ``memory=`` a batch that can't be split runs whole, with a warning, if that fits.
            DoesNotFit: no plan fits in the budget, or a single sample runs out of memory; nothing was changed.
            UpdateInterrupted: an optimizer failed in the middle of its step, which was not run again.

        An exception after the update, from a scheduler or the recorder, has the note "the update was applied
        (updates=n)": passing the same batch again would count it twice.
        """
        self._intercept(batch)
        self._claim()
        before, refusal = self.updates, None
        try:
            try:
                result = self._train(batch)
            except NotSplittable as error:
                refusal = error
            if refusal is not None:  # not within the handler, as the cause of what the whole batch raises
                result = self._run_whole(refusal, lambda: self._train(batch))
            if result.skipped:
                self.skipped += 1
                logger.info("update skipped: %s", result.skipped)
            if self._options.recorder is not None:
                self._options.recorder(self, result)
        except BaseException as error:
            if self.updates > before:  # the scheduler or the recorder, or Ctrl-C that waited for the update
                error.add_note(
                    f"the update was applied (updates={self.updates}): continue with the next batch; passing this "
                    "one again would count it twice"
                )
            raise
        finally:
            del self.__dict__["_call"]
        return result

    def split_next(self, size: float) -> None:
        """Runs the next logical batch, if it can be split, in smaller micro-batches.

        Args:
            size: their size, as ``micro_batch_size``.
        """
        self._limit.once = size

    def _train(self, batch: Any) -> StepResult:
        """Runs a logical batch, from its layout to its result."""
        self._follow_model()
        parameters = self._parameters()
        check_hooks(parameters)
        boundary, reducer = self._boundary, self._settings.reducer
        with reducer.call("TrainStep", parameters, updates=self.updates, settings=boundary.settings):
            boundary.begin(parameters, clipped=self._known[2])
            splittable, before = self._prepared(batch)
            self.layout, self._rows = splittable.outline(), splittable.rows
            with self._planned(splittable):
                task, progress = self._task(splittable, before), Progress()

                def roll_back() -> None:
                    # An optimizer that has begun may have changed weights; running it again would apply those twice.
                    if not boundary.is_committed:
                        boundary.roll_back()
                        before.restore()

                retries = Retries(splittable, self._limit, roll_back, progress, reducer)
                while not retries.is_done:
                    with retries as parts:
                        outcome = self._attempt(task, parts, parameters, progress, before)
                self._limit.resolve(splittable.largest)
            result = outcome.result(retries.failed, splittable.rows)
        result.proof, result.layout = self._proofs.latest, self.layout
        result.plan = None if self._follower is None else self._follower.plan
        return result

    def _attempt(
        self, task: Task, parts: list[Part], parameters: Sequence[torch.Tensor], progress: Progress, before: Snapshot
    ) -> Outcome:
        """Computes the gradient in these micro-batches, and steps once."""
        boundary, reducer = self._boundary, task.settings.reducer
        # First: a split that is not exact is refused before anything is counted, run or changed.
        before_proof, own = self._proofs.latest, self._optimizations
        look = self._proofs.look
        kept, replay = look(task, parts, parameters, own, before, clear=boundary.zero_, update=self.updates)
        if self._follower is not None and self._proofs.latest is not before_proof:
            release_cache()  # of blocks of other sizes than those of the plan
        carried = getattr(task.loss_fn, "carried", None)  # the state that each call of a closure starts from
        with NOBODY if self.watcher is None else self.watcher(task, parts, parameters) as watch:
            progress.watch = watch
            weights, sums, skipped = self._gradient(kept, parts, parameters, progress)
            self._proofs.conclude(task, replay, sums)
            grad_norm = None
            if not skipped:
                if watch is not NOBODY:
                    watch.on_gradient()
                grad_norm = boundary.prepare(progress)  # unscales and clips
                skipped = boundary.skip_if_infinite(progress)
            if skipped:
                before.restore()  # a skipped batch changes only the scale
            else:
                again = self._again(task, parameters, sums, carried) if boundary.takes_closure else None
                with boundary.interrupts_deferred():
                    boundary.step(progress, again, is_shared=reducer.is_shared)
                    self.updates += 1
                    self.samples += reducer.rows(self._rows)
                    boundary.finish(progress)  # the scaler and the schedulers
            outcome = Outcome(weights, sums, parts, skipped, grad_norm)
        if watch is not NOBODY:
            watch.on_outcome(outcome)
        return outcome

    def _gradient(
        self, task: Task, parts: list[Part], parameters: Sequence[torch.Tensor], progress: Progress
    ) -> tuple[Weights, Sums, str]:
        """Fills ``.grad``; the text is the reason to skip the update, or empty."""
        self._boundary.zero_()
        with gradients_aside(), self._optimizations():
            weights, sums = run_pass(task, parts, parameters, progress)
        if progress.watch is not NOBODY:
            progress.watch.on_sums(weights, sums)
        task.settings.reducer.reduce_(sums, parameters)
        if weights.is_empty or (sums.counts and sums.is_over_nothing):
            self._boundary.zero_()
            return weights, sums, "the count of the whole batch is 0"
        if not self._was_used:
            check_model_was_used(self.model, self._options.inputs, sums)
            if sums.has_gradient:
                self._boundary.check_reached(type(self.model).__name__)
            self._was_used = True
        return weights, sums, ""

    def _again(self, task: Task, parameters: Sequence[torch.Tensor], sums: Sums, carried: Any) -> Again:
        """The current gradient, and how to recompute it after the optimizer has moved the weights."""

        def evaluate() -> torch.Tensor:
            if over_time := as_over_time(task.loss_fn):  # each evaluation starts from the state before this batch
                over_time.carried = carried
            task.settings.reducer.listen()
            scaler = task.settings.scaler
            if scaler is None or not scaler.is_enabled():
                return total_of(self._evaluated(task, parameters))
            scale = scaler.get_scale()
            while True:  # lowers the scale until the gradient is finite: within optimizer.step nothing can be skipped
                smaller = torch.amp.GradScaler(task.settings.device.type, init_scale=scale)
                found = self._evaluated(
                    replace(task, settings=replace(task.settings, scaler=smaller)), parameters, smaller
                )
                if scale <= 1 or not self._boundary.is_infinite(smaller):
                    return total_of(found)
                scale /= 16

        return Again(parameters, lambda: total_of(sums), evaluate)

    def _evaluated(self, task: Task, parameters: Sequence[torch.Tensor], scaler: Any = None) -> Sums:
        """Computes the gradient again, unscaled and clipped."""
        before, progress = self._snapshot(), Progress()

        def roll_back() -> None:
            self._boundary.zero_()
            before.restore()

        retries = Retries(task.splittable, self._limit, roll_back, progress, task.settings.reducer)
        while not retries.is_done:
            with retries as parts:
                _, sums, skipped = self._gradient(task, parts, parameters, progress)
                if not skipped:
                    self._boundary.prepare(progress, scaler)
        return sums

    def _claim(self, *, may_be_within: bool = False) -> bool:
        """Refuses a second call while one runs: both would write to the same gradients."""
        mine = get_ident(), object()
        holder = self.__dict__.setdefault("_call", mine)  # atomic: only one thread gets its own value back
        if holder is mine:
            return True
        if holder[0] != mine[0]:
            raise BatchError(
                "this TrainStep runs in another thread right now; expected one call at a time, since gradients, "
                "buffers and counters are those of one logical batch. Nothing was changed by this call. Give each "
                "thread a model and a TrainStep of its own, or hold a lock around the call"
            )
        if may_be_within:
            return False
        raise BatchError(
            "this TrainStep was called from within its own call (by the loss, a hook or the recorder); expected "
            "one logical batch after the other. Nothing was changed by the inner call"
        )

    @property
    def advice(self) -> BatchAdvice:
        """The batch size that pays and the learning rate for it, from the ``NoiseScale`` attached to this step.

        Raises:
            BatchError: no ``NoiseScale`` is attached.
        """
        from anybatch.scaling.tuning import advice_on

        return advice_on(self.watcher, self._optimizers, self._rows, self._limit.value, self.updates + self.skipped)

    def __copy__(self) -> "TrainStep":
        raise TypeError(
            "a shallow copy of a TrainStep would share its model but not its counters; use copy.deepcopy(step), or "
            "build another TrainStep"
        )

    def _parameters(self) -> list[torch.Tensor]:
        """Parameters of the optimizers and of the model, or ``inputs`` for the latter; cached until groups change."""
        stepped = []
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                stepped += group["params"]
        known = list(map(id, stepped))  # ids stay valid: the cached list holds the tensors
        if known != self._known[0]:  # compared by identity: == of tensors would compare their elements
            found = dict(zip(known, stepped, strict=True))
            inputs, updated = self._options.inputs, list(found.values())
            found.update((id(p), p) for p in (self.model.parameters() if inputs is None else inputs))
            every = list(found.values())
            # What no optimizer has is no part of the update, so that it does not count in the norm.
            self._known = known, every, updated if inputs is None else every
        return self._known[1]

    def _clear(self) -> None:
        self._boundary.zero_()

    def _snapshot(self) -> Snapshot:
        modules = modules_behind(self.model, self.loss_fn)
        if self._generators[0] != id(self):  # searched once, and again after this step was copied
            from anybatch.tensors.sideeffects import SideEffects

            self._generators = id(self), SideEffects([*modules, self.loss_fn], tensors=False).accessors()
        return Snapshot(modules, self._devices, self.loss_fn, self._generators[1])

    def _prepared(self, batch: Any) -> tuple[Splittable, Snapshot]:
        """The batch's layout and the snapshot; if memory runs out, once more after gradients and cache are freed."""
        for final in (False, True):
            try:
                return self._splittable(batch), self._snapshot()
            except BaseException as error:
                if final or not is_out_of_memory(error):
                    raise
            # .grad was kept readable until this call; now its memory is needed.
            self._boundary.zero_()
            release_cache()
        raise AssertionError("unreachable")

    def evaluate(self, batch: Any) -> StepResult:
        """Computes the loss and the metrics of a logical batch, in evaluation mode and without gradients.

        Evaluation has its own micro-batch size: running out of memory here does not change that of training.

        Args:
            batch: as for training.

        Returns:
            Loss, counts and metrics of the whole batch.

        Raises:
            BatchError, CountError, LossError: see ``anybatch.backward``.
            DoesNotFit: a single sample runs out of memory.
        """
        is_mine = self._claim(may_be_within=True)
        try:
            self._follow_model()
            with self._settings.reducer.call("evaluate", self._parameters(), updates=self.updates):
                return self._loss_of(self._splittable(batch))
        finally:
            if is_mine:
                del self.__dict__["_call"]

    def _loss_of(self, splittable: Splittable) -> StepResult:
        """Loss and metrics of a logical batch, in evaluation mode."""
        before = self._snapshot()
        reducer, task, progress = self._settings.reducer, self._task(splittable, before), Progress()
        training = [module for module in before.modules if module.training]
        if self._follower is not None:
            from anybatch.planning.following import limit_by_plan

            limit_by_plan(self._follower, splittable, self._evaluation_limit)
        self.model.eval()
        for module in training:
            module.training = False
        try:
            retries = Retries(splittable, self._evaluation_limit, before.restore, progress, reducer)
            while not retries.is_done:
                with retries as parts, self._optimizations():
                    weights, sums = run_pass(task, parts, (), progress, differentiate=False)
                    reducer.reduce_(sums, ())
        finally:
            for module in training:
                module.training = True
        self._evaluation_limit.resolve(splittable.largest)
        return Outcome(weights, sums, parts).result(retries.failed, splittable.rows)

    def state_dict(self) -> dict[str, Any]:
        """The state of the scaler and random generators, the counters, sizes and plan, as tensors and plain values.

        It does not include the model, the optimizers, the schedulers and the loader; save theirs separately.
        """
        return {
            "version": 1,
            "counters": {"updates": self.updates, "skipped": self.skipped, "samples": self.samples},
            "limit": self._limit.state_dict(),
            "evaluation_limit": self._evaluation_limit.state_dict(),
            "scaler": None if self._settings.scaler is None else self._settings.scaler.state_dict(),
            "random": RandomState(devices_of(self.model)).state_dict(),
            "plan": None if self._follower is None else self._follower.plan_state(),
            "loss": None if (over_time := as_over_time(self.loss_fn)) is None else over_time.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resumes from a saved state, bitwise.

        Args:
            state: what ``state_dict`` returned.

        Raises:
            BatchError: the state has another version or is malformed, or only one of the state and this step has a
                scaler. Nothing was loaded.
        """
        check_scaled(state, has_scaler=self._settings.scaler is not None)
        load_whole(self._load_whole, state, self.state_dict(), StepState, name="TrainStep")

    def _load_whole(self, state: Mapping[str, Any]) -> None:
        with part("plan"):
            if self._follower is not None and state.get("plan") is not None:
                self._follower.load_plan_state(state["plan"])
        self._limit.load_state_dict(state["limit"])
        self._evaluation_limit.load_state_dict(state["evaluation_limit"])
        counters = state["counters"]
        self.updates, self.skipped, self.samples = counters["updates"], counters["skipped"], counters["samples"]
        with part("scaler"):
            if self._settings.scaler is not None and state["scaler"]:
                self._settings.scaler.load_state_dict(state["scaler"])
        with part("loss"):
            if (over_time := as_over_time(self.loss_fn)) is not None and state.get("loss") is not None:
                over_time.load_state_dict(state["loss"])
        with part("random"):
            RandomState.load_state_dict(state["random"])

    def __repr__(self) -> str:
        proof = self._proofs.latest
        what = f"TrainStep({type(self.model).__name__}, micro_batch_size={self._limit.value}, updates={self.updates})"
        return what if proof is None else f"{what}\n  {proof}"


def _read_devices(devices: Any, model: torch.nn.Module, loss_fn: Any) -> "Devices | None":
    if devices is None:
        warn_of_replicas(model)
        return None
    from anybatch.parallel.devices import devices_of_argument

    return devices_of_argument(devices, model, loss_fn)
