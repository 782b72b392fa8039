"""The subjects of the planner's tests: models, losses and batches of every kind, a fresh one from each factory.

Whole batches of 64 samples take some tens of megabytes, at least three times what parameters, gradients and the state
of the optimizer take, and well under a second on one core.
"""

import importlib
import importlib.util
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import anybatch
from planning_data import VOCABULARY, batches, hidden_tokens, images, pad, points, texts, tokens_and_labels
from planning_modules import (
    Block,
    ConvNet,
    Experts,
    Heads,
    LanguageModel,
    Mixing,
    PlainAttention,
    Recurrent,
    Residual,
    ResidualPerceptron,
    TokenEncoder,
    TwoEncoders,
    UNet,
    VisionTransformer,
    perceptron,
)

TOLERANCE = 0.005
TOLERANCE_RNN = 0.02  # what a recurrent kernel takes as workspace is not linear in the samples
HAS_TRANSFORMERS = importlib.util.find_spec("transformers") is not None

Parameters = Iterator[nn.Parameter]


def adamw(parameters: Parameters) -> torch.optim.Optimizer:
    """AdamW as most people use it."""
    return torch.optim.AdamW(parameters, lr=1e-3)


def sgd(parameters: Parameters) -> torch.optim.Optimizer:
    """SGD with momentum."""
    return torch.optim.SGD(parameters, lr=1e-2, momentum=0.9)


def plain_sgd(parameters: Parameters) -> torch.optim.Optimizer:
    """SGD without any state."""
    return torch.optim.SGD(parameters, lr=1e-2)


@dataclass(frozen=True, eq=False)
class Subject:
    """One thing to plan for.

    Args:
        name: of the factory.
        model: a fresh one, in training mode.
        loss_fn: as a user writes it.
        make_batch: a logical batch of so many samples; equal numbers give equal batches.
        make_optimizer: from the parameters.
        autocast: the precision of the forward, or ``None``.
        tolerance: how far a predicted peak may be from the measured one, relative.
        splits: whether the batch may be cut into micro-batches at all.
        needs_real_probes: whether fake tensors can't tell the memory: routing by data, or kernels with a workspace.
        blocks: the names of the modules that a user would checkpoint.
        options: further arguments of ``TrainStep``.
    """

    name: str
    model: nn.Module
    loss_fn: Callable[[Any, Any], Any]
    make_batch: Callable[[int], Any]
    make_optimizer: Callable[[Parameters], torch.optim.Optimizer] = adamw
    autocast: torch.dtype | None = None
    tolerance: float = TOLERANCE
    splits: bool = True
    needs_real_probes: bool = False
    blocks: tuple[str, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)

    def step(self, **options: Any) -> anybatch.TrainStep:
        """A ``TrainStep`` with an optimizer of its own."""
        optimizer = self.make_optimizer(self.model.parameters())
        return anybatch.TrainStep(
            self.model, self.loss_fn, optimizer, **{"autocast": self.autocast, **self.options, **options}
        )


FACTORIES: dict[str, Callable[[], Subject]] = {}


def _subject(make: Callable[[], Subject]) -> Callable[[], Subject]:
    """Registers a factory; its model is made from one seed, and torch's random state stays as it is."""

    def seeded() -> Subject:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            subject = make()
        if subject.name != make.__name__:
            raise ValueError(f"the subject {subject.name!r} comes from {make.__name__!r}; give them one name")
        return subject

    FACTORIES[make.__name__] = seeded
    return seeded


def blocks_of(model: nn.Module, *homes: str) -> tuple[str, ...]:
    """The names of the children of containers."""
    return tuple(
        f"{home}.{name}".lstrip(".") for home in homes for name, _ in model.get_submodule(home).named_children()
    )


def classify(model: nn.Module, batch: Any) -> Tensor:
    """The mean cross-entropy of one class a sample."""
    return F.cross_entropy(model(batch["x"]), batch["y"])


def classify_each(model: nn.Module, batch: Any) -> Tensor:
    """The mean cross-entropy over points or tokens; as many in every sample, so it is the mean over samples too."""
    return F.cross_entropy(model(batch["x"]).flatten(0, 1), batch["y"].flatten())


@_subject
def deep_narrow() -> Subject:
    model = perceptron(16, 48, 8, 10)
    return Subject("deep_narrow", model, classify_each, points(96, 8))


@_subject
def plain_mlp() -> Subject:
    model = perceptron(64, 6, 16, 10)
    return Subject("plain_mlp", model, classify_each, points(160, 16), sgd)


@_subject
def cnn_batchnorm() -> Subject:
    model = ConvNet("batch")
    return Subject("cnn_batchnorm", model, classify, images(28), splits=False, blocks=blocks_of(model, "blocks"))


@_subject
def cnn_groupnorm() -> Subject:
    model = ConvNet("group")
    return Subject("cnn_groupnorm", model, classify, images(28), sgd, blocks=blocks_of(model, "blocks"))


@_subject
def transformer() -> Subject:
    model = LanguageModel([Block(48, 4, dropout=0.1) for _ in range(3)], 48, VOCABULARY, 48, tied=True)
    return Subject("transformer", model, classify_each, texts(48), blocks=blocks_of(model, "blocks"))


@_subject
def transformer_encoder() -> Subject:
    model = TokenEncoder(VOCABULARY, 32, 3, 4, dropout=0.1)
    return Subject("transformer_encoder", model, classify_each, texts(32), blocks=blocks_of(model, "encoder.layers"))


@_subject
def lstm() -> Subject:
    model = Recurrent(nn.LSTM, VOCABULARY, 32, 2)
    return Subject("lstm", model, classify_each, texts(64), tolerance=TOLERANCE_RNN, needs_real_probes=True)


@_subject
def gru() -> Subject:
    model = Recurrent(nn.GRU, VOCABULARY, 32, 2)
    return Subject("gru", model, classify_each, texts(96), tolerance=TOLERANCE_RNN, needs_real_probes=True)


@_subject
def experts() -> Subject:
    blocks = [module for _ in range(2) for module in (PlainAttention(32), Experts(32, 4))]
    model = LanguageModel(blocks, 32, VOCABULARY, 64, tied=False)
    return Subject(
        "experts", model, classify_each, texts(64), needs_real_probes=True, blocks=blocks_of(model, "blocks")
    )


@_subject
def unet() -> Subject:
    model = UNet()

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        return F.mse_loss(model(batch["x"]), batch["x"].flip(-1))

    return Subject("unet", model, loss_fn, images(24, channels=1), blocks=blocks_of(model, "down", "up"))


@_subject
def vision_transformer() -> Subject:
    model = VisionTransformer(32, 4, 32, 4)
    return Subject("vision_transformer", model, classify, images(32), blocks=blocks_of(model, "blocks"))


@_subject
def transformer_bf16() -> Subject:
    model = LanguageModel([Block(48, 4, dropout=0.1) for _ in range(3)], 48, VOCABULARY, 64, tied=True)
    return Subject(
        "transformer_bf16", model, classify_each, texts(64), autocast=torch.bfloat16,
        blocks=blocks_of(model, "blocks"),
    )  # fmt: skip


@_subject
def heterogeneous() -> Subject:
    blocks = [Residual(32, 8), PlainAttention(32), Mixing(32), Block(32, 2, factor=1), Residual(32, 1), Mixing(32, 9)]
    model = LanguageModel(blocks, 32, 256, 64, tied=False)
    return Subject("heterogeneous", model, classify_each, texts(64, 256), blocks=blocks_of(model, "blocks"))


@_subject
def two_encoders() -> Subject:
    make = batches(
        lambda g, m: {
            "images": torch.randn(m, 3, 28, 28, generator=g),
            "texts": torch.randint(VOCABULARY, (m, 32), generator=g),
            "y": torch.randint(2, (m,), generator=g).float(),
        }
    )

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        scores = model(batch["images"], batch["texts"])
        return F.binary_cross_entropy_with_logits(scores, batch["y"].to(scores.dtype))

    model = TwoEncoders(24, VOCABULARY)
    return Subject("two_encoders", model, loss_fn, make, blocks=blocks_of(model, "images.blocks", "texts.blocks"))


@_subject
def deep_residual() -> Subject:
    """One sample takes over a megabyte and the weights 0.6: small budgets need recomputed blocks."""
    model = ResidualPerceptron(8, 16, 24, 10)
    return Subject("deep_residual", model, classify_each, points(96, 8), plain_sgd, blocks=blocks_of(model, "blocks"))


@_subject
def long_sequence() -> Subject:
    """One sample takes over a megabyte, as in ``deep_residual``."""
    model = LanguageModel([Block(16, 2, factor=2) for _ in range(4)], 16, 32, 384, tied=False)
    return Subject("long_sequence", model, classify_each, texts(384, 32), blocks=blocks_of(model, "blocks"))


@_subject
def three_heads() -> Subject:
    """Three losses, yielded one by one over a cut."""

    def loss_fn(model: Any, batch: Any) -> Iterator[tuple[str, Tensor]]:
        with anybatch.cut(model.trunk(batch["x"])) as features:
            for name, head in model.heads.items():
                yield name, F.cross_entropy(head(features).flatten(0, 1), batch["y"].flatten())

    model = Heads(32, 10)
    return Subject("three_heads", model, loss_fn, points(96, 8), blocks=blocks_of(model, "trunk.blocks", "heads"))


@_subject
def masked_tokens() -> Subject:
    """A loss that says itself over how many tokens it is the mean."""

    def make(generator: torch.Generator, samples: int) -> Any:
        batch = texts(48)(samples)
        lengths = torch.randint(8, 49, (samples, 1), generator=generator)
        batch["y"] = batch["y"].masked_fill(torch.arange(48) >= lengths, -100)
        return batch

    def loss_fn(model: nn.Module, batch: Any) -> anybatch.Mean:
        logits, labels = model(batch["x"]).flatten(0, 1), batch["y"].flatten()
        return anybatch.Mean(F.cross_entropy(logits, labels, reduction="sum"), (labels != -100).sum())

    model = LanguageModel([Block(32, 4) for _ in range(3)], 32, VOCABULARY, 48, tied=False)
    return Subject("masked_tokens", model, loss_fn, batches(make), blocks=blocks_of(model, "blocks"))


@_subject
def raw_texts() -> Subject:
    """Texts of 16 to 64 tokens, joined by ``collate`` and packed by ``cost``."""

    def make(generator: torch.Generator, samples: int) -> list[Tensor]:
        lengths = torch.randint(17, 66, (samples,), generator=generator).tolist()
        return [torch.randint(1, VOCABULARY, (length,), generator=generator) for length in lengths]

    def loss_fn(model: nn.Module, batch: Any) -> anybatch.Mean:
        real = (batch["y"] != -100)[:, None, None, :]
        logits, labels = model(batch["x"], real).flatten(0, 1), batch["y"].flatten()
        return anybatch.Mean(F.cross_entropy(logits, labels, reduction="sum"), (labels != -100).sum())

    model = LanguageModel([Block(32, 4, causal=False) for _ in range(3)], 32, VOCABULARY, 65, tied=False)
    return Subject(
        "raw_texts", model, loss_fn, batches(make), blocks=blocks_of(model, "blocks"),
        options={"collate": pad, "cost": lambda sample: len(sample) - 1},
    )  # fmt: skip


def _gpt2(**options: Any) -> nn.Module:
    # By name, since transformers is optional and the types are checked without it.
    hub = importlib.import_module("transformers")
    config = hub.GPT2Config(
        vocab_size=VOCABULARY, n_positions=48, n_embd=32, n_layer=3, n_head=4, bos_token_id=0, eos_token_id=0, **options
    )
    model: nn.Module = hub.GPT2LMHeadModel(config)
    return model.train()


def _labels_within(model: nn.Module, batch: Any) -> Tensor:
    """The loss of a Hugging Face model, which shifts causal labels itself."""
    loss: Tensor = model(**batch).loss
    return loss


if HAS_TRANSFORMERS:

    @_subject
    def gpt2() -> Subject:
        def loss_fn(model: nn.Module, batch: Any) -> Tensor:
            logits = model(input_ids=batch["input_ids"]).logits[:, :-1]
            return F.cross_entropy(logits.flatten(0, 1), batch["labels"][:, 1:].flatten())

        model = _gpt2(use_cache=False)
        return Subject("gpt2", model, loss_fn, tokens_and_labels, blocks=blocks_of(model, "transformer.h"))

    @_subject
    def gpt2_cached() -> Subject:
        """As it comes: it fills a cache while it trains, so its blocks change an argument; its loss is in float32."""
        return Subject("gpt2_cached", _gpt2(), _labels_within, tokens_and_labels)

    @_subject
    def bert() -> Subject:
        hub = importlib.import_module("transformers")
        config = hub.BertConfig(
            vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=3, num_attention_heads=4, intermediate_size=64,
            max_position_embeddings=48,
        )  # fmt: skip
        model = hub.BertForMaskedLM(config).train()
        return Subject(
            "bert", model, _labels_within, batches(hidden_tokens), blocks=blocks_of(model, "bert.encoder.layer"),
            options={"count": anybatch.count_tokens("labels")},
        )  # fmt: skip


NAMES = tuple(FACTORIES)
