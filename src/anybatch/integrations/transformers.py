"""The exact gradient and the doctor in the Trainer of Transformers."""

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from anybatch.accelerators import release_cache
from anybatch.backpropagation import RepeatedBackward
from anybatch.batch.counting import count_samples
from anybatch.batch.windowing import Window
from anybatch.errors import BatchError, warn
from anybatch.integrations.attached import AttachedDoctor
from anybatch.loss.accumulate import DropoutPolicy
from anybatch.options import BatchNormPolicy, Verify

try:
    import transformers
    from transformers import Trainer, TrainerCallback
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
except ImportError as error:
    raise ImportError(
        "anybatch.integrations.transformers needs the Trainer of Transformers: pip install 'transformers[torch]>=4.46'"
    ) from error

_STATE = "anybatch.json"
_IGNORED = -100
_CAUSAL = frozenset(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())
# Heads of Transformers 5.23 whose ``loss_type`` does not say what they do; benchmarks/architectures.py compares them.
_SHIFTED = frozenset({"BertLMHeadModel", "CTRLLMHeadModel", "GPT2LMHeadModel", "OpenAIGPTLMHeadModel"})
_NOT_SHIFTED = frozenset(
    f"{name}ForCausalLM"
    for name in (
        "Bart", "BigBirdPegasus", "Blenderbot", "BlenderbotSmall", "MBart", "Marian", "Musicgen", "MusicgenMelody",
        "Mvp", "PLBart", "Pegasus", "ProphetNet", "TrOCR", "Whisper",
    )
)  # fmt: skip


class ExactTraining:
    """Makes a Trainer take the gradient of its whole logical batch; it comes before ``Trainer`` among the base classes.

    The logical batch has ``per_device_train_batch_size * gradient_accumulation_steps`` samples on each rank, fewer at
    the end of an epoch. It runs in micro-batches of at most the per-device size, each weighted by the count of what its
    loss is the mean over. Clipping, the optimizer, the schedule, callbacks, logs and checkpoints stay the Trainer's.

    Args:
        *args: arguments of the Trainer.
        memory: the memory budget, see ``anybatch.TrainStep``.
        micro_batch_size: the most samples in a micro-batch; ``None`` for the per-device batch.
        count: what the loss is the mean over, a function of a batch; ``None`` for the labels that are not -100, without
            the first of each row if the head shifts them; for the answers within the text in question answering; for
            the samples if the labels are not integers, and for CTC.
        broadcast, layout, batch_norm, dropout, verify: see ``anybatch.TrainStep``.
        **kwargs: keyword arguments of the Trainer.

    Raises:
        BatchError: the Trainer uses something that takes the gradient itself: DeepSpeed, FSDP, several GPUs in one
            process, a ``parallelism_config``, LOMO or ``auto_find_batch_size``.

    Example:
        >>> class MyTrainer(ExactTraining, Trainer):
        ...     def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None): ...
        >>> MyTrainer.__mro__[1].__name__
        'ExactTraining'
    """

    def __init__(
        self,
        *args: Any,
        memory: int | float | str | None = None,
        micro_batch_size: int | None = None,
        count: Callable[[Any], Any] | None = None,
        broadcast: Sequence[str] = (),
        layout: Mapping[str, int | None] | None = None,
        batch_norm: BatchNormPolicy = "refuse",
        dropout: DropoutPolicy = "native",
        verify: Verify = "first",
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        _refuse_other_ways(self)
        self._exact_options = {
            "memory": memory, "micro_batch_size": micro_batch_size, "broadcast": tuple(broadcast),
            "layout": layout, "batch_norm": batch_norm, "dropout": dropout, "verify": verify,
            "count": self.count_items if count is None else count,
        }  # fmt: skip
        self._exact: RepeatedBackward | None = None
        self._exact_state: Any = None
        self._exact_window: list[Any] = []
        self._exact_passes_items = False

    def count_items(self: Any, batch: Any) -> Any:
        """Counts what the loss of a batch is the mean over, the default of ``count``."""
        return count_items(self, batch)

    def get_batch_samples(self: Any, *args: Any, **kwargs: Any) -> tuple[list[Any], Any]:
        """Remembers the batches of the next update; see ``Trainer.get_batch_samples``."""
        batches, items = super().get_batch_samples(*args, **kwargs)  # type: ignore[misc]
        self._exact_window = list(batches)
        self._exact_passes_items = items is not None or self.compute_loss_func is not None
        return batches, items

    def training_step(self: Any, model: torch.nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Takes the gradient of all batches of an update at the last one; does nothing at the others."""
        window = self._exact_window if any(inputs is batch for batch in self._exact_window) else [inputs]
        if inputs is not window[-1]:
            return torch.zeros((), device=self.args.device)
        self._exact_window = []
        model.train()
        if callable(getattr(self.optimizer, "train", None)):  # schedule-free optimizers have two modes
            self.optimizer.train()
        if self._exact is None or self._exact.model is not model:
            self._exact = _gradient_of(self, model)
        result = self._exact(Window(self._prepare_inputs(batch) for batch in window))
        every = self.args.torch_empty_cache_steps
        if every is not None and self.state.global_step % every == 0:
            release_cache()
        return torch.tensor(result.loss, device=self.args.device)

    def _exact_loss(self: Any, model: torch.nn.Module, inputs: Any) -> torch.Tensor:
        """The mean over a micro-batch, whether or not the head divides by the number of items that it is given."""
        items = self._exact_options["count"](inputs) if self._exact_passes_items else None
        with self.compute_loss_context_manager(), _loss_of_this_rank(self.args):
            loss: torch.Tensor = self.compute_loss(model, inputs, num_items_in_batch=items)
        return loss

    def _save_optimizer_and_scheduler(self: Any, output_dir: str) -> None:
        super()._save_optimizer_and_scheduler(output_dir)  # type: ignore[misc]
        if self._exact is not None and self.args.should_save:
            Path(output_dir, _STATE).write_text(json.dumps(self._exact.state_dict()), encoding="utf-8")

    def _load_optimizer_and_scheduler(self: Any, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)  # type: ignore[misc]
        if checkpoint is not None and Path(checkpoint, _STATE).is_file():
            self._exact_state = json.loads(Path(checkpoint, _STATE).read_text(encoding="utf-8"))


class ExactTrainer(ExactTraining, Trainer):
    """``transformers.Trainer`` with the gradient of its whole logical batch; its arguments are in ``ExactTraining``."""


class DoctorCallback(AttachedDoctor, TrainerCallback):
    """Observes ``Trainer.train`` and reports what is wrong at its end; see ``AttachedDoctor`` for the arguments."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Attaches the doctor."""
        optimizer = kwargs.get("optimizer")
        self.begin(kwargs["model"], *([] if optimizer is None else [getattr(optimizer, "optimizer", optimizer)]))

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Detaches the doctor, and reports on the first rank."""
        self.end(is_reporting=state.is_world_process_zero)


def _gradient_of(trainer: Any, model: torch.nn.Module) -> RepeatedBackward:
    optimizer = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
    limit = trainer.args.max_grad_norm
    if trainer._exact_options["count"] == trainer.count_items and trainer.compute_loss_func is None:
        check_head(trainer)
    gradient = RepeatedBackward(
        model, trainer._exact_loss, [optimizer], scaler=getattr(trainer.accelerator, "scaler", None),
        clip_norm=limit if limit else float("inf"), **trainer._exact_options,
    )  # fmt: skip
    if trainer._exact_state is not None:
        gradient.load_state_dict(trainer._exact_state)
        trainer._exact_state = None
    return gradient


@contextlib.contextmanager
def _loss_of_this_rank(args: Any) -> Iterator[None]:
    """Keeps the Trainer from multiplying the loss by the number of ranks, for a mean of gradients that is not taken."""
    before = getattr(args, "average_tokens_across_devices", False)
    args.average_tokens_across_devices = False
    try:
        yield
    finally:
        args.average_tokens_across_devices = before


def _refuse_other_ways(trainer: Any) -> None:
    args = trainer.args
    ways = {
        "DeepSpeed": trainer.is_deepspeed_enabled,
        "FSDP": getattr(trainer, "is_fsdp_enabled", False),
        "several GPUs in one process": args.n_gpu > 1,
        "a parallelism_config": getattr(args, "parallelism_config", None) is not None,
        "an optimizer that steps within the backward (LOMO)": "lomo" in str(args.optim).lower(),
        "auto_find_batch_size=True, which starts the run again": args.auto_find_batch_size,
    }
    found = [name for name, is_on in ways.items() if is_on]
    if found:
        raise BatchError(
            f"the Trainer is to run with {found[0]} ({transformers.__version__}), which takes the gradient "
            "itself; expected one device in each process, launched by torchrun if there are several. Micro-batches get "
            "smaller by themselves when memory runs out, or give memory="
        )


def count_labels(batch: Mapping[str, Any], *, is_shifted: bool) -> Any:
    """Counts the labels that are not -100; the samples if there are no labels or they are not integers.

    Args:
        batch: as the collator made it.
        is_shifted: whether the loss leaves out the first label of each row.

    Example:
        >>> labels = torch.tensor([[5, -100, 7], [1, 2, -100]])
        >>> [int(count_labels({"labels": labels}, is_shifted=shifted)) for shifted in (False, True)]
        [4, 2]
        >>> count_labels({"labels": torch.zeros(3, 2)}, is_shifted=False)
        3
    """
    labels = next((batch[name] for name in ("shift_labels", "labels") if name in batch), None)
    if not isinstance(labels, torch.Tensor) or labels.is_floating_point():
        return count_samples({name: value for name, value in batch.items() if isinstance(value, torch.Tensor)})
    if is_shifted and "shift_labels" not in batch and labels.dim() > 1:
        labels = labels[..., 1:]
    return labels.ne(_IGNORED).sum()


def count_items(trainer: Any, batch: Mapping[str, Any]) -> Any:
    """Counts what the loss of a Trainer is the mean over: labels, answers within their text, or samples for CTC.

    Raises:
        BatchError: an answer begins within its text and ends outside it, so no count makes this loss a mean.
    """
    is_of_head = trainer.label_smoother is None and getattr(trainer, "compute_loss_func", None) is None
    if is_of_head and "start_positions" in batch:
        return _count_spans(batch)
    if is_of_head and type(_model_of(trainer)).__name__.endswith("ForCTC"):
        return count_samples({name: value for name, value in batch.items() if isinstance(value, torch.Tensor)})
    return count_labels(batch, is_shifted=is_shifted(trainer))


def _count_spans(batch: Mapping[str, Any]) -> Any:
    """Counts answers that lie within their text: heads that answer questions leave out the others."""
    length = next(batch[name] for name in ("input_ids", "inputs_embeds", "input_features") if name in batch).shape[1]
    begins, ends = (batch[name] < length for name in ("start_positions", "end_positions"))
    if not torch.equal(begins, ends):
        raise BatchError(
            f"got answers that begin within the text of {length} tokens and end behind it, so that the two losses are "
            "means over other numbers of samples; expected that both positions are of the text, or both behind it. Cut "
            "the end, or put the whole answer behind the text, as the collator of the example scripts does"
        )
    return begins.sum()


def check_head(trainer: Any) -> None:
    """Refuses a head whose loss is a sum; warns of one with a balancing loss of experts, which is no mean."""
    config = getattr(_model_of(trainer), "config", None)
    name = type(_model_of(trainer)).__name__
    if name.endswith("ForCTC") and getattr(config, "ctc_loss_reduction", "mean") == "sum":
        raise BatchError(
            f"the loss of {name} is the sum over the batch (config.ctc_loss_reduction='sum'), which grows with it; "
            "expected a mean. Set model.config.ctc_loss_reduction = 'mean'"
        )
    if getattr(config, "output_router_logits", False):
        warn(
            f"the loss of {name} has the load balancing of its experts in it (config.output_router_logits=True), a "
            "product of means over the whole batch: that part of the gradient is of micro-batches. Set "
            "model.config.output_router_logits = False, or train in one micro-batch",
        )


def _model_of(trainer: Any) -> Any:
    wrapped, model = getattr(trainer, "_exact_unwrapped", (None, None))
    if wrapped is not trainer.model or wrapped is None:  # Accelerate looks for packages each time that it unwraps
        model = trainer.accelerator.unwrap_model(trainer.model)
        model = getattr(model.base_model, "model", model) if hasattr(model, "peft_config") else model
        trainer._exact_unwrapped = trainer.model, model
    return model


def is_shifted(trainer: Any) -> bool:
    """Whether the loss of a Trainer, that of its label smoother or its head, leaves out the first label of each row."""
    model = _model_of(trainer)
    is_causal = type(model).__name__ in _CAUSAL
    if trainer.label_smoother is not None:
        return is_causal
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        return False
    if type(model).__name__ in _SHIFTED or type(model).__name__ in _NOT_SHIFTED:
        return type(model).__name__ in _SHIFTED
    known = getattr(model, "loss_type", None) == "ForCausalLM"
    return known or getattr(trainer, "_loss_shifts_labels", is_causal)  # which an older Trainer does not say
