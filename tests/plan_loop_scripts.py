"""Plain scripts, and what ``anybatch plan`` finds in them."""

import runpy
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
