"""The verdict: "healthy" of a run that was seen to learn, an error for one that was seen not to, and nothing else."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import forked_python
from anybatch.doctor.diagnosing import diagnosis
from anybatch.doctor.recorder import Doctor
from anybatch.records.diagnoses import Diagnosis
from anybatch.report.diagnosis import verdict_of

Loss = Callable[[nn.Module, torch.Tensor], torch.Tensor]


def loop(
    loss_fn: Loss, *, steps: int = 100, out: int = 3, lr: float = 1e-2, model: nn.Module | None = None
) -> nn.Module:
    """A loop of its own over new inputs."""
    net = model if model is not None else nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, out))
    optimizer = torch.optim.Adam(net.parameters(), lr=lr)
    for _ in range(steps):
        loss = loss_fn(net, torch.randn(64, 8))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return net


def judged(program: Callable[[], Any]) -> tuple[Diagnosis, str]:
    torch.manual_seed(0)
    with Doctor() as doctor:
        program()
    found = diagnosis(doctor.run)
    return found, verdict_of(found, doctor.run)


def labels_of_others() -> None:
    def loss(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(net(x), x[:, :3].argmax(1)[torch.randperm(len(x))])

    loop(loss, lr=1e-3)


def targets_of_others() -> None:
    def loss(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(net(x), x.sum(1, keepdim=True)[torch.randperm(len(x))])

    loop(loss, out=1, lr=1e-3, steps=250)


@pytest.mark.parametrize("program", [labels_of_others, targets_of_others])
def test_a_run_that_ends_at_a_constant_guess_did_not_learn(program: Callable[[], Any]) -> None:
    found, said = judged(program)
    assert found.verdict == "not learning", (found.findings, found.reason)
    assert found.to_dict()["healthy"] is False
    assert said.startswith("1 error: It did not learn"), said
    assert found.findings[0].name == "NOT_LEARNING"


class Coder(nn.Module):
    """An autoencoder whose codes are drawn."""

    def __init__(self, *, by_hand: bool) -> None:
        super().__init__()
        self.mean, self.spread = nn.Linear(8, 2), nn.Linear(8, 2)
        self.out = nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 8))
        self.by_hand = by_hand

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        mean, spread = self.mean(x), self.spread(x).exp()
        code = mean + spread * torch.randn_like(spread) if self.by_hand else torch.normal(mean, spread)
        return self.out(code), (mean.square() + spread - 2 * spread.log()).mean()


def codes(*, by_hand: bool) -> None:
    basis, net = torch.randn(2, 8) * 2, Coder(by_hand=by_hand)

    def loss(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
        y = x[:, :2] @ basis
        out, near = net(y)
        loss: torch.Tensor = F.mse_loss(out, y) + 0.01 * near
        return loss

    loop(loss, model=net, steps=250)


def test_codes_that_are_drawn_without_a_gradient_are_the_cause() -> None:
    found, _ = judged(lambda: codes(by_hand=False))
    assert [(one.name, one.severity) for one in found.causes] == [("SAMPLE_CUTS_GRADIENT", "warning")], found.reason
    assert "NOT_LEARNING" in [one.name for one in found.consequences(found.findings[0])]
    assert judged(lambda: codes(by_hand=True))[0].verdict == "learning"


def test_a_hinge_that_is_always_flat_is_an_error() -> None:
    def loss(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
        near = torch.cdist(net(x), net(x)).masked_fill(torch.eye(len(x), dtype=torch.bool), float("inf"))
        return F.relu(0.1 - near - 50).mean()

    found, _ = judged(lambda: loop(loss))
    assert (found.verdict, found.findings[0].name) == ("not learning", "GRADIENTS_ZERO")


def of_classes(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(net(x), x[:, :3].argmax(1))


def of_noise(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(net(x), x.sum(1, keepdim=True) * 0.3 + torch.randn(len(x), 1))


def of_its_own(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = ((net(x) - x[:, :3]) ** 2).mean()
    return loss


def of_a_contrast(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
    one, other = net(x + 0.1 * torch.randn_like(x)), net(x)
    return F.cross_entropy(F.normalize(one, dim=1) @ F.normalize(other, dim=1).T / 0.1, torch.arange(len(x)))


def two_players() -> None:
    maker, judge = nn.Linear(4, 8), nn.Sequential(nn.Linear(8, 16), nn.LeakyReLU(), nn.Linear(16, 1))
    optimizers = [torch.optim.Adam(one.parameters(), lr=1e-3) for one in (maker, judge)]
    ones, zeros = torch.ones(32, 1), torch.zeros(32, 1)
    for _ in range(40):
        made = maker(torch.randn(32, 4))
        optimizers[1].zero_grad()
        real = F.binary_cross_entropy_with_logits(judge(torch.randn(32, 8) + 1), ones)
        (real + F.binary_cross_entropy_with_logits(judge(made.detach()), zeros)).backward()
        optimizers[1].step()
        optimizers[0].zero_grad()
        F.binary_cross_entropy_with_logits(judge(made), ones).backward()
        optimizers[0].step()


def of_a_policy(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
    chosen = torch.distributions.Categorical(logits=net(x))
    action = chosen.sample()
    reward = (action == x[:, :3].argmax(1)).float()
    loss: torch.Tensor = -(chosen.log_prob(action) * (reward - reward.mean())).mean()
    return loss


@pytest.mark.parametrize(
    "program",
    [
        lambda: loop(of_classes),
        lambda: loop(of_noise, out=1, steps=200),
        lambda: loop(of_its_own),
        lambda: loop(of_a_contrast, out=8),
        lambda: loop(of_a_policy),
    ],
    ids=["classes", "noise", "own loss", "contrast", "policy"],
)
def test_a_run_that_learns_is_healthy(program: Callable[[], Any]) -> None:
    found, said = judged(program)
    assert (found.verdict, found.to_dict()["healthy"]) == ("learning", True), (found.findings, found.reason)
    assert said.startswith("healthy: nothing found in ")


def test_of_two_players_nobody_says_that_they_learn() -> None:
    found, said = judged(two_players)
    assert (found.verdict, found.findings) == ("undecided", ()), found.findings
    assert "does not show that anything is learned" in " ".join(said.split())


def slow(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(net(x), (x[:, 0] * x[:, 1] * x[:, 2] > 0).long())


@pytest.mark.parametrize(
    ("program", "why"),
    [
        (lambda: loop(of_classes, steps=8), "8 steps are too few"),
        (lambda: loop(lambda net, x: net(x).tanh().var() + torch.randn(()).abs() * 9), "did not clearly fall"),
        (lambda: loop(slow, out=2, steps=40), "a constant guess gives"),
    ],
    ids=["short", "no fall", "hard at first"],
)
def test_what_was_not_seen_is_not_said(program: Callable[[], Any], why: str) -> None:
    found, said = judged(program)
    assert (found.verdict, found.to_dict()["healthy"]) == ("undecided", None), (found.findings, found.reason)
    assert said.startswith("nothing found")
    assert f"but {why}" in said or why in said


def test_a_parameter_without_a_name_leaves_it_open() -> None:
    def program() -> None:
        net = nn.Linear(8, 3)
        optimizer = torch.optim.Adam([*net.parameters(), nn.Parameter(torch.ones(3))], lr=1e-2)
        for _ in range(60):
            x = torch.randn(64, 8)
            loss = F.cross_entropy(net(x) * optimizer.param_groups[0]["params"][2], x[:, :3].argmax(1))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    found, said = judged(program)
    assert found.to_dict()["healthy"] is None, found.reason
    assert "not every trained parameter was examined" in said


SCRIPT = """
import os, signal, sys, torch
from torch import nn
torch.manual_seed(0)
net = nn.Linear(4, 1)
optimizer = torch.optim.SGD(net.parameters(), lr=0.02)
for step in range(60):
    x = torch.randn(32, 4)
    loss = ((net(x) - x.sum(1, keepdim=True)) ** 2).mean()
    optimizer.zero_grad(); loss.backward(); optimizer.step()
if sys.argv[1] == "raise":
    raise ValueError("Normal(loc: torch.Size([64, 1]), scale: torch.Size([64, 1])) is wrong: it has to be positive")
if sys.argv[1] == "interrupt":
    os.kill(os.getpid(), signal.SIGINT)
    import time; time.sleep(5)
sys.exit(int(sys.argv[1]))
"""


@pytest.mark.parametrize(
    ("argument", "verdict", "healthy", "said"),
    [
        ("0", "learning", True, "healthy: nothing found in 60 steps"),
        ("3", "crashed", False, "ended with exit code 3"),
        ("raise", "crashed", False, "scale: torch.Size([64, 1])) is wrong: it has to be positive"),
        ("interrupt", "undecided", None, "nothing found in 60 steps, but it was interrupted"),
    ],
)
def test_a_crash_is_never_healthy(tmp_path: Path, argument: str, verdict: str, healthy: Any, said: str) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "anybatch", "doctor", "--json", "d.json", str(script), argument]
    done = forked_python.run(command, tmp_path)
    values = json.loads((tmp_path / "d.json").read_text())
    assert (values["verdict"], values["healthy"]) == (verdict, healthy), done.stderr
    assert said in " ".join(done.stderr.split())
