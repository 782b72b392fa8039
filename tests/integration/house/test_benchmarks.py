"""The benchmarks run, and without the peers they say so. No figure is checked here: that takes a quiet machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import forked_python

ROOT = Path(__file__).parents[3]
PEERS = ("accelerate", "lightning", "pytorch_lightning")


@pytest.fixture
def without_peers(tmp_path: Path) -> dict[str, str]:
    """An environment in which the peers can't be imported, whether they are installed or not."""
    hidden = tmp_path / "hidden"
    hidden.mkdir()
    for name in PEERS:
        (hidden / f"{name}.py").write_text(f"raise ImportError('{name} is hidden')\n")
    path = os.pathsep.join([str(hidden), str(ROOT / "src")])
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}


def run(script: str, environment: dict[str, str], tmp_path: Path, *options: str) -> tuple[str, str, dict[str, object]]:
    """Runs a benchmark; gives what it printed, its table and its rows."""
    table, rows = tmp_path / "out" / "table.md", tmp_path / "out" / "rows.json"
    command = [sys.executable, str(ROOT / "benchmarks" / script), *options, "-o", str(table), "--json", str(rows)]
    done = forked_python.run(command, tmp_path, environment)
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, object] = json.loads(rows.read_text())
    return done.stdout, table.read_text(), found


def sides(found: dict[str, object]) -> list[str]:
    rows = found["rows"]
    assert isinstance(rows, list)
    return [row["side"] for row in rows]


def test_overhead_runs_without_peers(without_peers: dict[str, str], tmp_path: Path) -> None:
    options = ("--pairs", "2", "--block", "0.001", "--size", "tiny MLP")
    printed, table, found = run("overhead.py", without_peers, tmp_path, *options)
    assert "skipped Accelerate: accelerate is hidden (pip install accelerate)" in printed
    assert "skipped Lightning: lightning is hidden (pip install lightning)" in printed
    assert "skipped Accelerate" in table
    assert "overhead.py --pairs 2" in table
    assert "<= 1.00" not in table
    assert sides(found) == ["hand-written again", "anybatch.backward", "anybatch.TrainStep"] * 2


def test_exactness_runs_without_peers(without_peers: dict[str, str], tmp_path: Path) -> None:
    cases = ("uneven", "masked", "window")
    printed, table, found = run(
        "exactness.py", without_peers, tmp_path, "--seeds", "1", *(f"--case={case}" for case in cases)
    )
    assert "skipped Accelerate: accelerate is hidden (pip install accelerate)" in printed
    assert "skipped Lightning" in table
    names = ["whole batch in float32", "hand-written", "anybatch.backward", "anybatch.TrainStep"]
    assert sides(found) == names * len(cases)
    rows = found["rows"]
    assert isinstance(rows, list)
    for row in rows:
        # No timing: the errors repeat exactly, and the hand-written loop is off by far more than rounding.
        assert row["error"] > 0.01 if row["side"] == "hand-written" else row["error"] < 1e-6


@pytest.mark.slow
def test_frontier_runs_without_peers(without_peers: dict[str, str], tmp_path: Path) -> None:
    options = ("--quick", "--model", "CNN", "--share", "0.25", "--rounds", "1")
    printed, table, found = run("frontier.py", without_peers, tmp_path, *options)
    assert "Accelerate" in printed
    assert "CNN" in table
    assert "anybatch" in sides(found)


@pytest.mark.slow
def test_what_the_doctor_costs_is_measured_in_turns(tmp_path: Path) -> None:
    rows = tmp_path / "rows.json"
    command = [sys.executable, str(ROOT / "benchmarks" / "doctor" / "overhead.py"), "--model", "200 layers"]
    command += ["--steps", "52", "--runs", "1", "--json", str(rows)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, check=False, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    (row,) = json.loads(rows.read_text())
    assert (row["steps"], row["tensors"], len(row["each"]), len(row["noise"])) == (52, 400, 1, 1)
    assert 0 < row["own"] < 1
    assert 10 < row["calls"] <= 38  # none in the inner modules, though they have the root's class


@pytest.mark.slow
def test_what_the_doctor_takes_in_memory_is_measured_for_each_side(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    printed, table, found = run("doctor/memory.py", environment, tmp_path, "--rounds", "1", "--only", "folds")
    assert "folds" in table
    assert table in printed
    sides = found["folds"]
    assert isinstance(sides, dict)
    assert all(peak > 100 and close > 0 for peak, close in sides.values())
    assert list(sides) == ["plain", "no questions", "questions"]
