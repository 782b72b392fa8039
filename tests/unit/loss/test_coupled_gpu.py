"""Coupled losses on a CUDA device: its random state in both passes, and no synchronisation."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import anybatch

pytestmark = pytest.mark.gpu

ROWS, SIZE = 96, 16


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.3), nn.GELU(), nn.Linear(64, 16))
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.to("cuda")


def encode(model: Any, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    return F.normalize(model.layers(batch["a"]), dim=1), F.normalize(model.layers(batch["b"]), dim=1)


def loss(model: Any, outputs: tuple[Tensor, Tensor]) -> Tensor:
    return loss_of_rows(model, outputs, slice(0, len(outputs[0])))


def loss_of_rows(model: Any, outputs: tuple[Tensor, Tensor], rows: slice) -> Tensor:
    one, other = outputs
    own = torch.arange(rows.start, rows.stop, device=one.device)
    return F.cross_entropy(one[rows].float() @ other.float().T * model.scale.exp(), own)


def batch_of() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {name: torch.randn(ROWS, 64, generator=generator) for name in ("a", "b")}


@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
def test_bitwise_equal_for_every_number_of_kept_graphs(autocast: torch.dtype | None) -> None:
    found = []
    for keep in (99, 0, 1, 3):
        model = Encoder()
        torch.manual_seed(5)
        coupled = anybatch.Coupled(encode, loss, keep=keep)
        anybatch.backward(model, coupled, batch_of(), micro_batch_size=SIZE, autocast=autocast)
        found.append([copy.deepcopy(p.grad) for p in model.parameters()] + [torch.rand(2, device="cuda")])
    for other in found[1:]:
        assert all(a is not None and b is not None and torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


@pytest.mark.parametrize("options", [{}, {"keep": 0}, {"row_block": 32}])
def test_a_step_does_not_synchronise_from_the_second_on(options: dict[str, Any]) -> None:
    model = Encoder()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    coupled = anybatch.Coupled(encode, loss_of_rows if "row_block" in options else loss, **options)
    step = anybatch.TrainStep(model, coupled, optimizer, micro_batch_size=SIZE, clip_norm=1.0)
    batch = {name: leaf.pin_memory() for name, leaf in batch_of().items()}
    step(batch)  # compares both passes, once
    step(batch)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        out = step(batch)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert out.loss > 0


def test_values_that_are_not_the_same_again_are_refused() -> None:
    own = torch.Generator("cuda").manual_seed(0)

    def draws(model: Any, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        one, other = encode(model, batch)
        return one * (torch.rand(one.shape, generator=own, device="cuda") > 0.3), other

    model = Encoder()
    with pytest.raises(anybatch.LossError, match="has different values when encode runs again"):
        anybatch.backward(model, anybatch.Coupled(draws, loss), batch_of(), micro_batch_size=SIZE)
    assert all(parameter.grad is None for parameter in model.parameters())
