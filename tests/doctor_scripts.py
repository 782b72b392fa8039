"""Runs scripts with the doctor and without, for its command line's tests."""

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import forked_python
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


def forked_doctor(folder: Path, *arguments: str, paths: Sequence[Path] = ()) -> Done:
    """Runs ``anybatch doctor`` in forked processes."""
    done = forked_python.run([*DOCTOR, *arguments], folder, environment(*paths, PACKAGE.parent))
    return Done(done.returncode, done.stdout, done.stderr)


def plain(folder: Path, *arguments: str, paths: Sequence[Path] = (), stdin: str = "", **more: str) -> Done:
    """Runs Python itself."""
    return run(folder, [sys.executable, *arguments], *paths, PACKAGE.parent, stdin=stdin, **more)


def forked_both(folder: Path, *arguments: str, options: Sequence[str] = ()) -> tuple[Done, Done]:
    """Runs a script without the doctor and with it, in forked processes."""
    done = forked_python.run([sys.executable, *arguments], folder, environment(PACKAGE.parent))
    return Done(done.returncode, done.stdout, done.stderr), forked_doctor(folder, *options, *arguments)


def both(
    folder: Path,
    *arguments: str,
    options: Sequence[str] = (),
    stdin: str = "",
    paths: Sequence[Path] = (),
    without_paths: Sequence[Path] = (),
) -> tuple[Done, Done]:
    """Runs a script without the doctor and with it, at the same time."""
    with ThreadPoolExecutor(2) as pool:
        without = pool.submit(plain, folder, *arguments, stdin=stdin, paths=without_paths or paths)
        with_it = pool.submit(doctor, folder, *options, *arguments, stdin=stdin, paths=paths)
        return without.result(), with_it.result()


DOCTOR = [sys.executable, "-c", "from anybatch.cli.main import main; main(prog_name='anybatch')", "doctor"]


def light_torch(folder: Path) -> Path:
    """Makes a folder for ``paths``, with a torch that is loaded at once and a recorder for it."""
    (folder / "torch").mkdir()
    (folder / "torch" / "__init__.py").write_text(TORCH, encoding="utf-8")
    (folder / "sitecustomize.py").write_text(RECORDER, encoding="utf-8")  # which is loaded as without the doctor
    return folder


RECORDER = """
import os, sys, types
from anybatch.records.events import Ended  # here, since classes that are made at the exit hide a KeyboardInterrupt

class Doctor:
    lost, answers = "", list
    def __init__(self, path, script, arguments, every, ask, active):
        self.path, self.head, self.process = path, dict(script=script, arguments=arguments), os.getpid()
    def attach(self):
        from anybatch.records.tables import Started
        self.file = self.path.open("w")
        self.emit(Started(**self.head))
    def emit(self, fact):
        from anybatch.records.lines import to_line
        self.file.write(to_line(fact) + chr(10))
    def close(self):
        for fact in self.answers():
            self.emit(fact)
        if os.getpid() != self.process:
            print("closed in a child")
        self.emit(Ended(seconds=1.0, own_seconds=0.01))
        self.file.close()

for name, values in {
    "recorder": {"Doctor": Doctor},
    "crashes": {"explain": lambda error, doctor: None, "prefix": str},
}.items():
    sys.modules["anybatch.doctor." + name] = types.ModuleType(name)
    vars(sys.modules["anybatch.doctor." + name]).update(values)
"""
TORCH = """
class Device:
    is_initialized = is_available = staticmethod(lambda: False)
cuda = xpu = Device
class backends:
    mps = Device
def set_num_threads(number): pass
"""
