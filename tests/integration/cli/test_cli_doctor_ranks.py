"""The doctor over several processes: those of torchrun are followed, those that the script starts itself are named."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import forked_python
from anybatch.cli.doctor_child import PROCESSES, of_rank
from anybatch.cli.doctor_records import (
    compared,
    not_followed,
    records_of_ranks,
    without_records_of_ranks,
)
from anybatch.cli.options import launches_ranks
from anybatch.records.findings import Finding, Place
from anybatch.records.lines import to_line
from anybatch.records.runs import Run
from anybatch.records.tables import Started
from rule_runs import RunBuilder, simple

TRAINS = """\
import os
import torch
import torch.distributed as dist
from torch import nn
torch.set_num_threads(1)
dist.init_process_group("gloo")
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(4, 8), nn.Linear(8, 2)
    def forward(self, x):
        return self.head(torch.relu(self.body(x)))
net = nn.parallel.DistributedDataParallel(Net())
optimizer = torch.optim.SGD(net.module.body.parameters(), lr=0.1)
for step in range(6):
    x = torch.randn(8, 4)
    loss = nn.functional.cross_entropy(net(x), (x[:, 0] > 0).long())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
assert not [name for name in os.environ if name.startswith("ANYBATCH")]
dist.destroy_process_group()
"""


def test_the_processes_of_torchrun_are_followed(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAINS)
    doctor = [sys.executable, "-m", "anybatch", "doctor", "--json", "out.json", "--record", "run.jsonl"]
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone", "train.py"]
    done = subprocess.run([*doctor, *torchrun], cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    values = json.loads((tmp_path / "out.json").read_text())
    first = values["findings"][0]
    assert (first["name"], first["place"]["module"]) == ("OPT_PARAM_MISSING", "head")
    assert list(records_of_ranks(tmp_path / "run.jsonl")) == [0, 1]
    assert "Rank 1 has the same findings." in values["notes"]
    assert not (tmp_path / "run.jsonl").exists()


@pytest.mark.parametrize("when", ["before", "after"])
def test_weights_that_ranks_do_not_share_are_told(tmp_path: Path, when: str) -> None:
    """Numbers of each rank that are given after wrapping stay apart; before it, those of rank 0 win."""
    own = "torch.manual_seed(dist.get_rank())\nNET = Net()\n"
    text = TRAINS.replace("net = nn.par", own + "net = nn.par").replace("(Net())", "(NET)").replace(".body.par", ".par")
    line = "nn.init.normal_(NET.head.weight)\n"
    before = text.replace("net = nn.par", line + "net = nn.par")
    text = before if when == "before" else text.replace("optimizer =", line + "optimizer =")
    (tmp_path / "train.py").write_text(text)
    doctor = [sys.executable, "-m", "anybatch", "doctor", "--json", "out.json", "--no-ask", "--record", "run.jsonl"]
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone", "train.py"]
    done = forked_python.run([*doctor, *torchrun], tmp_path)
    assert done.returncode == 0, done.stderr
    found = [one for one in json.loads((tmp_path / "out.json").read_text())["findings"] if one["code"] == "AB752"]
    assert [one["place"]["parameters"] for one in found] == ([["head.weight"]] if when == "after" else [])
    again = forked_python.run([*doctor[:3], "report", "run.rank0.jsonl", "--json", "again.json"], tmp_path)
    assert again.returncode == 0, again.stderr
    assert ("AB752" in (tmp_path / "again.json").read_text()) == (when == "after")


def test_launchers_are_known_by_name() -> None:
    assert launches_ranks(("-m", "torch.distributed.run", "train.py"))
    assert launches_ranks(("/usr/bin/torchrun", "train.py"))
    assert not launches_ranks(("-m", "torch.utils.collect_env"))
    assert not launches_ranks(("torchrun_like.py",))


def test_records_of_an_earlier_run_are_removed_and_others_stay(tmp_path: Path) -> None:
    record = tmp_path / "run.jsonl"
    for name in ("run.rank0.jsonl", "run.rank10.jsonl", "other.rank0.jsonl", "run.rank.jsonl"):
        (tmp_path / name).touch()
    assert list(records_of_ranks(record)) == [0, 10]
    without_records_of_ranks(record)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other.rank0.jsonl", "run.rank.jsonl"]


def test_ranks_that_differ_are_told(tmp_path: Path) -> None:
    def written(built: RunBuilder, rank: int) -> Path:
        path = Path(of_rank(str(tmp_path / "run.jsonl"), rank))
        path.write_text("".join(f"{to_line(fact)}\n" for fact in built.run.facts))
        return path

    missing = RunBuilder()
    numbers = missing.model(("body.weight", "head.weight"))
    missing.optimizer(numbers[:1])
    missing.train(numbers)
    ranks = {0: written(simple(), 0), 1: written(missing, 1), 2: written(simple(), 2)}
    first, *others = compared((), ranks, kept=True)
    assert first.startswith("3 processes were followed; this is rank 0.")
    assert "run.rank1.jsonl" in first
    assert others[0].startswith("Rank 1 also has AB101 OPT_PARAM_MISSING (")
    assert others[1] == "Rank 2 has no findings, either."
    lone = Finding("x", Place("a"), name="LR_ZERO", code="AB503")
    assert "Rank 2 does not have AB503 LR_ZERO." in compared((lone,), ranks, kept=False)


@pytest.mark.parametrize(("steps", "started", "told"), [(0, True, True), (0, False, False), (3, True, False)])
def test_processes_that_a_script_starts_itself_are_named(tmp_path: Path, steps: int, started: bool, told: bool) -> None:
    if started:
        (tmp_path / PROCESSES).write_text("2")
    run = simple(steps).run if steps else Run([Started()])
    notes = not_followed(tmp_path, run)
    assert bool(notes) is told
    if told:
        assert "2 processes" in notes[0]
        assert "anybatch.Doctor(model, optimizer, path=" in notes[0]
