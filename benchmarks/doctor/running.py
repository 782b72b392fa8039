"""Runs a program plainly and under the doctor, each in a process of its own."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from judging import Program

PATIENCE = 240
"""Seconds that a process may take."""


@dataclass(frozen=True)
class Ended:
    """How a process ended.

    Args:
        code: its exit code; 124 if it took too long.
        seconds: of CPU time.
        output: its standard output.
        errors: its standard error.
    """

    code: int
    seconds: float
    output: str
    errors: str


@dataclass(frozen=True)
class Pair:
    """A program run plainly and under the doctor.

    Args:
        plain: without the doctor, if it was run.
        watched: under the doctor.
        findings: in order of rank; ``None`` if the doctor wrote none.
        overhead: what the doctor says about its own cost.
    """

    plain: Ended | None
    watched: Ended
    findings: list[dict[str, Any]] | None
    overhead: Any

    @property
    def same(self) -> bool:
        """Whether both ended alike and printed the same."""
        return self.plain is None or (self.plain.code == self.watched.code and self.plain.output == self.watched.output)


def run(command: list[str]) -> Ended:
    """Runs a command with one thread in a folder of its own, and takes its CPU time with that of its children."""
    threads = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        out, err = Path(folder) / "stdout", Path(folder) / "stderr"
        with out.open("wb") as stdout, err.open("wb") as stderr:
            process = subprocess.Popen(command, stdout=stdout, stderr=stderr, env=os.environ | threads, cwd=folder)
            code, seconds = _wait(process)
        return Ended(code, seconds, out.read_text(errors="replace"), err.read_text(errors="replace"))


def _wait(process: subprocess.Popen[bytes]) -> tuple[int, float]:
    """The exit code and the CPU time of a process and of the children that it has waited for."""
    timer = threading.Timer(PATIENCE, process.kill)
    timer.start()
    _, status, usage = os.wait4(process.pid, 0)
    late = not timer.is_alive()
    timer.cancel()
    process.returncode = os.waitstatus_to_exitcode(status)
    return (124 if late else process.returncode), _cpu(usage)


def _cpu(usage: resource.struct_rusage) -> float:
    return usage.ru_utime + usage.ru_stime


def arguments(program: Program, seed: int, *, fixed: bool) -> list[str]:
    """The script and its arguments."""
    return [str(program.path), "--seed", str(seed), *(["--fixed"] if fixed else [])]


def run_pair(program: Program, seed: int, *, fixed: bool, plain: bool) -> Pair:
    """Runs a program.

    Args:
        program: which.
        seed: of its random numbers.
        fixed: its repaired twin.
        plain: also without the doctor, before.

    Returns:
        Both outcomes.
    """
    script = arguments(program, seed, fixed=fixed)
    before = run([sys.executable, *script]) if plain else None
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        result = Path(folder) / "doctor.json"
        watched = run([sys.executable, "-m", "anybatch", "doctor", "--json", str(result), *script])
        values = json.loads(result.read_text(encoding="utf-8")) if result.exists() else {}
    return Pair(before, watched, values.get("findings"), values.get("overhead"))
