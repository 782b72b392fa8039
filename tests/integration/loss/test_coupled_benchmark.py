"""The benchmark of coupled losses runs, and its gradients are right. No time is checked here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.mark.slow
def test_coupled_benchmark(tmp_path: Path) -> None:
    table, rows = tmp_path / "table.md", tmp_path / "rows.json"
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    options = ["--quick", "--rounds", "1", "-o", str(table), "--json", str(rows)]
    command = [sys.executable, str(ROOT / "benchmarks" / "coupled.py"), *options]
    done = subprocess.run(command, check=False, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    found = {row.get("side") or row["way"]: row for row in json.loads(rows.read_text())["rows"]}
    kept = [found[f"anybatch.Coupled, keep={keep}"] for keep in (0, 1, 2, 4, 8)]
    assert all(row["error"] == 0 for row in kept)
    assert [row["peak"] for row in kept] == sorted(row["peak"] for row in kept)
    assert kept[1]["peak"] <= 1.05 * found["GradCache's scheme"]["peak"]
    assert found["GradCache's scheme"]["error"] < 1e-5
    blocks = [row for way, row in found.items() if "row_block" in way]
    assert all(row["error"] < 1e-4 for row in blocks)
    assert max(row["peak"] for row in blocks) < 0.2 * found["one pass, 256"]["peak"]
    assert "## 256 pairs in the memory of 16" in table.read_text()
