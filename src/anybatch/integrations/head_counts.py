"""The counts over which the losses of Transformers' heads are means."""

from collections.abc import Mapping
from typing import Any

import torch
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from anybatch.batch.counting import count_samples
from anybatch.errors import BatchError, warn

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
