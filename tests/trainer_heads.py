"""Tiny models of Transformers with their heads, data of uneven labels, and one update of a Trainer."""

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from transformers import TrainingArguments

from reference import Gradients, assert_float32, assert_float64, gradients_of, whole_gradients

VERSION = tuple(int(part) for part in transformers.__version__.split(".")[:2])


def needs_transformers(major: int, minor: int, why: str) -> pytest.MarkDecorator:
    """Skips a test that compares with the Trainer as it has been since a version."""
    return pytest.mark.skipif((major, minor) > VERSION, reason=f"before transformers {major}.{minor} {why}")


Samples = list[dict[str, torch.Tensor]]
SIZES: dict[str, Any] = {
    "vocab_size": 32, "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
    "max_position_embeddings": 16,
}  # fmt: skip
STILL: dict[str, Any] = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
LENGTH = 9


class Tagger(torch.nn.Module):
    """No model of Transformers, and one that takes no further arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = torch.nn.Embedding(32, 8), torch.nn.Linear(8, 32)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        logits = self.out(self.embed(input_ids))
        found = {"logits": logits}
        if labels is not None:
            found["loss"] = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return found


def tokens(rows: int = 22, seed: int = 0) -> Samples:
    """Rows of which more and more labels are masked, so that batches and their ends have unlike numbers of them."""
    torch.manual_seed(seed)
    found = []
    for row in range(rows):
        ids = torch.randint(3, 32, (LENGTH,))
        labels = ids.clone()
        labels[: int(row * LENGTH / rows)] = -100
        found.append({"input_ids": ids, "labels": labels})
    return found


def classes(rows: int = 22, kind: str = "single") -> Samples:
    """Rows with one label: a class, a number, or several classes."""
    torch.manual_seed(1)
    labels = {
        "single": torch.arange(rows) % 3,
        "number": torch.randn(rows, 1),
        "several": (torch.rand(rows, 3) > 0.5).float(),
    }[kind]
    return [{"input_ids": torch.randint(3, 32, (LENGTH,)), "labels": labels[row]} for row in range(rows)]


def llama(**options: Any) -> Any:
    """A causal language model, which shifts its labels."""
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, num_key_value_heads=2, **options))


def bert(head: str, **options: Any) -> Any:
    """A BERT with a head, without dropout."""
    kind = getattr(transformers, f"BertFor{head}")
    return kind(transformers.BertConfig(**SIZES, **{**STILL, **options}))


def bart() -> Any:
    """An encoder and a decoder, whose labels are not shifted."""
    return transformers.BartForConditionalGeneration(
        transformers.BartConfig(
            vocab_size=32, d_model=8, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
            decoder_attention_heads=2, encoder_ffn_dim=16, decoder_ffn_dim=16, max_position_embeddings=16, dropout=0.0,
            pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1, forced_eos_token_id=None,
        )
    )  # fmt: skip


HEADS: dict[str, tuple[Any, Any]] = {
    "causal": (llama, tokens),
    "masked": (lambda: bert("MaskedLM"), tokens),
    "tokens": (lambda: bert("TokenClassification", num_labels=32), tokens),
    "classes": (lambda: bert("SequenceClassification", num_labels=3), classes),
    "numbers": (lambda: bert("SequenceClassification", num_labels=1), lambda: classes(kind="number")),
    "several": (
        lambda: bert("SequenceClassification", num_labels=3, problem_type="multi_label_classification"),
        lambda: classes(kind="several"),
    ),
    "sequences": (bart, tokens),
    "no head of Transformers": (Tagger, tokens),
}


def collated(samples: Samples) -> dict[str, torch.Tensor]:
    """The whole logical batch; numbers are float64."""
    found = {name: torch.stack([sample[name] for sample in samples]) for name in samples[0]}
    return {name: value.double() if value.is_floating_point() else value for name, value in found.items()}


def truth(model: torch.nn.Module, samples: Samples, loss_fn: Any = None) -> tuple[Gradients, float]:
    """The gradient and the loss of all samples at once, in float64."""
    copied = copy.deepcopy(model).double().train()
    gradients, values = whole_gradients(copied, loss_fn or own_loss, collated(samples))
    return gradients, values["loss"]


def assert_whole(found: Gradients, model: torch.nn.Module, samples: Samples, loss_fn: Any = None) -> None:
    """Asserts that a gradient is that of all samples, at the tolerance of its dtype.

    Models of Transformers compute parts of their loss in float32 whatever they are in, so they are tried in that.
    """
    exact, _ = truth(model, samples, loss_fn)
    if any(gradient is not None and gradient.dtype is torch.float64 for gradient in found):
        assert_float64(found, exact)
        return
    batch = {k: v.float() if v.is_floating_point() else v for k, v in collated(samples).items()}
    whole, _ = whole_gradients(copy.deepcopy(model).train(), loss_fn or own_loss, batch)
    assert_float32(found, whole, exact, micro_batches=8)


def own_loss(model: Any, batch: Any) -> torch.Tensor:
    """The loss of the head."""
    found: torch.Tensor = model(**batch)["loss"]
    return found


class Watching(transformers.TrainerCallback):
    """Keeps the gradient before each update, and counts what is called."""

    def __init__(self) -> None:
        self.gradients: list[Gradients] = []
        self.calls: dict[str, int] = {}

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.gradients.append(gradients_of(kwargs["model"]))

    def _count(self, name: str) -> None:
        self.calls[name] = self.calls.get(name, 0) + 1

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._count("step_begin")

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._count("substep_end")

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._count("step_end")


def double(samples: list[Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """A collator for models in float64."""
    return collated([dict(sample) for sample in samples])


def trained(kind: Any, model: Any, samples: Samples, folder: Path, **options: Any) -> tuple[Any, Watching]:
    """Trains with a Trainer, models that are not of Transformers in float64, three batches of at most 8.

    Returns:
        The Trainer, and what was seen.

    Args:
        kind: the class of the Trainer.
        model: is trained; give a copy.
        samples: in this order.
        folder: of the run.
        **options: of the Trainer; ``args`` are further arguments, ``resume`` a checkpoint.
    """
    watching = Watching()
    resume = options.pop("resume", None)
    callbacks = [watching, *options.pop("callbacks", [])]
    given = {
        "per_device_train_batch_size": 8, "gradient_accumulation_steps": 3, "num_train_epochs": 1, "seed": 7,
        "learning_rate": 0.1, "optim": "sgd", "max_grad_norm": 0.0, "lr_scheduler_type": "constant",
        "report_to": [], "save_strategy": "no", "use_cpu": True, "logging_steps": 1, "disable_tqdm": True,
        "dataloader_pin_memory": False,
        **options.pop("args", {}),
    }  # fmt: skip
    arguments = TrainingArguments(str(folder), **given)
    if not isinstance(model, transformers.PreTrainedModel):
        model.double()
        options.setdefault("data_collator", double)

    class InOrder(kind):  # type: ignore[misc]
        def _get_train_sampler(self, *args: Any, **kwargs: Any) -> Any:
            return torch.utils.data.SequentialSampler(samples)

        def log(self, logs: Any, *args: Any, **kwargs: Any) -> None:
            self.state.log_history.append({**logs, "step": self.state.global_step})

    InOrder.__name__ = kind.__name__
    trainer = InOrder(model, arguments, train_dataset=samples, callbacks=callbacks, **options)
    trainer.train(resume_from_checkpoint=resume)
    return trainer, watching
