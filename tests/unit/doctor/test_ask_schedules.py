"""Schedulers that a program makes and never steps, and others of which nothing is said."""

from pathlib import Path

import pytest

from fix_running import trial

PROGRAM = """
import torch
from torch import nn
from torch.optim.lr_scheduler import ConstantLR, OneCycleLR, ReduceLROnPlateau, SequentialLR, StepLR
def train(steps, epochs=1):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    {made}
    for epoch in range(epochs):
        for _ in range(steps):
            x = torch.randn(16, 4)
            loss = (model(x) - x[:, :1]).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            {each}
        {after}
train({steps})
"""


def told(tmp_path: Path, made: str, steps: int = 40, each: str = "pass", after: str = "pass") -> list[tuple[str, str]]:
    text = PROGRAM.format(made=made, steps=steps, each=each, after=after)
    found = trial(tmp_path / "train.py", text, steps=1000).diagnosis.findings
    return [(one.severity, one.fix.partition("  #")[0]) for one in found if one.name == "SCHED_NEVER_STEPPED"]


@pytest.mark.parametrize(
    ("made", "fix"),
    [
        ("sched = OneCycleLR(optimizer, 0.1, total_steps=40)", "sched.step()"),
        ("sched = StepLR(optimizer, 10); print(sched.get_last_lr())", "sched.step()"),
        ("sched = SequentialLR(optimizer, [ConstantLR(optimizer), StepLR(optimizer, 9)], [3])", "sched.step()"),
        ("StepLR(optimizer, 10)", "scheduler.step()"),
        ("sched = StepLR(optimizer, 10)\n    if epochs > 9: trainer.step(model, steps)", "sched.step()"),
    ],
)
def test_a_schedule_that_no_line_steps_is_told(tmp_path: Path, made: str, fix: str) -> None:
    assert told(tmp_path, made) == [("warning", fix)]


@pytest.mark.parametrize(
    ("made", "rest"),
    [
        ("sched = StepLR(optimizer, 10)", {"after": "sched.step()"}),
        ("sched = StepLR(optimizer, 10)", {"after": "if epoch > 5: sched.step()"}),  # later in a longer run
        ("sched = StepLR(optimizer, 10)", {"each": "for one in [sched]: one.step()"}),
        ("sched = StepLR(optimizer, 10)", {"after": "call = sched.step"}),
        ("sched = ReduceLROnPlateau(optimizer)", {}),
        ("sched = OneCycleLR(optimizer, 0.1, total_steps=40)", {"steps": 10}),
        ("sched = OneCycleLR(optimizer, 0.1, total_steps=40)", {"each": "optimizer.param_groups[0]['lr'] *= 1.01"}),
        ("sched = StepLR(optimizer, 10); hooks = set(); hooks.add(sched)", {}),  # it may be stepped there
        ("sched = StepLR(torch.optim.SGD(model.parameters(), lr=1.0), 10)", {}),  # for a plot
    ],
)
def test_nothing_is_said_of_a_schedule_that_something_may_step(tmp_path: Path, made: str, rest: dict[str, str]) -> None:
    assert not told(tmp_path, made, **rest)  # type: ignore[arg-type]
