"""Plain scripts, and what ``anybatch plan`` finds in them."""

import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from anybatch.cli.plan_loops import FoundStep, LoopWatch

HEAD = """
import torch
from torch import nn

torch.manual_seed(0)


def whole(module):
    with torch.no_grad():
        for one in module.parameters():
            one.copy_(torch.randint(-2, 3, one.shape))
    return module.double()


model = whole(nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4)))
optimizer = torch.optim.SGD(model.parameters(), lr=2**-12)
inputs = torch.randint(-2, 3, (256, 8)).double()
targets = torch.randint(-2, 3, (256, 4)).double()
loader = [(inputs, targets)]
seen = []
"""


class Stop(BaseException):
    """Ends a script at its first step, as the child process of the command line does."""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.Tensor, "backward", torch.Tensor.backward)  # put back as it is at the end
    for name in ("anybatch.step", "anybatch.backpropagation"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return tmp_path


def found(text: str) -> FoundStep:
    """What is found in a script, which ends there."""
    Path("train.py").write_text(HEAD + text, encoding="utf-8")
    given: list[Any] = []
    original = torch.Tensor.backward

    def stop(*seen: Any) -> None:
        given.extend(seen)
        raise Stop

    watch = LoopWatch(stop, pytest.fail)
    watch.attach()
    try:
        with pytest.raises(Stop):
            runpy.run_path("train.py", run_name="__main__")
    finally:
        watch.detach()
        torch.Tensor.backward = original  # type: ignore[method-assign]
    return FoundStep(*given)


BATCHES = "loader = [(inputs[i : i + 64], targets[i : i + 64]) for i in range(0, 256, 64)]\n"
STEP = """
        optimizer.zero_grad()
        out = model(x)
        loss = (out - y).square().mean()
        loss.backward()
        {}
        optimizer.step()
"""


def epochs(
    between: str = "pass", *, before: str = "", first: str = "pass", behind: str = "", last: str = "pass"
) -> str:
    """Two epochs of a loop, with lines before it, in each epoch, and between the backward and the step."""
    loop = STEP.replace("{}", between) + f"        {behind or 'pass'}"
    return f"{BATCHES}{before}\nfor epoch in range(2):\n    {first}\n    for x, y in loader:{loop}\n    {last}\n"


def ahead(lines: str, before: str = "", *, last: str = "pass") -> str:
    """The same with lines between the forward and the backward."""
    lines = lines.replace("\n", "\n        ")
    return epochs(before=before, last=last).replace(
        "        loss.backward()", f"        {lines}\n        loss.backward()"
    )


def run(text: str, name: str) -> dict[str, Any]:
    Path(name).write_text(text, encoding="utf-8")
    return runpy.run_path(name, run_name="__main__")


def changed(text: str) -> str:
    answer = found(text).with_change({"plan": {"chosen": {"micro_batch_size": 32}}}, {"memory": "free"})
    assert not answer["trouble"]
    subprocess.run(["patch", "-p1"], input=answer["change"], text=True, check=True, capture_output=True)
    return Path("train.py").read_text(encoding="utf-8").replace('memory="free"', "micro_batch_size=32")
