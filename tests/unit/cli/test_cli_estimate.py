"""``anybatch estimate``: a known model, made without weights, planned for a card that is not here."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result

import anybatch
from anybatch.cli.main import main
from anybatch.planning import estimating
from anybatch.planning.estimating import LowRank, NoModel, add_lora, example_of

transformers = pytest.importorskip("transformers")

OWN = """
from torch import nn


def words():
    return nn.Sequential(nn.Embedding(64, 32), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 64))


def images():
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5))


def vectors():
    return nn.Linear(16, 4)


def wide(width):
    return nn.Linear(width, 4)


def broken():
    raise RuntimeError("no weights here")


def nothing():
    return 7
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "ownmodels", raising=False)
    Path("ownmodels.py").write_text(OWN, encoding="utf-8")
    config = transformers.GPT2Config(n_layer=2, n_embd=32, n_head=2, vocab_size=96, architectures=["GPT2LMHeadModel"])
    config.save_pretrained("gpt2")
    return tmp_path


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["estimate", *arguments], catch_exceptions=False)


def test_a_folder_of_transformers_is_shown_as_a_table_of_what_fits_with_and_without_lora() -> None:
    done = run("gpt2", "--batch", "8", "--length", "32", "--memory", "1GiB", "--lora", "4", "--json", "plans.json")
    assert done.exit_code == 0, done.output
    assert done.output.count("micro-batches  recompute  offload") == 2
    assert done.output.index("\nall weights\n") < done.output.index("\nLoRA of rank 4\n")
    found = json.loads(Path("plans.json").read_text(encoding="utf-8"))["trained"]
    whole, low = (anybatch.Plan.load(_saved(found[name])) for name in ("all weights", "LoRA of rank 4"))
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config.from_pretrained("gpt2"))
    every = 4 * sum(one.numel() for one in model.parameters())  # the allocator rounds each up to 512 bytes
    assert whole.at_peak["parameters"] == pytest.approx(every, rel=0.03)
    layers = 2 * ((32 + 96) + (32 + 32) + (32 + 128) + (128 + 32)) * 4  # of Conv1D: inputs and outputs times rank
    assert low.at_peak["optimizer state"] == pytest.approx(2 * 4 * layers, rel=0.3)
    assert low.at_peak["parameters"] == pytest.approx(every + 4 * layers, rel=0.03)


def _saved(plan: dict[str, Any]) -> Path:
    path = Path("one.json")
    path.write_text(json.dumps(plan), encoding="utf-8")
    return path


def test_the_estimate_is_the_plan_of_the_real_model() -> None:
    plan = estimating.estimate(
        "gpt2", rows=8, length=32, memory="1GiB", device=None, optimizer="sgd", dtype="fp32", lora=None
    )
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config.from_pretrained("gpt2"))
    tokens = torch.zeros(8, 32, dtype=torch.long)
    real = anybatch.plan(
        model, lambda model, batch: model(**batch).loss, {"input_ids": tokens, "labels": tokens},
        torch.optim.SGD(model.parameters()), memory="1GiB", device="1GiB",
    )  # fmt: skip
    assert (plan.whole_bytes, plan.smallest_bytes) == (real.whole_bytes, real.smallest_bytes)


@pytest.mark.parametrize(
    ("name", "shape", "length"),
    [("words", (4, 7), 7), ("images", (4, 3, 20, 20), 20), ("vectors", (4, 16), 0), ("vectors", (4, 6, 16), 6)],
)
def test_a_function_that_returns_a_module_is_given_what_its_first_layer_takes(
    name: str, shape: tuple[int, ...], length: int
) -> None:
    model, loss_fn, batch = example_of(f"ownmodels:{name}", 4, length, "bf16")
    assert {one.device.type for one in model.parameters()} == {"meta"}
    assert {one.dtype for one in model.parameters()} == {torch.bfloat16}
    assert batch["x"].shape == shape
    real = model.to_empty(device="cpu")
    assert loss_fn(real, batch).dim() == 0


def test_what_fits_nowhere_ends_with_1_and_says_what_it_takes() -> None:
    done = run("ownmodels:words", "--memory", "1KiB")
    assert done.exit_code == 1
    assert "all weights: does not fit" in done.output
    assert "--lora 16" in done.output


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("no-such-model", "is not a folder with a config.json"),
        ("ownmodels:nothing", "returned int; expected an nn.Module"),
        ("ownmodels:missing", "can't be called"),
        ("nowhere:f", "can't be called: ModuleNotFoundError: No module named 'nowhere'"),
        ("ownmodels:wide", "missing 1 required positional argument: 'width'; expected module:function, which needs no"),
        ("ownmodels:broken", "can't be called: RuntimeError: no weights here"),
        ("torch.nn:Identity", "has no Embedding, convolution or Linear"),
    ],
)
def test_what_is_no_model_ends_with_2_and_says_what_is_one(
    name: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(estimating, "_of_images", lambda name: None)
    done = run(name, "--memory", "1GiB")
    assert done.exit_code == 2
    assert said in " ".join(done.output.split())


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(estimating, "find_spec", lambda name: None)
    done = run("resnet50", "--memory", "1GiB")
    assert "Not installed: transformers, timm, torchvision" in " ".join(done.output.split())
    with pytest.raises(NoModel, match="pip install transformers"):
        example_of("gpt2", 1, 8, "fp32")


@pytest.mark.parametrize("name", ["timm", "torchvision"])
def test_models_of_images(name: str) -> None:
    try:
        __import__(name)
    except (ImportError, RuntimeError) as error:
        pytest.skip(f"{name} can't be imported here: {error}")
    model, _, batch = example_of("resnet18", 2, 0, "fp32")
    assert batch["x"].shape == (2, 3, 224, 224)
    assert not any(one.device.type != "meta" for one in model.parameters())


def test_a_lora_of_a_model_that_has_only_a_head_is_refused() -> None:
    done = run("ownmodels:images", "--memory", "1GiB", "--lora", "4")
    assert done.exit_code == 2
    assert "has no linear layer except its head" in " ".join(done.output.split())


def test_lora_leaves_the_output_and_the_head_as_they_are() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))
    x = torch.randn(4, 8)
    before = model(x)
    add_lora(model, 2)
    first: Any = model[0]
    assert isinstance(first, LowRank)
    assert isinstance(model[2], torch.nn.Linear)
    torch.nn.init.zeros_(first.up.weight)
    assert torch.equal(model(x), before)
    assert [name for name, one in model.named_parameters() if one.requires_grad] == ["0.down.weight", "0.up.weight"]
