"""Fixes that are code, applied to the program that they were printed for: it runs then, and trains what it should."""

import linecache
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

from anybatch.doctor.recorder import Doctor
from anybatch.records.findings import TESTED, Finding, is_tested
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


START = """
net = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 3))
optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
# MADE
for step in range(60):
    # BEGIN
    x = torch.randn(64, 6)
    optimizer.zero_grad()
    loss = F.cross_entropy(net(x), x[:, :3].argmax(1))
    # BEFORE
    loss.backward()
    # AFTER
    optimizer.step()
"""

FAULTS: dict[str, tuple[list[tuple[str, str]], str]] = {
    "ZERO_GRAD_MISSING": ([("    optimizer.zero_grad()\n", "")], "BEFORE"),
    "STEP_MISSING": ([("    optimizer.step()\n", "")], "AFTER"),
    "OPT_PARAM_MISSING": ([("Adam(net.parameters()", "Adam(net[0].parameters()")], "MADE"),
    "LR_TOO_HIGH": ([("torch.optim.Adam", "torch.optim.SGD"), ("lr=1e-2", "lr=30.0, weight_decay=1e-4")], "MADE"),
    "LR_TOO_LOW": ([("torch.optim.Adam", "torch.optim.SGD"), ("lr=1e-2", "lr=1e-9, momentum=0.9")], "MADE"),
    "CLIP_NO_EFFECT": (
        [("    # BEFORE", "    nn.utils.clip_grad_norm_(net.parameters(), 1.0)  # WRONG")],
        "AFTER",
    ),
    "EVAL_IN_TRAINING": ([("    # AFTER", "    # AFTER\n    if step == 20: net.eval()")], "BEGIN"),
}
"""For a finding what is changed in a sound program, and the mark where its fix belongs, as its own text says."""


@pytest.mark.parametrize("name", FAULTS)
def test_a_fix_that_is_code_mends_the_program(name: str) -> None:
    changes, mark = FAULTS[name]
    text = START
    for old, new in changes:
        text = text.replace(old, new)
    found, _ = first_finding(text)
    assert found is not None
    assert (found.name, found.fix_kind) == (name, "tested"), found
    indent = "" if mark == "MADE" else "    "
    mended = "\n".join(line for line in text.splitlines() if not line.endswith("# WRONG"))
    mended = mended.replace(f"{indent}# {mark}", "\n".join(indent + line for line in found.fix.splitlines()), 1)
    again, _ = first_finding(mended)
    assert again is None, (again, mended)


def test_settings_of_the_user_stay_where_the_rate_is_changed() -> None:
    changes, _ = FAULTS["LR_TOO_HIGH"]
    found, names = first_finding(START.replace(*changes[0]).replace(*changes[1]))
    assert found is not None
    exec(found.fix, names)
    (group,) = names["optimizer"].param_groups
    assert group["weight_decay"] == 1e-4
    assert group["lr"] < 0.1


STATE = """
rnn, head = nn.LSTM(6, 8), nn.Linear(8, 3)
optimizer = torch.optim.Adam([*rnn.parameters(), *head.parameters()], lr=1e-2)
state = (torch.zeros(1, 64, 8), torch.zeros(1, 64, 8))
for _ in range(30):
    x = torch.randn(1, 64, 6)
    out, state = rnn(x, state)
    loss = F.cross_entropy(head(out[0]), x[0, :, :3].argmax(1))
    optimizer.zero_grad()
    loss.backward()  # CRASH
    optimizer.step()
"""


def test_a_state_is_let_go_of_where_the_fix_says(tmp_path: Path) -> None:
    crashed, _ = crash(tmp_path, STATE)
    assert crashed.name == "BACKWARD_TWICE_STATE"
    assert is_tested(crashed.name, crashed.fix)
    found, _ = first_finding(STATE.replace("    out, state", f"    {crashed.fix}\n    out, state"))
    assert found is None


def test_what_is_called_tested_is_tested_here() -> None:
    with open(__file__, encoding="utf-8") as file:  # noqa: PTH123
        text = file.read()
    assert not [name for name in TESTED if f'"{name}"' not in text]
    assert not is_tested("LR_TOO_HIGH", "nothing while the loss falls")
    assert not is_tested("GRAPH_CUT", "x = 1")
