"""The proof on an accelerator: fp16 with its scaler, bfloat16, dropout that the device draws; nothing is left."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import anybatch
from anybatch import accelerators

DEVICE = accelerators.usual()
pytestmark = pytest.mark.skipif(DEVICE is None, reason="needs a GPU, or scripts/test --device sim")
ROWS = 16


def net(dtype: torch.dtype = torch.float32, dropout: float = 0.1) -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.TransformerEncoderLayer(64, 4, 128, batch_first=True, dropout=dropout) for _ in range(3)]
    return nn.Sequential(nn.Linear(32, 64), *layers, nn.Linear(64, 40)).to(DEVICE, dtype)


def batch_of(dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    generator = torch.Generator(torch.get_default_device()).manual_seed(1)
    y = torch.randint(40, (ROWS, 24), generator=generator)
    for row in range(ROWS):
        y[row, 24 - row :] = -100
    return {"x": torch.randn(ROWS, 24, 32, generator=generator).to(dtype), "y": y}


def loss_fn(model: Any, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch["x"]).flatten(0, 1).float(), batch["y"].flatten())


OPTIONS: dict[str, dict[str, Any]] = {
    "float32": {}, "fp16": {"autocast": torch.float16}, "bf16 mixed": {"autocast": torch.bfloat16},
    "bf16": {"dtype": torch.bfloat16}, "budget": {"memory": "24MiB", "dropout_rate": 0.0},
    "budget, bf16 mixed": {"memory": "24MiB", "autocast": torch.bfloat16},
}  # fmt: skip


def stepped(name: str, **more: Any) -> tuple[Any, list[torch.Tensor]]:
    options = dict(OPTIONS[name])
    dtype, rate = options.pop("dtype", torch.float32), options.pop("dropout_rate", 0.1)
    if "memory" not in options:
        options["micro_batch_size"] = 6
    model = net(dtype, rate)
    if more.get("plan") is not None:
        del options["memory"]
    step = anybatch.TrainStep(model, loss_fn, torch.optim.AdamW(model.parameters()), **{**options, **more})
    torch.manual_seed(3)
    out = step(batch_of(dtype))
    random = torch.get_device_module(DEVICE).get_rng_state()
    return out, [*(value.clone() for value in model.state_dict().values()), random]


@pytest.mark.parametrize("name", OPTIONS)
def test_a_legal_step_is_let_through_and_nothing_is_left_of_it(name: str) -> None:
    out, values = stepped(name, count=anybatch.count_tokens("y"))
    if out.micro_batches == 1:
        pytest.skip("it fits as a whole")
    assert out.proof is not None
    assert out.proof.by == "comparison", str(out.proof)
    # The same plan: another one may be the faster one the second time.
    _, expected = stepped(name, count=anybatch.count_tokens("y"), verify="off", plan=out.plan)
    assert all(torch.equal(one, other) for one, other in zip(values, expected, strict=True))


@pytest.mark.parametrize("name", [name for name in OPTIONS if "budget" not in name])
def test_a_wrong_count_is_stopped(name: str) -> None:
    with pytest.raises(anybatch.NotSplittable, match="averaged over"):
        stepped(name)
