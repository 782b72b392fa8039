"""The benchmark of several devices runs, and shows what it is for. No time is checked."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.mark.slow
def test_the_benchmark_shows_the_full_first_device_and_the_mean_of_means(tmp_path: Path) -> None:
    options = ["--rounds", "1", "--model", "many classes", "--json", str(tmp_path / "rows.json")]
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "devices.py"), *options],
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = {row["side"]: row for row in json.loads((tmp_path / "rows.json").read_text())["rows"]}
    assert rows["DataParallel"]["first"] > 3 * rows["DataParallel"]["others"]
    assert rows["anybatch"]["first"] <= 1.05 * rows["anybatch"]["others"]
    assert rows["anybatch"]["error"] < 1e-6 < 0.1 < rows["DataParallelCriterion"]["error"]
