"""The exact gradient and the doctor in Lightning's Trainer."""

from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from numbers import Number
from typing import Any

import torch

from anybatch.backpropagation import RepeatedBackward
from anybatch.batch.counting import count_samples
from anybatch.errors import BatchError
from anybatch.integrations.attached import AttachedDoctor
from anybatch.interception import gradients_aside, trial
from anybatch.loss.accumulate import DropoutPolicy
from anybatch.options import BatchNormPolicy, Verify
from anybatch.records.means import Mean
from anybatch.records.results import StepResult
from anybatch.tensors.modules import modules_of

try:
    from lightning.pytorch import Callback, LightningModule
    from lightning.pytorch.loops.optimization.automatic import Closure, ClosureResult, _AutomaticOptimization
    from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
    from lightning.pytorch.trainer import call
    from lightning.pytorch.utilities.model_helpers import is_overridden
    from torchmetrics import Metric
except ImportError as error:
    raise ImportError("anybatch.integrations.lightning needs Lightning: pip install 'lightning>=2.4'") from error


Loss = Callable[[Any, Any], Any]


class ExactGradient(Callback):
    """Makes ``Trainer.fit`` take the gradient of the whole logical batch, with ``training_step`` unchanged.

    The logical batch is a batch of the loader, or ``accumulate_grad_batches`` of them, fewer at the end of an epoch.
    ``training_step`` gets its micro-batches; what it logs is joined over them, and logged once per batch of the loader.
    ``setup`` refuses trainers that can't be used this way.

    Args:
        memory: the memory budget, see ``anybatch.TrainStep``; not together with ``accumulate_grad_batches``.
        micro_batch_size: the most samples in a micro-batch; ``None`` for a batch of the loader.
        count: what the loss of ``training_step`` is the mean over, a function of a batch.
        broadcast, layout, batch_norm, dropout, verify: see ``anybatch.TrainStep``.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> exact = ExactGradient(micro_batch_size=8)
        >>> trainer = Trainer(
        ...     callbacks=[exact], accumulate_grad_batches=4, accelerator="cpu", logger=False, enable_progress_bar=False
        ... )
    """

    def __init__(
        self,
        *,
        memory: int | float | str | None = None,
        micro_batch_size: int | None = None,
        count: Callable[[Any], Any] = count_samples,
        broadcast: Sequence[str] = (),
        layout: Mapping[str, int | None] | None = None,
        batch_norm: BatchNormPolicy = "refuse",
        dropout: DropoutPolicy = "native",
        verify: Verify = "first",
    ) -> None:
        self.count = count
        self.options: dict[str, Any] = {
            "memory": memory, "micro_batch_size": micro_batch_size, "count": count, "broadcast": tuple(broadcast),
            "layout": layout, "batch_norm": batch_norm, "dropout": dropout, "verify": verify,
        }  # fmt: skip
        self.gradient: RepeatedBackward | None = None
        self._loaded: Mapping[str, Any] | None = None
        self._replaced: Any = None

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Replaces Lightning's automatic optimization until ``teardown``.

        Raises:
            BatchError: optimization is manual, the module has a ``backward`` of its own, the strategy is neither a
                single device nor DDP, or there are both ``memory`` and ``accumulate_grad_batches``.
        """
        if stage != "fit":
            return
        _refuse_other_ways(trainer, pl_module, self.options["memory"])
        loop = trainer.fit_loop.epoch_loop
        self._replaced, self.gradient = loop.automatic_optimization, None
        loop.automatic_optimization = ExactOptimization(trainer, self)
        loop.automatic_optimization.optim_progress = self._replaced.optim_progress  # trainer.global_step is in it

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Restores Lightning's automatic optimization."""
        if self._replaced is not None:
            trainer.fit_loop.epoch_loop.automatic_optimization, self._replaced = self._replaced, None

    def gradient_for(self, trainer: Any, loss_fn: Loss) -> RepeatedBackward:
        """The object that takes the gradient of each batch; it is made for the first one."""
        if self.gradient is None:
            optimizers = [getattr(one, "optimizer", one) for one in trainer.strategy.optimizers]
            scaler = getattr(trainer.precision_plugin, "scaler", None)
            model = trainer.strategy.model
            self.gradient = RepeatedBackward(
                model, loss_fn, optimizers, scaler=scaler, clip_norm=trainer.gradient_clip_val or None, **self.options
            )
            if self._loaded is not None:
                self.gradient.load_state_dict(self._loaded)
                self._loaded = None
        self.gradient.joined = trainer.accumulate_grad_batches
        return self.gradient

    def state_dict(self) -> dict[str, Any]:
        """The sizes and the plan, for Lightning's checkpoints."""
        return {} if self.gradient is None else {"gradient": self.gradient.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Resumes with the sizes and the plan of a checkpoint."""
        self._loaded = state_dict.get("gradient")


def _refuse_other_ways(trainer: Any, module: LightningModule, memory: Any) -> None:
    ways = {
        "automatic_optimization=False": not module.automatic_optimization,
        "a backward() of its own": is_overridden("backward", module),
        f"the strategy {type(trainer.strategy).__name__}": not isinstance(
            trainer.strategy, (SingleDeviceStrategy, DDPStrategy)
        ),
        "memory= and accumulate_grad_batches together": memory is not None and trainer.accumulate_grad_batches != 1,
    }
    found = [name for name, is_on in ways.items() if is_on]
    if found:
        raise BatchError(
            f"{type(module).__name__} is to be trained with {found[0]}; ExactGradient expects automatic "
            "optimization on one device in each process, and with memory= the whole logical batch from the loader"
        )


class _NoLoss(Exception):  # not an error: Lightning then skips the batch
    """``training_step`` returned ``None`` for the first micro-batch."""


class ExactOptimization(_AutomaticOptimization):
    """Takes the gradient of a batch, and joins it with those of the earlier batches of its window, by their counts."""

    def __init__(self, trainer: Any, exact: ExactGradient) -> None:
        super().__init__(trainer)
        self._exact = exact
        self._items = 0.0
        self._zero_grad: Callable[[], None] | None = None
        self._has_begun = False
        self._parameters: list[torch.nn.Parameter] = []
        self._before: list[torch.Tensor | None] = []
        self._kwargs: OrderedDict[str, Any] = OrderedDict()
        self._logged: dict[tuple[str, int], tuple[Any, dict[str, Any]]] = {}
        self._others: dict[str, Any] = {}

    def _make_closure(self, kwargs: OrderedDict[str, Any], optimizer: Any, batch_idx: int) -> Closure:
        if self._skip_backward:  # a pass that only refreshes BatchNorm, as for averaged weights
            return super()._make_closure(kwargs, optimizer, batch_idx)
        zero_grad = self._make_zero_grad_fn(batch_idx, optimizer)
        return Closure(step_fn=partial(self._gradient, kwargs, zero_grad))

    def _gradient(self, kwargs: OrderedDict[str, Any], zero_grad: Callable[[], None] | None) -> ClosureResult:
        """Brings ``.grad`` from the mean over the window's batches so far to the mean over them and this one."""
        self._zero_grad, self._has_begun = zero_grad, False
        try:
            with gradients_aside() as added:
                result = self._joined(kwargs)
                added.items = float(result.count)
        except _NoLoss:
            self._begin(None)
            _exchanged(self._parameters, self._before)
            self._log(None)
            return ClosureResult(None)
        self._log(result)
        call._call_callback_hooks(self.trainer, "on_after_backward")
        call._call_lightning_module_hook(self.trainer, "on_after_backward")
        rows = {name[4:]: value for name, value in result.metrics.items() if name.startswith("out ")}
        return ClosureResult(
            torch.tensor(result.loss, device=self.trainer.strategy.root_device), {**self._others, **rows}
        )

    def _joined(self, kwargs: OrderedDict[str, Any]) -> StepResult:
        """Takes the gradient of a batch, and weighs it with what is there."""
        self._parameters = parameters = _parameters(self.trainer.lightning_module)
        self._before = _exchanged(parameters, [None] * len(parameters))
        self._kwargs = kwargs
        try:
            result = self._exact.gradient_for(self.trainer, self._loss)(next(iter(kwargs.values())))
            if not self._has_begun:  # there was nothing to go back through
                self._begin(None)
        except BaseException:
            _exchanged(parameters, self._before)
            raise
        items = 0.0 if result.skipped else float(result.count)
        _join(parameters, self._before, self._items, items)
        self._before = []
        self._items += items
        return result

    def _begin(self, loss: Any) -> None:
        """Does what Lightning does between the first ``training_step`` and its backward."""
        self._has_begun = True
        if self._zero_grad is not None:
            aside = _exchanged(self._parameters, self._before)
            self._zero_grad()
            self._before, self._items = _exchanged(self._parameters, aside), 0.0
        if isinstance(loss, torch.Tensor):
            call._call_callback_hooks(self.trainer, "on_before_backward", loss)
            call._call_lightning_module_hook(self.trainer, "on_before_backward", loss)

    def _loss(self, model: Any, batch: Any) -> tuple[Any, dict[str, Any]]:
        """Runs ``training_step`` on a micro-batch; what it logs is kept back, to be joined."""
        is_own = model is self.trainer.strategy.model
        module: Any = self.trainer.lightning_module if is_own else model
        metrics: dict[str, Any] = {}
        times: Counter[str] = Counter()
        weight = self._weight(batch)  # before training_step, which may take the batch apart

        def log(name: str, value: Any, **options: Any) -> None:
            if not _is_number(value) and not isinstance(value, Metric):  # Lightning says whether it takes that
                if not trial.get():
                    type(module).log(module, name, value, **options)
                return
            times[name] += 1  # in one training_step, where Lightning looks whether they agree
            self._logged[name, times[name]] = (value, options)
            if not isinstance(value, Metric):
                size = options.get("batch_size")
                metrics[f"log {name}"] = _weighted(value, weight if size is None else size)

        module.__dict__["log"] = log
        try:
            rest = list(self._kwargs.values())[1:]
            if is_own:
                output = call._call_strategy_hook(self.trainer, "training_step", batch, *rest)
            else:  # a copy, to check or to plan with
                with self.trainer.precision_plugin.train_step_context():
                    output = module.training_step(batch, *rest)
        finally:
            del module.__dict__["log"]
        if output is None and not (self._has_begun or trial.get()) and self.trainer.world_size == 1:
            raise _NoLoss
        if not (self._has_begun or trial.get()):
            self._begin(output.get("loss") if isinstance(output, Mapping) else output)
        loss = output.get("loss") if isinstance(output, Mapping) else output
        if not isinstance(loss, (torch.Tensor, Mean)) and output is not None:
            ClosureResult.from_training_step_output(output)  # Lightning says what is wrong with it
        if not isinstance(output, Mapping):
            return output, metrics
        for name, value in output.items():
            if isinstance(value, torch.Tensor) and name != "loss":
                metrics[f"out {name}"] = value if value.dim() else _weighted(value, weight)
        self._others = {
            name: value for name, value in output.items() if f"out {name}" not in metrics and name != "loss"
        }
        return output["loss"], metrics

    def _weight(self, batch: Any) -> Any:
        """What the batch counts; one without samples, such as a number by which data is found, counts as one."""
        try:
            return self._exact.count(batch)
        except BatchError:
            if self._exact.count is not count_samples:
                raise
            return 1

    def _log(self, result: StepResult | None) -> None:
        """Logs what the micro-batches logged, as the logical batch would have; as it is where there was no loss."""
        module, logged = self.trainer.lightning_module, self._logged
        self._logged = {}
        if result is not None and result.skipped:
            return
        before, module._current_fx_name = module._current_fx_name, "training_step"
        for (name, _), (value, options) in logged.items():
            if result is not None and not isinstance(value, Metric):
                value = result.metrics[f"log {name}"]  # noqa: PLW2901 - joined
            size = {} if result is None else {"batch_size": max(1, round(result.count))}
            module.log(name, value, **{**options, **size})
        module._current_fx_name = before


def _is_number(value: Any) -> bool:
    return value.numel() == 1 if isinstance(value, torch.Tensor) else isinstance(value, Number)


def _exchanged(parameters: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor | None]) -> list[Any]:
    """Gives parameters other gradients, and returns those that they had."""
    before = [parameter.grad for parameter in parameters]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
    return before


def _weighted(value: Any, weight: Any) -> Mean:
    number = value.detach().reshape(()) if isinstance(value, torch.Tensor) else value
    if isinstance(weight, torch.Tensor):  # a branch would wait for the device; a mean over nothing is nan
        return Mean(torch.where(weight > 0, number * weight, 0), weight)
    return Mean(number * weight, weight) if weight else Mean(0, 0)


def _parameters(module: torch.nn.Module) -> list[torch.nn.Parameter]:
    """Those of ``module.parameters()``, which builds a name for each on its way."""
    found = {id(p): p for one in modules_of(module) for p in one._parameters.values() if p is not None}
    return list(found.values())


def _join(parameters: Sequence[Any], before: Sequence[Any], old: float, new: float) -> None:
    """Weighs two means, of which the new one is in ``.grad``, by their items; the tensors of the old one stay."""
    share = new / (old + new) if new else 0.0
    if new and old:
        pairs = [(g, p.grad) for p, g in zip(parameters, before, strict=True) if g is not None and p.grad is not None]
        lone = [g for p, g in zip(parameters, before, strict=True) if g is not None and p.grad is None]
        fresh = [p.grad for p, g in zip(parameters, before, strict=True) if g is None and p.grad is not None]
        _mix_(pairs, share)
        for tensors, factor in ((lone, 1 - share), (fresh, share)):
            if tensors:
                torch._foreach_mul_(tensors, factor)
    for parameter, gradient in zip(parameters, before, strict=True):
        if gradient is not None:
            if new and not old and parameter.grad is not None:  # of batches over nothing
                gradient.copy_(parameter.grad)
            parameter.grad = gradient


def _mix_(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], share: float) -> None:
    """Brings the first of each pair towards the second one; sparse gradients can't be interpolated."""
    dense = [(kept, added) for kept, added in pairs if kept.layout is added.layout is torch.strided]
    if dense:
        torch._foreach_lerp_([kept for kept, _ in dense], [added for _, added in dense], share)
    for kept, added in pairs if len(dense) < len(pairs) else ():
        if not kept.layout is added.layout is torch.strided:
            kept.mul_(1 - share).add_(added, alpha=share)


class DoctorCallback(AttachedDoctor, Callback):
    """Observes ``Trainer.fit`` and reports what is wrong at its end; see ``AttachedDoctor`` for the arguments."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Attaches the doctor."""
        self.begin(pl_module, *[getattr(one, "optimizer", one) for one in trainer.optimizers])

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Detaches the doctor, and reports on the first rank."""
        self.end(is_reporting=trainer.is_global_zero)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Detaches the doctor, and reports on the first rank why the run failed."""
        self.end(error=exception, is_reporting=trainer.is_global_zero)
