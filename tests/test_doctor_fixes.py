"""Fixes that are code, applied to the program that they were printed for: it runs then, and trains what it should."""

import linecache
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

from anybatch.doctor.recorder import Doctor
from anybatch.records.findings import Finding
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


def first_finding(text: str) -> tuple[Finding | None, dict[str, Any]]:
    """What is found first in a program, and its names; the program is a file, as a user's is."""
    names: dict[str, Any] = {"__name__": "__main__"}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "train.py"
        path.write_text(HEAD + text, encoding="utf-8")
        linecache.checkcache(str(path))
        with Doctor() as doctor:
            exec(compile(HEAD + text, str(path), "exec"), names)
        found = [one for one in doctor.findings if one.severity != "info"]
    return (found[0] if found else None), names


LOOP = """
optimizer = torch.optim.Adam([p for p in net.parameters() if p.requires_grad], lr=1e-2)
for _ in range(40):
    x = torch.randn(32, 6)
    optimizer.zero_grad()
    F.cross_entropy(net(x), x[:, :3].argmax(1)).backward()
    optimizer.step()
"""
FACTORS = """
class Adapter(nn.Module):
    def __init__(self):
        super().__init__()
        self.down, self.up = nn.Parameter(torch.zeros(6, 2)), nn.Parameter(torch.zeros(2, 6))
    def forward(self, x):
        return torch.tanh(x + x @ self.down @ self.up)

net = nn.Sequential(*[Adapter() for _ in range(COUNT)], nn.Linear(6, 3))
"""


@pytest.mark.parametrize("count", [1, 3])
def test_of_two_factors_that_are_zero_one_begins_at_random(count: int) -> None:
    text = FACTORS.replace("COUNT", str(count))
    found, _ = first_finding(text + LOOP)
    assert found is not None
    assert found.name == "SYMMETRIC_INIT"
    assert "are both zero" in found.message
    again, names = first_finding(text + found.fix + LOOP)
    assert again is None, again
    assert all(one.abs().max() > 0 for one in names["net"].parameters())


HIDDEN = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(6, 3)
        self.inner = HELD
        # HERE
    def forward(self, x):
        for layer in READ:
            x = torch.tanh(x + layer(x))
        return self.head(x)

net = Net()
"""


@pytest.mark.parametrize(
    ("held", "read"),
    [
        ("[nn.Linear(6, 6) for _ in range(2)]", "self.inner"),
        ("{f'a{index}': nn.Linear(6, 6) for index in range(2)}", "self.inner.values()"),
        ("torch.ones(1, requires_grad=True)", "[lambda x: self.inner * x]"),
    ],
    ids=["list", "dictionary", "tensor"],
)
def test_what_was_not_registered_is_at_the_end_of_the_constructor(held: str, read: str) -> None:
    text = HIDDEN.replace("HELD", held).replace("READ", read)
    found, _ = first_finding(text + LOOP)
    assert found is not None
    assert found.name == "OPT_PARAM_UNREGISTERED"
    again, names = first_finding(text.replace("# HERE", found.fix) + LOOP)
    assert again is None, again
    assert len(list(names["net"].parameters())) > 2
