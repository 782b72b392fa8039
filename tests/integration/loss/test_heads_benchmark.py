"""The benchmark of several losses runs, and without TorchJD it says so. No time is checked here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.mark.slow
def test_heads_runs_without_torchjd(tmp_path: Path) -> None:
    hidden = tmp_path / "hidden"
    hidden.mkdir()
    (hidden / "torchjd.py").write_text("raise ImportError('torchjd is hidden')\n")
    path = os.pathsep.join([str(hidden), str(ROOT / "src")])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    table, rows = tmp_path / "table.md", tmp_path / "rows.json"
    sides = ("sequential, retain_graph", "anybatch.cut", "anybatch.TrainStep", "TorchJD mtl_backward, UPGrad")
    options = ["--width", "16", "--batch", "512", "--rounds", "1", *(f"--side={side}" for side in sides)]
    options += ["-o", str(table), "--json", str(rows)]
    command = [sys.executable, str(ROOT / "benchmarks" / "heads.py"), *options]
    done = subprocess.run(command, check=False, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "| TorchJD mtl_backward, UPGrad | not installed |" in table.read_text()
    assert "TOO LARGE" not in table.read_text()
    found = {row["side"]: row for row in json.loads(rows.read_text())["rows"]}
    for side in ("anybatch.cut", "anybatch.TrainStep"):
        assert found[side]["of summed"] <= 0.45
        assert found[side]["passes"] == 1
        assert found[side]["within"]
    assert found["sequential, retain_graph"]["passes"] == 6
    assert found["sequential, retain_graph"]["of summed"] > 1
