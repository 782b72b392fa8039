"""Tiny models of many architectures, made from configurations, with a batch for each of their heads.

Nothing is downloaded. Sizes are the smallest that keep every part of an architecture: two layers, two experts a token
and more of them to choose from, grouped keys. Dropout is off, so that nothing but the split makes a difference.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from architecture_sizes import BEGIN, CLASSES, END, NEEDS, PADDING, SIZES, TIMM, TORCHVISION, WORDS
from torch import Tensor, nn
from torch.nn import functional as F

import anybatch

Batch = dict[str, Any]
LENGTHS = (12, 5, 9, 12, 4, 7, 10)  # of the samples, padded to the longest
ROWS, TIME = len(LENGTHS), max(LENGTHS)
SAMPLES = "anybatch.count_samples"


@dataclass(frozen=True)
class Case:
    """A head of an architecture.

    Args:
        name: of its class.
        model: in training mode, in float64.
        batch: seven samples.
        counts: the counts that may be the right one, by what is written behind ``count=``.
        loss: of a model and a batch.
    """

    name: str
    model: nn.Module
    batch: Batch
    counts: Mapping[str, Any]
    loss: Callable[..., Tensor] = field(default=lambda model, batch, **options: model(**batch, **options).loss)


def counts_of(labels: str, *, ignore_index: int = -100, shifts: tuple[int, ...] = (0, 1)) -> dict[str, Any]:
    """The number of samples, and of labels with and without a shift."""
    found: dict[str, Any] = {SAMPLES: anybatch.count_samples}
    for shift in shifts:
        options = ([f"ignore_index={ignore_index}"] if ignore_index != -100 else []) + (["shift=1"] if shift else [])
        code = f"anybatch.count_tokens({', '.join([repr(labels), *options])})".replace("'", '"')
        found[code] = anybatch.count_tokens(labels, ignore_index=ignore_index, shift=shift)
    return found


def _text() -> Batch:
    """Tokens padded at the end; each sample has three separators there, which some heads look for."""
    lengths = torch.tensor(LENGTHS)
    places = torch.arange(TIME)
    mask = places < lengths[:, None]
    tokens = torch.randint(5, WORDS, (ROWS, TIME)).masked_fill(~mask, PADDING)
    tokens[mask & (places >= lengths[:, None] - 3)] = END
    return {"input_ids": tokens, "attention_mask": mask.long()}


def _causal() -> Batch:
    """Some samples begin with a prompt that is not learned, so that a shift matters."""
    batch = _text()
    prompts = torch.tensor([4, 0, 1, 0, 2, 0, 6])
    kept = batch["attention_mask"].bool() & (torch.arange(TIME) >= prompts[:, None])
    return {**batch, "labels": batch["input_ids"].masked_fill(~kept, -100)}


def _masked() -> Batch:
    """Every third token is masked, in another place for each sample."""
    batch = _text()
    chosen = (torch.arange(TIME) + torch.arange(ROWS)[:, None]) % 3 == 0
    kept = batch["attention_mask"].bool() & chosen
    tokens = batch["input_ids"]
    return {**batch, "input_ids": tokens.masked_fill(kept, 4), "labels": tokens.masked_fill(~kept, -100)}


def _sequence() -> Batch:
    return {**_text(), "labels": torch.randint(CLASSES, (ROWS,))}


def _token() -> Batch:
    batch = _text()
    labels = torch.randint(CLASSES, (ROWS, TIME))
    return {**batch, "labels": labels.masked_fill(batch["attention_mask"] == 0, -100)}


def _question() -> Batch:
    """The answer to the second question lies beyond the end, as it does when a long text was cut."""
    starts = torch.tensor([3, TIME, 2, 7, 1, 0, 4])
    return {**_text(), "start_positions": starts, "end_positions": (starts + 2).clamp(max=TIME)}


def _seq2seq() -> Batch:
    lengths = torch.tensor([3, 8, 5, 2, 8, 6, 4])
    labels = torch.randint(5, WORDS, (ROWS, 8))
    return {**_text(), "labels": labels.masked_fill(torch.arange(8) >= lengths[:, None], -100)}


def _ctc() -> Batch:
    """Sounds of different lengths, and what was said in them."""
    lengths = torch.tensor([800, 500, 640, 800, 560, 720, 760])
    mask = torch.arange(800) < lengths[:, None]
    labels = torch.randint(3, WORDS, (ROWS, 4)).masked_fill(
        torch.arange(4) >= torch.arange(ROWS)[:, None] % 4 + 1, -100
    )
    return {"input_values": torch.randn(ROWS, 800) * mask, "attention_mask": mask.long(), "labels": labels}


def _sound() -> Batch:
    batch = _ctc()
    return {**batch, "labels": torch.randint(CLASSES, (ROWS,))}


def _image() -> Batch:
    return {"pixel_values": torch.randn(ROWS, 3, 64, 64), "labels": torch.randint(CLASSES, (ROWS,))}


def _segments() -> Batch:
    """A class for each pixel; the border of some images is left out."""
    labels = torch.randint(CLASSES, (ROWS, 64, 64))
    borders = torch.tensor([0, 8, 0, 16, 4, 0, 20])
    return {**_image(), "labels": labels.masked_fill(torch.arange(64)[:, None] < borders[:, None, None], 255)}


def _pairs() -> Batch:
    return {**_text(), "pixel_values": torch.randn(ROWS, 3, 64, 64), "return_loss": True}


def _one_loss() -> Batch:
    return {
        **_masked(),
        "next_sentence_label": torch.randint(2, (ROWS,)),
        "sentence_order_label": torch.randint(2, (ROWS,)),
    }


@dataclass(frozen=True)
class Head:
    """A kind of head.

    Args:
        auto: the class of Transformers that makes it.
        mapping: the table of architectures that have it.
        batch: makes its batch.
        counts: which counts may be the right one.
        config: options of the configuration.
    """

    auto: str
    mapping: str
    batch: Callable[[], Batch]
    counts: Mapping[str, Any]
    config: Mapping[str, Any] = field(default_factory=dict)


LABELS, ROWS_ONLY = counts_of("labels"), {SAMPLES: anybatch.count_samples}
SPANS = counts_of("start_positions", ignore_index=TIME, shifts=(0,))
PIXELS = counts_of("labels", ignore_index=255, shifts=(0,))
HEADS: Mapping[str, Head] = {
    "causal": Head("AutoModelForCausalLM", "CAUSAL_LM", _causal, LABELS, {"is_decoder": True}),
    "causal, router loss": Head(
        "AutoModelForCausalLM", "CAUSAL_LM", _causal, LABELS, {"is_decoder": True, "output_router_logits": True}
    ),
    "masked": Head("AutoModelForMaskedLM", "MASKED_LM", _masked, LABELS),
    "pretraining": Head("AutoModelForPreTraining", "PRETRAINING", _one_loss, LABELS, {"num_labels": 2}),
    "sequence": Head("AutoModelForSequenceClassification", "SEQUENCE_CLASSIFICATION", _sequence, ROWS_ONLY),
    "token": Head("AutoModelForTokenClassification", "TOKEN_CLASSIFICATION", _token, LABELS),
    "question": Head("AutoModelForQuestionAnswering", "QUESTION_ANSWERING", _question, SPANS, {"num_labels": 2}),
    "seq2seq": Head("AutoModelForSeq2SeqLM", "SEQ_TO_SEQ_CAUSAL_LM", _seq2seq, LABELS),
    "CTC, sum": Head("AutoModelForCTC", "CTC", _ctc, LABELS, {"ctc_loss_reduction": "sum"}),
    "CTC, mean": Head("AutoModelForCTC", "CTC", _ctc, LABELS, {"ctc_loss_reduction": "mean"}),
    "audio": Head("AutoModelForAudioClassification", "AUDIO_CLASSIFICATION", _sound, ROWS_ONLY),
    "image": Head("AutoModelForImageClassification", "IMAGE_CLASSIFICATION", _image, ROWS_ONLY),
    "segmentation": Head("AutoModelForSemanticSegmentation", "SEMANTIC_SEGMENTATION", _segments, PIXELS),
    "contrastive": Head("AutoModel", "", _pairs, ROWS_ONLY),
}
_TEXT = ("causal", "masked", "sequence", "token", "question", "seq2seq")


def heads_of(architecture: str, only: tuple[str, ...]) -> list[str]:
    """The heads of an architecture of Transformers: those that are named, or all that it has for text."""
    if only:
        return list(only)
    auto = importlib.import_module("transformers.models.auto.modeling_auto")
    return [name for name in _TEXT if architecture in getattr(auto, f"MODEL_FOR_{HEADS[name].mapping}_MAPPING_NAMES")]


def config_of(architecture: str, **options: Any) -> Any:
    """The smallest configuration of an architecture; options that it does not know are left out."""
    mapping = importlib.import_module("transformers").CONFIG_MAPPING
    made = mapping[architecture]
    default = made()
    known = set(inspect.signature(made.__init__).parameters) | set(default.to_dict()) | set(made.attribute_map)
    chosen = {k: v for k, v in {**SIZES, **options}.items() if k in known and not _is_given_twice(k, made, known)}
    chosen = {k: v for k, v in chosen.items() if not isinstance(getattr(default, k, None), (list, tuple))}
    quiet = {k: 0.0 for k, v in default.to_dict().items() if "drop" in k and isinstance(v, float)}
    config = made(**{**chosen, **quiet, **NEEDS.get(architecture, {})})
    config.num_labels = options.get("num_labels", CLASSES)
    if getattr(config, "is_encoder_decoder", False) and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = BEGIN
    return config


def _is_given_twice(name: str, made: Any, known: set[str]) -> bool:
    own = made.attribute_map.get(name)
    return own is not None and own in SIZES and own in known


def transformer(architecture: str, head: str) -> Case:
    """Makes a head of an architecture of Transformers.

    Args:
        architecture: as Transformers calls it.
        head: a key of ``HEADS``.

    Returns:
        The model and its batch.
    """
    made = HEADS[head]
    torch.manual_seed(0)
    config = config_of(architecture, **made.config)
    model = getattr(importlib.import_module("transformers"), made.auto).from_config(
        config,
        experts_implementation="eager",  # the grouped one has no float64
    )
    batch = made.batch()
    taken = inspect.signature(model.forward).parameters
    return Case(
        type(model).__name__, _trained(model), _doubled({k: v for k, v in batch.items() if k in taken}), made.counts
    )


def _trained(model: nn.Module) -> nn.Module:
    """In training mode and in float64, without dropout; that of functions was turned off in the configuration."""
    for module in model.modules():
        if isinstance(module, (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.AlphaDropout)):
            module.p = 0.0
        elif type(module).__name__ in ("DropPath", "StochasticDepth", "StableDropout"):
            for name in ("drop_prob", "p"):
                if hasattr(module, name):
                    setattr(module, name, 0.0)
    return model.double().train()


def _doubled(batch: Batch) -> Batch:
    return {k: v.double() if isinstance(v, Tensor) and v.is_floating_point() else v for k, v in batch.items()}


def _classified(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch["pixel_values"]), batch["labels"])


def classifier(library: str, name: str) -> Case:
    """Makes a classifier of images of torchvision or timm."""
    torch.manual_seed(0)
    if library == "torchvision":
        make = getattr(importlib.import_module("torchvision.models"), name)
        model = make(**TORCHVISION[name])
    else:
        model = importlib.import_module("timm").create_model(name, **TIMM[name])
    return Case(type(model).__name__, _trained(model), _doubled(_image()), ROWS_ONLY, _classified)
