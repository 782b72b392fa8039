"""Runs a program in a child that is forked from a process that has imported torch once, and keeps what came of it.

A result is kept under the hash of its source, its seed and how it was run, so that what was run once is never run
again; the record of the doctor lies beside it, and rules are judged from there.
"""

from __future__ import annotations

import contextlib
import gc
import gzip
import hashlib
import importlib
import json
import math
import os
import re
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
import types
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

Mode = Literal["plain", "untrained", "doctor"]
HOME = Path(__file__).resolve().parent
CACHE = Path(os.environ.get("ANYBATCH_MUTANTS_CACHE", HOME / ".cache"))
PATIENCE = 60
"""Seconds of CPU time that a program may take; twice as long by the clock of a busy machine, and more."""
SLOWEST = 8
"""How many times longer than its CPU time a program may take by the clock."""
HEAVY = ("numpy", "sklearn.datasets", "torch", "torch.utils.data", "torch.func", "transformers", "accelerate")
HEAVIER = ("lightning", "lightning.fabric", "transformers.trainer")
"""What programs import and what takes seconds: imported once by the process that is forked."""
_METRIC = re.compile(r"^metric (\S+)\s*$", re.MULTILINE)


@dataclass(frozen=True)
class Result:
    """What came of a run.

    Args:
        code: the exit code; 124 if it took too long.
        seconds: of CPU time, without importing torch.
        metric: that it printed last, larger is better; ``None`` if it printed none, or no number.
        errors: the end of its standard error.
        broken: what the doctor said of its own failure; empty if there was none.
        stamp: of the code that made the record; empty without one.
    """

    code: int
    seconds: float
    metric: float | None
    errors: str
    broken: str = ""
    stamp: str = ""


def key_of(source: str, seed: int, mode: Mode) -> str:
    """The name under which a result is kept."""
    return hashlib.sha256(f"{mode} {seed}\n{source}".encode()).hexdigest()[:20]


def kept(source: str, seed: int, mode: Mode) -> Result | None:
    """The result of an earlier run, if there is one."""
    path = CACHE / "results" / f"{key_of(source, seed, mode)}.json"
    return Result(**json.loads(path.read_text(encoding="utf-8"))) if path.exists() else None


def record_path(source: str, seed: int) -> Path:
    """Where the record of a run under the doctor lies, compressed."""
    return CACHE / "records" / f"{key_of(source, seed, 'doctor')}.jsonl.gz"


@cache
def stamp() -> str:
    """A hash of the code that makes records: of the package without what only reads them."""
    import anybatch

    root = Path(anybatch.__file__).parent
    parts = [root / "doctor", root / "records", root / "cli" / "doctor_child.py"]
    paths = sorted(path for part in parts for path in ([part] if part.is_file() else part.rglob("*.py")))
    recording = [path for path in paths if "rules" not in path.parts and path.name != "diagnosing.py"]
    return hashlib.sha256(b"".join(path.read_bytes() for path in recording)).hexdigest()[:12]


def prepare(*, heavy: bool = True) -> None:
    """Imports what programs and the doctor need, before the first fork."""
    import torch

    torch.set_num_threads(1)
    for name in (*HEAVY, *(HEAVIER if heavy else ())):
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    for name in ("anybatch.cli.doctor_child", "anybatch.doctor.ask.asking", "anybatch.doctor.recorder"):
        importlib.import_module(name)
    gc.collect()
    gc.freeze()


def run(source: str, name: str, seed: int, mode: Mode, *, renew: bool = False) -> Result:
    """Runs a program in a child, unless its result is kept.

    Args:
        source: of the program.
        name: of its file.
        seed: of its random numbers.
        mode: as it is, with every step of its optimizers taken back, or under the doctor.
        renew: run it although a result is kept.

    Returns:
        What came of it; it is kept.
    """
    if not renew and (known := kept(source, seed, mode)) is not None:
        return known
    with tempfile.TemporaryDirectory(prefix="mutant-") as place:
        folder = Path(place)
        script = folder / "run" / name
        script.parent.mkdir()
        script.write_text(source, encoding="utf-8")
        code, seconds = _forked(folder, script, source, seed, mode)
        result = _result(folder, code, seconds, mode)
        _keep(folder, key_of(source, seed, mode), result)
    return result


def _forked(folder: Path, script: Path, source: str, seed: int, mode: Mode) -> tuple[int, float]:
    """The exit code of the child and its CPU time, that of its own children included."""
    sys.stdout.flush()
    sys.stderr.flush()
    process = os.fork()
    if process == 0:
        code = 1
        try:
            os.setpgid(0, 0)
            code = _in_child(folder, script, source, seed, mode)
        finally:
            os._exit(code)
    with contextlib.suppress(OSError):
        os.setpgid(process, process)
    end = time.monotonic() + PATIENCE * SLOWEST
    while True:
        found, status, usage = os.wait4(process, os.WNOHANG)
        if found:
            code = os.waitstatus_to_exitcode(status)
            return (124 if code == -signal.SIGXCPU else code), usage.ru_utime + usage.ru_stime
        if time.monotonic() > end:
            os.killpg(process, signal.SIGKILL)
            end = math.inf
        time.sleep(0.01)


def _in_child(folder: Path, script: Path, source: str, seed: int, mode: Mode) -> int:
    """Turns into the program, and gives its exit code."""
    resource.setrlimit(resource.RLIMIT_CPU, (PATIENCE, PATIENCE + 5))
    os.chdir(script.parent)
    tempfile.tempdir = str(folder)  # what the program leaves there goes with it
    for name, number in (("stdout", 1), ("stderr", 2)):
        file = os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(file, number)
    sys.argv = [str(script), "--seed", str(seed)]
    sys.path.insert(0, str(script.parent))
    attendance: Any = None
    if mode == "untrained":
        _take_steps_back()
    elif mode == "doctor":
        attendance = _attend(folder, script, seed)
    code = _execute(script, source)
    if attendance is not None:
        attendance.finish()
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    return code


def _attend(folder: Path, script: Path, seed: int) -> Any:
    """Attaches the doctor as ``anybatch doctor`` does in the process of a script."""
    from anybatch.cli.doctor_child import Attendance

    settings = {
        "record": str(folder / "record.jsonl"), "script": script.name, "arguments": ("--seed", str(seed)),
        "every": None, "active": False, "ask": True,
    }  # fmt: skip
    attendance = Attendance(str(folder), settings)
    attendance.attach()
    return attendance


def _execute(script: Path, source: str) -> int:
    """Runs the source as ``__main__``; the exit code is that of Python."""
    module = types.ModuleType("__main__")
    module.__file__ = str(script)
    sys.modules["__main__"] = module
    try:
        exec(compile(source, str(script), "exec"), module.__dict__)
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException as error:  # noqa: BLE001 - a program may end as it likes
        trace = error.__traceback__
        error = error.with_traceback(trace.tb_next if trace is not None else None)
        sys.last_exc = sys.last_value = error
        sys.excepthook(type(error), error, error.__traceback__)
        return 1
    return 0


def _take_steps_back() -> None:
    """Lets every optimizer step for nothing: what a model is worth before it was trained."""
    import torch
    from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

    before: dict[int, list[Any]] = {}

    def entries(optimizer: Any) -> list[Any]:
        return [one for group in optimizer.param_groups for one in group["params"]]

    def remember(optimizer: Any, *_: Any) -> None:
        before.setdefault(id(optimizer), [one.detach().clone() for one in entries(optimizer)])

    def restore(optimizer: Any, *_: Any) -> None:
        with torch.no_grad():
            for one, old in zip(entries(optimizer), before.pop(id(optimizer), []), strict=False):
                one.copy_(old)

    register_optimizer_step_pre_hook(remember)
    register_optimizer_step_post_hook(restore)


def _result(folder: Path, code: int, seconds: float, mode: Mode) -> Result:
    output = _text(folder / "stdout")
    found = _METRIC.findall(output)
    metric = None
    with contextlib.suppress(ValueError, IndexError):
        metric = float(found[-1])
    if metric is not None and not math.isfinite(metric):
        metric = None
    broken = _text(folder / "broken")[-2000:] if mode == "doctor" else ""
    if mode == "doctor" and not (folder / "record.jsonl").exists():
        broken = broken or "no record"
    return Result(code, seconds, metric, _text(folder / "stderr")[-1500:], broken, stamp() if mode == "doctor" else "")


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""


def _keep(folder: Path, key: str, result: Result) -> None:
    """Keeps a result, and the record beside it; each is there whole or not at all."""
    record = folder / "record.jsonl"
    if record.exists():
        from anybatch.cli.doctor_records import completed
        from anybatch.cli.launching import Finished
        from anybatch.cli.options import Target

        with contextlib.suppress(TypeError, ValueError, OSError):
            completed(record, folder, Target("", (), ()), Finished(result.code, result.seconds, None))
        target = CACHE / "records" / f"{key}.jsonl.gz"
        target.parent.mkdir(parents=True, exist_ok=True)
        part = target.with_suffix(f".{os.getpid()}")
        with record.open("rb") as source, gzip.open(part, "wb", compresslevel=3) as file:
            shutil.copyfileobj(source, file)
        part.replace(target)
    path = CACHE / "results" / f"{key}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(f".{os.getpid()}")
    part.write_text(json.dumps(asdict(result)), encoding="utf-8")
    part.replace(path)


def failure(error: BaseException) -> str:
    """The last line of a traceback."""
    return traceback.format_exception_only(error)[-1].strip()
