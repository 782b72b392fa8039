"""What the loss of a head of Transformers is the mean over."""

from collections.abc import Mapping
from typing import Any

import torch
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from anybatch.tensors.counting import count_samples

_IGNORED = -100
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
    """Counts the labels that are not -100; samples where the labels are no integers.

    Args:
        batch: as a collator made it.
        is_shifted: whether the loss leaves out the first label of each row; ``shift_labels`` are shifted already.

    Returns:
        A number, or a tensor without dimensions.

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


def is_shifted(trainer: Any) -> bool:
    """Whether the loss of a Trainer leaves out the first label of each row: a label smoother's, or the head's own.

    Args:
        trainer: a Trainer.
    """
    model = trainer.accelerator.unwrap_model(trainer.model)
    if hasattr(model, "peft_config"):
        model = getattr(model.base_model, "model", model)
    is_causal = type(model).__name__ in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
    if trainer.label_smoother is not None:
        return is_causal
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        return False
    if type(model).__name__ in _SHIFTED | _NOT_SHIFTED:
        return type(model).__name__ in _SHIFTED
    known = getattr(model, "loss_type", None) == "ForCausalLM"
    return known or getattr(trainer, "_loss_shifts_labels", is_causal)  # which an older Trainer does not say
