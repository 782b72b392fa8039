"""A plan under ghost BatchNorm leaves no micro-batch with one value a channel, which has no variance."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import anybatch
from memory_steps import peak_of_call, plan_of


class Normalised(nn.Module):
    def __init__(self, *, recurrent: bool, spatial: bool = False) -> None:
        super().__init__()
        self.first: nn.Module = nn.LSTM(6, 8, batch_first=True) if recurrent else nn.Linear(6, 8)
        self.norm, self.spatial = nn.BatchNorm1d(8), spatial

    def forward(self, x: Tensor) -> Tensor:
        found = self.first(x)
        found = found[0] if isinstance(found, tuple) else found
        y: Tensor = self.norm(found.transpose(1, 2) if self.spatial else found[:, -1])
        return y


def square(model: Any, batch: Any) -> Any:
    return model(batch).square().mean()


def sizes_of(rows: int, size: float) -> list[int]:
    return [min(int(size), rows - start) for start in range(0, rows, int(size))]


@pytest.mark.parametrize("recurrent", [False, True])
@pytest.mark.parametrize("rows", [3, 5, 13, 21, 25, 37])
def test_no_sample_is_alone(recurrent: bool, rows: int) -> None:
    torch.manual_seed(0)
    model, batch = Normalised(recurrent=recurrent), torch.randn(rows, 4, 6)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    smallest = anybatch.plan(model, square, batch, optimizer, memory=2**40, batch_norm="ghost").smallest_bytes
    for share in (1.06, 1.2, 1.5, 2.0, 3.0):
        step = anybatch.TrainStep(model, square, optimizer, memory=int(smallest * share), batch_norm="ghost")
        plan = step(batch).plan
        assert plan is not None
        assert min(sizes_of(rows, plan.micro_batch_size)) > 1


def test_a_sample_with_several_values_a_channel_may_be_alone() -> None:
    torch.manual_seed(0)
    model, batch = Normalised(recurrent=False, spatial=True), torch.randn(9, 40, 6)
    plan = anybatch.plan(model, square, batch, memory=2**40, batch_norm="ghost")
    step = anybatch.TrainStep(
        model, square, torch.optim.SGD(model.parameters(), lr=0.0), memory=plan.smallest_bytes, batch_norm="ghost"
    )
    assert step(batch).micro_batches == 9


@pytest.mark.parametrize("rows", [24, 25, 32])
@pytest.mark.parametrize("share", [1.0, 1.3, 2.0])
def test_statistics_of_many_micro_batches_take_no_more_than_those_of_two(rows: int, share: float) -> None:
    torch.manual_seed(0)
    width = 256
    model = nn.Sequential(nn.Linear(8, width), nn.BatchNorm1d(width), nn.Tanh(), nn.Linear(width, 2))
    batch = torch.randn(rows, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    smallest = anybatch.plan(model, square, batch, optimizer, memory=2**40, batch_norm="ghost").smallest_bytes
    step = anybatch.TrainStep(model, square, optimizer, memory=int(share * smallest), batch_norm="ghost")
    step(batch)
    measured, predicted = peak_of_call(step, batch), plan_of(step).peak_bytes
    assert plan_of(step).chosen.micro_batches > 2 or share > 1.3
    assert measured <= int(share * smallest)
    assert abs(predicted - measured) <= 0.005 * measured
