"""torchrun starts all ranks again after one was killed, and training goes on bitwise."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SECONDS = 120  # torchrun and two ranks load torch, twice, on a machine that may be busy


def run(folder: Path, *options: str, restarts: int = 0) -> str:
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
        "--max-restarts", str(restarts), "--monitor-interval", "0.1",
        str(ROOT / "examples" / "ranks" / "restart.py"), "--folder", str(folder), *options,
    ]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment, start_new_session=True
    )
    try:
        text, _ = process.communicate(timeout=SECONDS)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    assert process.returncode == 0, text
    return text


def weights(text: str) -> list[str]:
    return sorted(re.findall(r"rank \d weights ([0-9a-f]{64})", text))


def updates(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"update (\d+): loss", text)]


@pytest.mark.slow  # that a killed run goes on bitwise, and that the other ranks end, is seen without torchrun
def test_a_killed_rank_is_started_again_and_ends_with_the_same_weights(tmp_path: Path) -> None:
    undisturbed = run(tmp_path / "one")
    text = run(tmp_path / "other", "--die-at", "4", restarts=1)
    assert updates(text) == updates(undisturbed) == [1, 2, 3, 4, 5, 6]  # none is applied twice, and none is left out
    assert len(weights(undisturbed)) == 2, undisturbed
    assert len(set(weights(undisturbed))) == 1
    assert weights(text) == weights(undisturbed), text
