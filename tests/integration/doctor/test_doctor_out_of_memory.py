"""A script that ends for want of memory is told what held it, and gets a change that runs in the same memory."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import forked_python
import versions
from anybatch.cli import plan_loops
from anybatch.records.events import Crashed
from plan_samples import PLAN
from source_tree import ROOT

NET = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(64, 512)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(512, 512), nn.GELU()) for _ in range(6))
        self.head = nn.Linear(512, 10)

    def forward(self, x):
        h = self.stem(x)
        for block in self.blocks:
            h = block(h)
        return self.head(h)
"""
LIMITED = """
import resource
net = Net()
opt = torch.optim.AdamW(net.parameters(), lr=1e-3)
data = [(torch.randn(32768, 64), torch.randint(0, 10, (32768,))) for _ in range(2)]
now = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (now + 640 * 2**20, resource.RLIM_INFINITY))
for x, y in data:
    opt.zero_grad()
    loss = nn.functional.cross_entropy(net(x), y)
    loss.backward()
    opt.step()
    print("loss", loss.item())
"""
ON_A_DEVICE = f"""
import sys
sys.path.insert(0, {str(ROOT / "tests")!r})
import torch
from torch import nn
from accelerator import sim
sim.load().set_limit(0, 64 * 2**20)

class Trainer:
    def __init__(self):
        layers = nn.Linear(64, 512), nn.GELU(), nn.Linear(512, 512), nn.GELU(), nn.Linear(512, 10)
        self.model = nn.Sequential(*layers).to("sim:0")
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

    def fit(self, batches):
        for x, y in batches:
            x, y = x.to("sim:0"), y.to("sim:0")
            loss = nn.functional.cross_entropy(self.model(x), y)
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            print("loss", loss.item())

Trainer().fit([(torch.randn(8192, 64), torch.randint(0, 10, (8192,))) for _ in range(2)])
"""
WITHOUT_A_STEP = (
    NET
    + """
net = Net()
grown = net(torch.zeros(1, 64).expand(10**11, 64))
"""
)


def diagnosed(folder: Path, text: str, *options: str) -> dict[str, Any]:
    """The finding of a script that runs out of memory under the doctor."""
    (folder / "train.py").write_text(text, encoding="utf-8")
    run(folder, "-m", "anybatch", "doctor", *options, "--json", "out.json", "train.py")
    found = json.loads((folder / "out.json").read_text(encoding="utf-8"))["findings"]
    only: dict[str, Any] = next(one for one in found if one["name"] == "OUT_OF_MEMORY")
    return only


def run(folder: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    """Runs Python in a folder."""
    return forked_python.run([sys.executable, *arguments], folder)


@pytest.mark.skipif(shutil.which("patch") is None, reason="the change is applied by patch")
@pytest.mark.parametrize(
    "text",
    [
        pytest.param(
            NET + LIMITED, id="limit of the process",
            marks=[  # planning needs some of the address space that is left, which differs from run to run
                versions.saved_tensors,
                pytest.mark.slow, pytest.mark.skipif(sys.platform != "linux", reason="Linux limits address space"),
            ],
        ),
        pytest.param(
            ON_A_DEVICE, id="device",
            marks=[
                versions.device_allocators,
                pytest.mark.skipif(shutil.which("g++") is None, reason="the test accelerator is built by g++"),
            ],
        ),
    ],
)  # fmt: skip
def test_the_change_runs_in_the_memory_that_was_not_enough(text: str, tmp_path: Path) -> None:
    found = diagnosed(tmp_path, text)
    assert found["fix"].startswith("# The same batch and gradient in "), found
    held = found["evidence"]
    assert held["kept by the graph"] > 2**24
    assert sum(held["modules"].values()) > held["kept by the graph"] // 2
    assert held["whole"] > held["budget"]
    if "def forward" in text:
        line = 1 + text.splitlines().index("        for block in self.blocks:")
        assert f"blocks.0.0 128.0 MiB (line {line})" in found["cause"], found
    (tmp_path / "change").write_text(found["fix"] + "\n", encoding="utf-8")
    subprocess.run(["patch", "-p1", "-i", "change"], cwd=tmp_path, check=True, capture_output=True)
    after = run(tmp_path, "train.py")
    assert after.returncode == 0, after.stderr[-2000:]
    assert after.stdout.count("loss") == 2


@pytest.mark.parametrize(
    ("call", "loads"), [('plan=anybatch.Plan.load("plan.json")', True), ("micro_batch_size=4", False)]
)
def test_where_the_plan_comes_from_that_the_change_loads(
    call: str, loads: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan_loops, "_plan", lambda found, budget: PLAN)
    found: Any = SimpleNamespace(with_change=lambda *_: {"change": f"+step = TrainStep({call})", "found": "train.py:3"})
    fix = plan_loops._planned(Crashed(name="OUT_OF_MEMORY", error="OutOfMemoryError", text=""), found, 2**30).fix
    assert ("# plan.json comes from: anybatch plan SCRIPT --memory 1.0GiB --json plan.json\n" in fix) == loads


def test_a_step_that_is_not_found_is_told(tmp_path: Path) -> None:
    found = diagnosed(tmp_path, WITHOUT_A_STEP, "--no-ask")
    assert "No plan was made" in found["fix"]
    assert "no optimizer has a name" in found["fix"]
