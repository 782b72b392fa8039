"""The code of the pages on ranks prints the same in one process and in a process group."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from pages import blocks

ROOT = Path(__file__).parents[2]
SECONDS = 120  # that two processes may take to import torch on a busy machine


def script_of(page: str, folder: Path) -> Path:
    """The code of a page that runs, as a file."""
    found = [block.text for block in blocks((ROOT / "docs" / page).read_text()) if "no-run" not in block.info]
    path = folder / "page.py"
    path.write_text("\n\n".join(found))
    return path


def run(script: Path, world: int) -> list[str]:
    """Runs it as many processes, as a launcher does; gives what each of them printed."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    base = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    if world > 1:
        base |= {"WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    processes = [
        subprocess.Popen(
            [sys.executable, str(script)],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env=base | ({"RANK": str(rank)} if world > 1 else {}),
        )
        for rank in range(world)
    ]  # fmt: skip
    texts = []
    try:
        for process in processes:
            text, error = process.communicate(timeout=SECONDS)
            assert process.returncode == 0, error
            texts.append(text)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return texts


@pytest.mark.parametrize("page", ["ranks.md", "ray.md"])
def test_a_page_prints_the_same_on_two_ranks(page: str, tmp_path: Path) -> None:
    script = script_of(page, tmp_path)
    (alone,) = run(script, 1)
    first, second = run(script, 2)
    assert second == ""
    numbers = [[float(word) for word in line.split()] for line in alone.splitlines()]
    assert len(numbers) >= 3
    others = [[float(word) for word in line.split()] for line in first.splitlines()]
    for one, other in zip(numbers, others, strict=True):
        assert one == pytest.approx(other, abs=2e-6)
