"""Runs tests under a time limit and writes how they ended as a table.

    python benchmarks/suite.py --device cuda --limit 300 -o tests.md -- -m gpu

The exit status is pytest's own, or 124 when the limit was reached.
"""

from __future__ import annotations

import importlib.util
import os
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import click
import torch
from common import facts, markdown, write_text

OUT_OF_TIME = 124
KEPT = ("FAILED", "ERROR", "SKIPPED", "XFAIL", "XPASS")


def pytest_command(workers: int, more: tuple[str, ...]) -> list[str]:
    """Builds the command line; tests run side by side where pytest-xdist is installed."""
    # pytest-benchmark, where it is installed, warns of the workers, and warnings are errors here.
    command = ["-m", "pytest", "-q", "-p", "no:benchmark", "--durations=10", *more]
    if workers > 1 and importlib.util.find_spec("xdist") is not None:
        command += ["-n", str(workers)]
    return command


def run(command: list[str], limit: float, log: Path) -> int:
    """Runs python with the command's arguments; its output goes to ``log``.

    Args:
        command: the arguments of the interpreter.
        limit: seconds.
        log: the file that takes the output.

    Returns:
        The exit status; 124 when the limit was reached.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    with log.open("w") as stream:
        try:
            done = subprocess.run(
                [sys.executable, *command],
                check=False,
                timeout=limit,
                stdout=stream,
                stderr=subprocess.STDOUT,
                env=environment,
            )
        except subprocess.TimeoutExpired:
            return OUT_OF_TIME
    return done.returncode


@click.command(help="Runs the tests and writes how they ended; options after -- go to pytest.")
@click.option("--device", default="cpu", show_default=True, help="cpu or cuda; names the machine in the table.")
@click.option("--limit", type=float, default=300.0, show_default=True, help="Seconds.")
@click.option("--workers", type=click.IntRange(min=1), default=1, show_default=True, help="Tests side by side.")
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Also write the table here, as Markdown.")
@click.argument("more", nargs=-1)
def main(device: str, limit: float, workers: int, output: Path | None, more: tuple[str, ...]) -> None:
    """Parses the options, runs the tests, prints their output and the table, and writes the file."""
    command = pytest_command(workers, more)
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        start = time.monotonic()
        status = run(command, limit, log)
        took = time.monotonic() - start
        text = log.read_text(errors="replace")
    click.echo(text)
    lines = [line.rstrip() for line in text.splitlines() if line.strip()]
    outcome = "the time limit was reached" if status == OUT_OF_TIME else lines[-1].strip("= ") if lines else "no output"
    known = facts(torch.device(device))
    known["device"] = known["device"].split(",")[0]
    known["command"] = shlex.join(["python", *command])
    notes = [f"- {line}" for line in lines if line.startswith(KEPT)] or ["No test is listed as failed or skipped."]
    row = {"outcome": outcome, "exit status": str(status), "seconds": f"{took:.0f}"}
    page = markdown("Tests", known, notes, [row])
    click.echo(page)
    if output is not None:
        write_text(output, page)
    sys.exit(status)


if __name__ == "__main__":
    main()
