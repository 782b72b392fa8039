"""Weights that are drawn anew while their optimizer goes on are told of, and those that are put back are not."""

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from anybatch.doctor.ask.copies import about_redrawn
from anybatch.doctor.samples.redraws import Redraws

Writes = Callable[[nn.Linear, int], object]


def told_of(writes: Writes, folds: int = 1) -> list[dict[str, Any]]:
    """What is told of a training of 60 steps, before each of which something may write to its net."""
    torch.manual_seed(0)
    net, redraws = nn.Linear(20, 10), Redraws()
    for fold in range(folds):
        optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
        for step in range(60 // folds):
            writes(net, step)
            optimizer.zero_grad()
            net(torch.randn(8, 20)).square().mean().backward()
            redraws.look(fold, optimizer)
            optimizer.step()
    kept: Any = SimpleNamespace(redraws=redraws)
    run: Any = None
    return [dict(one.evidence) for one in about_redrawn(kept, run)]


def each_epoch(write: Callable[[nn.Linear], object]) -> Writes:
    return lambda net, step: write(net) if step % 12 == 0 else None


@pytest.mark.parametrize("write", [nn.Linear.reset_parameters, lambda net: net.weight.data.normal_()])
def test_weights_that_each_epoch_draws_anew_are_told_of(write: Callable[[nn.Linear], object]) -> None:
    assert told_of(each_epoch(write)) == [{"optimizer": 0, "times": 4, "every": 12}]


def test_weights_that_go_on_or_are_put_back_or_begin_a_fold_are_not_told_of() -> None:
    torch.manual_seed(1)
    first = copy.deepcopy(nn.Linear(20, 10).state_dict())
    assert told_of(lambda net, step: None) == []
    assert told_of(each_epoch(lambda net: net.load_state_dict(first))) == []
    assert told_of(each_epoch(lambda net: net.weight.data.clamp_(-0.1, 0.1))) == []
    assert told_of(lambda net, step: net.reset_parameters()) == []  # at every step
    assert told_of(each_epoch(nn.Linear.reset_parameters), folds=5) == []
    # Small weights become others in each of the first steps at a high rate, as if they were drawn.
    assert told_of(lambda net, step: net.reset_parameters() if step < 4 else None) == []
