"""Optimizers that step by turns: what counts is the iteration, wherever in an epoch the run was stopped."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from anybatch.doctor.recorder import Doctor
from anybatch.records.findings import Finding

BATCHES, ROWS = 40, 16


def players(count: int, share: float, *, repeats: int = 1) -> list[Finding]:
    """A maker, a judge and perhaps a third optimizer of both, over a share of an epoch; errors and warnings."""
    torch.manual_seed(0)
    maker, judge = nn.Linear(4, 8), nn.Sequential(nn.Linear(8, 16), nn.LeakyReLU(), nn.Linear(16, 2))
    optimizer_g = torch.optim.Adam(maker.parameters(), lr=1e-3)
    optimizer_d = torch.optim.Adam(judge.parameters(), lr=1e-3)
    optimizer_i = torch.optim.Adam([*maker.parameters(), *judge.parameters()], lr=1e-3)
    data = torch.randn(BATCHES // repeats, ROWS, 8).repeat_interleave(repeats, 0).flatten(0, 1)
    loader = DataLoader(TensorDataset(data), batch_size=ROWS)
    ones, zeros = torch.ones(ROWS, 1), torch.zeros(ROWS, 1)
    with Doctor(every=1) as doctor:
        for number, (real,) in enumerate(loader):
            if number == round(share * BATCHES):
                break
            optimizer_g.zero_grad()
            made = maker(torch.randn(ROWS, 4))
            F.binary_cross_entropy_with_logits(judge(made)[:, :1], ones).backward()
            optimizer_g.step()

            optimizer_d.zero_grad()
            loss = F.binary_cross_entropy_with_logits(judge(real)[:, :1], ones)
            if repeats == 1:  # what comes last before the backward is looked at
                loss = loss + F.binary_cross_entropy_with_logits(judge(made.detach())[:, :1], zeros)
            loss.backward()
            optimizer_d.step()
            if count == 3:
                optimizer_i.zero_grad()
                code = torch.rand(ROWS, 4)
                F.mse_loss(judge(maker(code))[:, 1], code[:, 0]).backward()
                optimizer_i.step()
    return [one for one in doctor.findings if one.severity != "info"]


@pytest.mark.parametrize("share", [0.05, 0.5, 1.0])
@pytest.mark.parametrize("count", [2, 3])
def test_players_that_see_what_the_other_made_are_left_alone(count: int, share: float) -> None:
    assert players(count, share) == []


def test_a_loader_that_gives_copies_is_found_where_two_play() -> None:
    found = players(2, 0.8, repeats=2)
    assert [one.name for one in found] == ["DATA_REPEATED"]
