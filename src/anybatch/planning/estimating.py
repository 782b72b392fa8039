"""What a training of a known model would take: the model by its name, without weights, and a step of it."""

import importlib
import os
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from anybatch.errors import AnyBatchError
from anybatch.planning.entrance import plan
from anybatch.records.plans import Plan

OPTIMIZERS = {"adamw": "AdamW", "adam": "Adam", "sgd": "SGD", "adafactor": "Adafactor"}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_IMAGE = 224


class NoModel(AnyBatchError):
    """A model can't be made of what was given; the text says what can."""


class Example(NamedTuple):
    """A model on ``meta``, and one batch for it."""

    model: nn.Module  # without weights
    loss_fn: Callable[[Any, Any], Any]  # of the model and a batch
    batch: dict[str, torch.Tensor]  # of the shapes that were asked for


def example_of(name: str, rows: int, length: int, dtype: str) -> Example:
    """Makes a model by its name, on ``meta``; nothing is downloaded.

    Args:
        name: a folder with a ``config.json`` of Transformers, or a name whose config is in its cache; a name of timm or
            torchvision; or ``module:function``, which returns an ``nn.Module``.
        rows: samples in a batch.
        length: tokens of a sample; for images pixels of a side, where it is given.
        dtype: of the weights, one of ``DTYPES``.

    Raises:
        NoModel: there is no such model here, or it takes data that is not known.

    Example:
        >>> example_of("torch.nn:Identity", 8, 0, "fp32")
        Traceback (most recent call last):
        anybatch.planning.estimating.NoModel: torch.nn:Identity has no Embedding, convolution or Linear; expected ...
    """
    before = torch.get_default_dtype()
    torch.set_default_dtype(DTYPES[dtype])
    try:
        with torch.device("meta"):
            if ":" in name and not Path(name).exists():
                return _own(name, _called(name), rows, length)
            config = _config(name)
            model = _of_images(name) if config is None else None
            if config is None and model is None:
                raise NoModel(_nowhere(name))
            return _own(name, model, rows, length) if model is not None else _of_texts(name, config, rows, length)
    finally:
        torch.set_default_dtype(before)


def _called(name: str) -> nn.Module:
    """The module that a function of the user's returns; its file is looked for here first."""
    place, _, function = name.partition(":")
    if os.getcwd() not in sys.path:  # noqa: PTH109 - as Python itself writes it
        sys.path.insert(0, os.getcwd())  # noqa: PTH109
    try:
        made = getattr(importlib.import_module(place), function)()
    except Exception as error:  # noqa: BLE001 - the user's code, of which the last line says enough
        raise NoModel(
            f"{name} can't be called: {type(error).__name__}: {error}; expected module:function, which needs no "
            "arguments and returns an nn.Module"
        ) from None
    if not isinstance(made, nn.Module):
        raise NoModel(f"{name} returned {type(made).__name__}; expected an nn.Module")
    return made


def _config(name: str) -> Any:
    """The config of Transformers, of a folder or in its cache; ``None`` where there is none."""
    if find_spec("transformers") is None:
        if Path(name, "config.json").is_file():
            raise NoModel(f"{name} is a model of Transformers, which is not installed: pip install transformers")
        return None
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(name, local_files_only=True)
    except (OSError, ValueError) as error:
        if Path(name).is_dir():
            raise NoModel(f"{name} has no config that Transformers reads: {error}") from None
        return None


def _of_images(name: str) -> nn.Module | None:
    """A model of timm or torchvision; ``None`` where neither has it."""
    for place, maker in (("timm", "create_model"), ("torchvision.models", "get_model")):
        package = place.partition(".")[0]
        if find_spec(package) is None:
            continue
        try:
            models: Any = importlib.import_module(place)
        except (ImportError, RuntimeError) as error:
            raise NoModel(f"{package} is installed, but it can't be imported: {error}") from None
        if name in models.list_models():
            made: nn.Module = getattr(models, maker)(name)  # neither loads weights unless asked to
            return made
    return None


def _nowhere(name: str) -> str:
    missing = [one for one in ("transformers", "timm", "torchvision") if find_spec(one) is None]
    text = (
        f"{name!r} is not a folder with a config.json, nor a model in the Transformers cache, nor one of an "
        "installed timm or torchvision; expected one of these, or module:function"
    )
    return f"{text}. Not installed: {', '.join(missing)}; pip install the one that has the model" if missing else text


def _of_texts(name: str, config: Any, rows: int, length: int) -> Example:
    import transformers

    architecture = next(iter(config.architectures or ()), "")
    cls: Any = getattr(transformers, architecture, None)
    if cls is None:
        cls, architecture = transformers.AutoModelForCausalLM, "CausalLM"
    model = cls.from_config(config) if hasattr(cls, "from_config") else cls(config)
    model.to(torch.get_default_dtype()).train()
    tokens = torch.zeros(rows, length or 512, dtype=torch.long, device="cpu")
    if architecture.endswith(("CausalLM", "LMHeadModel", "MaskedLM", "ConditionalGeneration")):
        labels = tokens.clone()
    elif architecture.endswith("SequenceClassification"):
        labels = torch.zeros(rows, dtype=torch.long, device="cpu")
    else:
        raise NoModel(
            f"{name} is a {architecture}, whose inputs are not known here; expected a language model or a "
            "SequenceClassification, or module:function, which returns an nn.Module"
        )
    return Example(model, lambda model, batch: model(**batch).loss, {"input_ids": tokens, "labels": labels})


def _own(name: str, model: nn.Module, rows: int, length: int) -> Example:
    """A step with data for the first layer: tokens for an Embedding, images for a convolution, else vectors."""
    model.to("meta", torch.get_default_dtype()).train()
    kinds = (nn.Embedding, nn.Conv2d, nn.Linear)
    first: Any = next((one for one in model.modules() if isinstance(one, kinds)), None)
    if first is None:
        raise NoModel(
            f"{name} has no Embedding, convolution or Linear; expected a model whose first one gives the input "
            "shape, or plan it in a script: anybatch plan train.py"
        )
    if isinstance(first, nn.Embedding):
        inputs = torch.zeros(rows, length or 512, dtype=torch.long, device="cpu")
    elif isinstance(first, nn.Conv2d):
        side = length or getattr(model, "default_cfg", {}).get("input_size", (3, _IMAGE, _IMAGE))[-1]
        inputs = torch.zeros(rows, first.in_channels, side, side, device="cpu")
    else:
        shape = (rows, length, first.in_features) if length else (rows, first.in_features)
        inputs = torch.zeros(shape, device="cpu")

    def loss_fn(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        found: Any = model(batch["x"])
        outputs = getattr(found, "logits", found)
        logits = outputs.movedim(1, -1) if isinstance(first, nn.Conv2d) else outputs
        return F.cross_entropy(
            logits.reshape(-1, logits.shape[-1]), logits.new_zeros(logits.shape[:-1]).long().flatten()
        )

    return Example(model, loss_fn, {"x": inputs})


class LowRank(nn.Module):
    """A linear layer that stays as it is, with a trained product of two thin matrices beside it."""

    def __init__(self, layer: nn.Module, inputs: int, outputs: int, rank: int) -> None:
        super().__init__()
        self.layer = layer.requires_grad_(False)
        weight = next(iter(layer.parameters()))
        self.down = nn.Linear(inputs, rank, bias=False, device=weight.device, dtype=weight.dtype)
        self.up = nn.Linear(rank, outputs, bias=False, device=weight.device, dtype=weight.dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The layer's output, with the product's added."""
        found: torch.Tensor = self.layer(x) + self.up(self.down(x))
        return found


def add_lora(model: nn.Module, rank: int) -> None:
    """Freezes a model and puts a LoRA beside each linear layer but its head."""
    model.requires_grad_(False)
    embeddings = getattr(model, "get_output_embeddings", None)
    head = embeddings() if embeddings is not None else None
    found = [(name, one) for name, one in model.named_modules() if type(one).__name__ in ("Linear", "Conv1D")]
    for name, one in found:
        if one is head or (one is found[-1][1] and head is None):
            continue
        inputs, outputs = one.weight.shape if type(one).__name__ == "Conv1D" else reversed(one.weight.shape)
        owner, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(owner), attribute, LowRank(one, inputs, outputs, rank))


def estimate(
    name: str, *, rows: int, length: int, memory: str, device: str | None, optimizer: str, dtype: str, lora: int | None
) -> Plan:
    """Plans the step of a model that is not here, see ``example_of``; with a LoRA of a rank, or of all weights.

    ``device`` is a card, or ``None`` for one of that much memory. Raises ``NoModel``, and what ``anybatch.plan`` does.
    """
    example = example_of(name, rows, length, dtype)
    if lora is not None:
        add_lora(example.model, lora)
    trained = [one for one in example.model.parameters() if one.requires_grad]
    if not trained:
        raise NoModel(f"{name} has no linear layer except its head, so LoRA has nothing to adapt; leave --lora out")
    made = getattr(torch.optim, OPTIMIZERS[optimizer])(trained, lr=1e-3)
    return plan(
        example.model, example.loss_fn, example.batch, made, memory=memory, device=device or memory, verify="off"
    )
