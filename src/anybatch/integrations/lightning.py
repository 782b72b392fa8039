"""The exact gradient and the doctor in Lightning's Trainer."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from anybatch.backpropagation import RepeatedBackward
from anybatch.batch.counting import count_samples
from anybatch.errors import BatchError
from anybatch.integrations.attached import AttachedDoctor
from anybatch.loss.accumulate import DropoutPolicy
from anybatch.options import BatchNormPolicy, Verify

try:
    from lightning.pytorch import Callback, LightningModule
    from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
    from lightning.pytorch.utilities.model_helpers import is_overridden

    from anybatch.integrations.lightning_closure import ExactOptimization
except ImportError as error:
    raise ImportError("anybatch.integrations.lightning needs Lightning: pip install 'lightning>=2.4'") from error


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

    def gradient_for(self, trainer: Any, loss_fn: Callable[[Any, Any], Any]) -> RepeatedBackward:
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
