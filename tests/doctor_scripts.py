"""Runs scripts with the doctor and without, for its command line's tests."""

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from source_tree import PACKAGE


class Done(NamedTuple):
    """What a process left behind."""

    code: int
    out: str
    err: str
    facts: Mapping[str, Any] = {}


def environment(*paths: Path, **more: str) -> dict[str, str]:
    """Returns an environment in which these folders are imported from, before all others that were there."""
    before = [*map(str, paths), *filter(None, [os.environ.get("PYTHONPATH")])]
    path = {"PYTHONPATH": os.pathsep.join(before)} if before else {}
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "", **path, **more}


def run(folder: Path, command: Sequence[str], *paths: Path, stdin: str = "", **more: str) -> Done:
    """Runs a command in a folder."""
    done = subprocess.run(
        command, cwd=folder, env=environment(*paths, **more), input=stdin, capture_output=True, text=True,
        timeout=240, check=False,
    )  # fmt: skip
    return Done(done.returncode, done.stdout, done.stderr)


def doctor(folder: Path, *arguments: str, paths: Sequence[Path] = (), stdin: str = "", **more: str) -> Done:
    """Runs ``anybatch doctor``."""
    return run(folder, [*DOCTOR, *arguments], *paths, PACKAGE.parent, stdin=stdin, **more)


def plain(folder: Path, *arguments: str, paths: Sequence[Path] = (), stdin: str = "", **more: str) -> Done:
    """Runs Python itself."""
    return run(folder, [sys.executable, *arguments], *paths, PACKAGE.parent, stdin=stdin, **more)


def both(folder: Path, *arguments: str, options: Sequence[str] = (), stdin: str = "") -> tuple[Done, Done]:
    """Runs a script without the doctor and with it, at the same time."""
    with ThreadPoolExecutor(2) as pool:
        without = pool.submit(plain, folder, *arguments, stdin=stdin)
        with_it = pool.submit(doctor, folder, *options, *arguments, stdin=stdin)
        return without.result(), with_it.result()


DOCTOR = [sys.executable, "-c", "from anybatch.cli.main import main; main(prog_name='anybatch')", "doctor"]
