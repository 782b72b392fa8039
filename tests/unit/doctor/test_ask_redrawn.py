"""Weights that are drawn anew while their optimizer goes on are told of, and those that are put back are not."""

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from anybatch.doctor.ask.copies import about_redrawn, about_undone
from anybatch.doctor.samples.alongside import Redraws

Writes = Callable[[nn.Linear, int], object]
BEGINNING = nn.Linear(20, 10).state_dict()


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
    kept: Any = SimpleNamespace(redraws=redraws, tapes={}, passed=[])
    run: Any = None
    return [dict(one.evidence) for one in about_redrawn(kept, run)]


def undone(writes: Writes) -> list[dict[str, Any]]:
    """What is told of a training after each step of which something may write to its net."""
    torch.manual_seed(0)
    net, redraws = nn.Linear(20, 10), Redraws()
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-2, momentum=0.9)
    for step in range(30):
        optimizer.zero_grad()
        x = torch.randn(8, 20)
        F.cross_entropy(net(x), x[:, :10].argmax(1)).backward()
        redraws.look(0, optimizer)
        optimizer.step()
        if step < 10 or step % 10 == 0:
            redraws.look_after(0)
        writes(net, step)
    kept: Any = SimpleNamespace(redraws=redraws, tapes={}, passed=[])
    run: Any = None
    return [dict(one.evidence) for one in about_undone(kept, run)]


def rounded(net: nn.Linear, bits: int) -> torch.Tensor:
    weight = net.weight.detach()
    scale: torch.Tensor = weight.abs().max() / float(2 ** (bits - 1) - 1)
    whole: torch.Tensor = torch.round(weight / scale)
    return whole * scale


@pytest.mark.parametrize("writes", [
    lambda net, step: net.load_state_dict(BEGINNING),
    lambda net, step: net.weight.data.copy_(rounded(net, 3)),
    lambda net, step: setattr(net.weight, "data", rounded(net, 3)),
    lambda net, step: setattr(net.weight, "data", net.weight.data.half().round().float()),
])  # fmt: skip
def test_steps_that_are_taken_back_are_told_of(writes: Writes) -> None:
    (told,) = undone(writes)
    assert told["steps"] >= 9
    assert abs(told["cosine"]) < 0.1


def test_steps_that_are_kept_in_part_or_put_back_now_and_then_are_not_told_of() -> None:
    writes: list[Writes] = [
        lambda net, step: None,
        lambda net, step: net.weight.data.clamp_(-0.01, 0.01),  # as the critic of a WGAN
        lambda net, step: net.weight.data.div_(net.weight.data.norm(dim=1, keepdim=True)),
        lambda net, step: net.weight.data.mul_(1 - 1e-3),
        lambda net, step: net.load_state_dict(BEGINNING) if step % 5 == 4 else None,  # an inner loop
        lambda net, step: setattr(net.weight, "data", rounded(net, 16)),
    ]
    assert [undone(write) for write in writes] == [[]] * len(writes)


def each_epoch(write: Callable[[nn.Linear], object]) -> Writes:
    return lambda net, step: write(net) if step % 12 == 0 else None


@pytest.mark.parametrize("write", [nn.Linear.reset_parameters, lambda net: net.weight.data.normal_()])
def test_weights_that_each_epoch_draws_anew_are_told_of(write: Callable[[nn.Linear], object]) -> None:
    assert told_of(each_epoch(write)) == [{"optimizer": 0, "times": 4, "every": 12}]


@pytest.mark.parametrize("every", [70, 83])
def test_weights_that_are_drawn_anew_late_are_told_of_though_not_every_step_is_looked_at(every: int) -> None:
    torch.manual_seed(0)
    net, redraws = nn.Linear(20, 10), Redraws()
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    for step in range(7 * every):
        if step >= 2 * every and step % every == 0:
            net.reset_parameters()
        optimizer.zero_grad()
        net(torch.randn(8, 20)).square().mean().backward()
        redraws.look(0, optimizer, sampled=step < 10 or step % 25 == 0)
        optimizer.step()
    kept: Any = SimpleNamespace(redraws=redraws, tapes={}, passed=[])
    run: Any = None
    (told,) = about_redrawn(kept, run)
    assert told.evidence["times"] == 5
    assert abs(told.evidence["every"] - every) <= 1


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
