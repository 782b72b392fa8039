"""The doctor while the script still runs: findings at once, ends for them, reports on demand."""

import json
import signal
import subprocess
from pathlib import Path

import pytest

from anybatch.records.events import Ended, Stepped
from anybatch.records.runs import load_run
from doctor_scripts import DOCTOR, doctor, environment, forked_doctor
from source_tree import PACKAGE
from versions import SHOWS_SAVED_TENSORS

LOOP = """
import os, sys, time
import torch
import torch.nn.functional as F

torch.manual_seed(0)
body, head = torch.nn.Linear(4, 8), torch.nn.Linear(8, 3)
model = torch.nn.Sequential(body, torch.nn.Tanh(), head)
optimizer = torch.optim.SGD((body if "forgotten" in sys.argv else model).parameters(), lr=0.1)
scaler = torch.amp.GradScaler("cpu", enabled="scaled" in sys.argv)
ended, step = time.monotonic() + 200, 0
most = 200 if "short" in sys.argv else 10**9
while time.monotonic() < ended and step < most and not os.path.exists("end"):
    x = torch.randn(8, 4)
    if step == 40 and "nan" in sys.argv:
        x[0, 0] = float("nan")
    optimizer.zero_grad()
    scaler.scale(F.cross_entropy(model(x), torch.arange(8) % 3)).backward()
    scaler.step(optimizer)
    scaler.update()
    step += 1
    open("began", "a").close()
    time.sleep(0.002)
print("ended", step, time.monotonic() < ended)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text(LOOP, encoding="utf-8")
    return tmp_path


@pytest.mark.parametrize("words", [["nan"], ["nan", "scaled"]])
def test_a_run_without_end_is_stopped_by_what_is_not_finite(folder: Path, words: list[str]) -> None:
    done = forked_doctor(folder, "--no-ask", "--stop-on", "nan", "--json", "out.json", "train.py", *words)
    assert done.code == 3, done.err
    where = "data have" if SHOWS_SAVED_TENSORS else "loss has"  # data are read from what the graph has saved
    assert f"anybatch doctor: step 40: error AB555 The {where} the first nan" in done.err
    values = json.loads((folder / "out.json").read_text(encoding="utf-8"))
    assert values["findings"][0]["code"] == "AB555"
    assert any("as --stop-on asked for" in note for note in values["notes"])
    assert "ended" not in done.out


def test_a_run_is_stopped_by_any_finding(folder: Path) -> None:
    done = forked_doctor(folder, "--no-ask", "--stop-on", "nan,opt_param_missing", "train.py", "forgotten")
    assert done.code == 3, done.err
    assert "error AB101" in done.err


def test_what_is_ignored_stops_nothing_and_is_not_told(folder: Path) -> None:
    done = forked_doctor(
        folder, "--no-ask", "--stop-on", "error", "--ignore", "AB101", "train.py", "forgotten", "short"
    )
    assert (done.code, done.out) == (0, "ended 200 True\n")
    assert "anybatch doctor: step" not in done.err


def test_a_healthy_run_is_told_nothing_of(folder: Path) -> None:
    done = forked_doctor(folder, "--no-ask", "--stop-on", "error,AB5", "train.py", "short")
    assert (done.code, done.out) == (0, "ended 200 True\n")
    assert "anybatch doctor: step" not in done.err


def test_a_run_ends_after_some_steps(folder: Path) -> None:
    done = forked_doctor(folder, "--no-ask", "--steps", "30", "--record", "run.jsonl", "--fail-on", "error", "train.py")
    assert (done.code, done.out) == (0, ""), done.err
    run = load_run(folder / "run.jsonl")
    assert len(list(run.of(Stepped))) == run.steps == 30
    done = forked_doctor(folder, "--no-ask", "--steps", "30", "--fail-on", "error", "train.py", "forgotten")
    assert done.code == 1


def test_steps_of_a_train_step_are_counted(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import torch, anybatch\n"
        "model = torch.nn.Linear(4, 1)\n"
        "optimizer = torch.optim.Adam(model.parameters())\n"
        "loss = lambda model, batch: model(batch).square().mean()\n"
        "step = anybatch.TrainStep(model, loss, optimizer, micro_batch_size=4)\n"
        "while True:\n    step(torch.randn(16, 4))\n",
        encoding="utf-8",
    )
    done = forked_doctor(tmp_path, "--no-ask", "--steps", "12", "--record", "run.jsonl", "train.py")
    assert done.code == 0, done.err
    assert "Traceback" not in done.err
    assert load_run(tmp_path / "run.jsonl").steps == 12


@pytest.mark.parametrize("words", [["bogus"], ["AB9X"], ["nan,error,nothing"]])
def test_what_stops_nothing_is_refused(folder: Path, words: list[str]) -> None:
    done = doctor(folder, "--stop-on", *words, "train.py")
    assert done.code == 2
    assert "--stop-on: got" in done.err


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a stream that can't be written to")
def test_a_run_is_stopped_where_nothing_can_be_told(folder: Path) -> None:
    with Path("/dev/full").open("w", encoding="utf-8") as full:
        done = subprocess.run(
            [*DOCTOR, "--no-ask", "--stop-on", "nan", "--record", "run.jsonl", "train.py", "nan"], cwd=folder,
            env=environment(PACKAGE.parent), stdout=subprocess.PIPE, stderr=full, text=True, timeout=180, check=False,
        )  # fmt: skip
    assert done.returncode in (3, 120)  # of Python itself, which could not write what was left
    assert [one.exit_code for one in load_run(folder / "run.jsonl").of(Ended)] == [128 + signal.SIGINT]
    assert "ended" not in done.stdout
