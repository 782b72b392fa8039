"""The benchmark of sums over ranks runs. No time is checked here."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_ranks_runs(tmp_path: Path) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    table, rows = tmp_path / "table.md", tmp_path / "rows.json"
    command = [sys.executable, str(ROOT / "benchmarks" / "ranks.py"), "--rounds", "1", "--width", "16"]
    command += ["-o", str(table), "--json", str(rows)]
    done = subprocess.run(command, check=False, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "TrainStep / during" in table.read_text()
    assert [row["micro-batches"] for row in json.loads(rows.read_text())["rows"]] == [1, 4]
