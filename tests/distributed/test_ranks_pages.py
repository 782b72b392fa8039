"""The code of the pages on ranks prints the same in one process and in a process group."""

import contextlib
import os
import runpy
import socket
import sys
from pathlib import Path

import pytest

from forks import Call, run_forked_calls
from pages import blocks

ROOT = Path(__file__).parents[2]
SECONDS = 60  # that two processes may take on a busy machine


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
    texts = [script.with_name(f"printed{rank}of{world}") for rank in range(world)]
    ends = [text.with_suffix(".end") for text in texts]
    calls = [
        Call("test_ranks_pages", "run_page", [str(script), rank, world, port, str(texts[rank])], ends[rank])
        for rank in range(world)
    ]
    run_forked_calls(calls, SECONDS)
    for end in ends:
        assert end.read_text().endswith("to its end\n"), end.read_text()
    return [text.read_text() for text in texts]


def run_page(script: str, rank: int, world: int, port: int, to: str) -> None:
    """What a process does."""
    if world > 1:
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    with Path(to).open("w") as printed, contextlib.redirect_stdout(printed):
        runpy.run_path(script, run_name="__main__")
    sys.stdout.write("to its end\n")


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
