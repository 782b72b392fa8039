"""Fixes that are code, applied to the program that they were printed for: it runs then, and trains what it should."""

from pathlib import Path

import torch

from crash_running import crash
from crash_scripts.graphs import HEAD

PLAYERS = """
torch.manual_seed(0)
maker, judge = nn.Linear(4, 8), nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
opt_g, opt_d = torch.optim.Adam(maker.parameters()), torch.optim.Adam(judge.parameters())
ones, zeros = torch.ones(16, 1), torch.zeros(16, 1)
for _ in range(3):
    opt_g.zero_grad()
    made = maker(torch.randn(16, 4))
    loss_g = F.binary_cross_entropy_with_logits(judge(made), ones)
    loss_g.backward()
    opt_g.step()
    opt_d.zero_grad()
    loss_real = F.binary_cross_entropy_with_logits(judge(torch.randn(16, 8)), ones)
    loss_fake = F.binary_cross_entropy_with_logits(judge(made), zeros)
    loss_d = (loss_real + loss_fake) / 2
    loss_d.backward()  # CRASH
    opt_d.step()
"""


def test_the_second_of_two_players_takes_what_the_first_made_as_given(tmp_path: Path) -> None:
    crashed, _ = crash(tmp_path, PLAYERS)
    wrong = "loss_fake = F.binary_cross_entropy_with_logits(judge(made), zeros)"
    assert crashed.name == "BACKWARD_TWICE"
    assert crashed.evidence["origin_code"] == wrong
    values: dict[str, object] = {}
    exec(HEAD + PLAYERS.replace(wrong, crashed.fix), values)
    maker = values["maker"]
    assert isinstance(maker, torch.nn.Module)
    moved = [one.detach().clone() for one in maker.parameters()]
    exec(HEAD + PLAYERS.replace(wrong, crashed.fix).replace("range(3)", "range(0)"), values)
    other = values["maker"]
    assert isinstance(other, torch.nn.Module)
    assert not any(torch.equal(one, start) for one, start in zip(moved, other.parameters(), strict=True))


SHARED = """
torch.manual_seed(0)
maker, judge = nn.Linear(4, 8), nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
opt_g, opt_d = torch.optim.Adam(maker.parameters()), torch.optim.Adam(judge.parameters())
for _ in range(3):
    score = judge(maker(torch.randn(16, 4)))
    loss_d, loss_g = F.softplus(score).mean(), F.softplus(-score).mean()
    opt_d.zero_grad()
    loss_d.backward(retain_graph=True)
    opt_d.step()
    opt_g.zero_grad()
    loss_g.backward()  # CRASH
    opt_g.step()
"""


def test_a_step_is_not_moved_behind_the_backward_of_another_player(tmp_path: Path) -> None:
    crashed, _ = crash(tmp_path, SHARED)
    assert crashed.name == "INPLACE_ON_SAVED"
    assert crashed.fix.startswith("compute the loss of `loss_g.backward()` anew behind `opt_d.step()`")
    alone = SHARED.replace("opt_g.", "opt_d.")  # one optimizer: its step belongs behind both
    assert crash(tmp_path, alone)[0].fix == "`opt_d.step()` after `loss_g.backward()`"
