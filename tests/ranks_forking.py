"""Runs cases in which a process may die: each in processes of its own, forked from one that has loaded torch."""

import datetime as dt
import importlib
import json
import os
import signal
import sys
import time
import traceback
import warnings
from pathlib import Path

import torch
import torch.distributed as dist

from forks import Call, run_forked_calls

SECONDS = 30  # that a case may take


def run_forked(module: str, world: int, folder: Path, cases: str, timeout: float) -> dict[str, list[str]]:
    """Runs each case of a module in a group of its own.

    Args:
        module: has the cases.
        world: processes in a group.
        folder: for what they write.
        cases: the name of the cases in the module.
        timeout: of the groups, in seconds.

    Returns:
        For each case what every rank ended with: nothing, a traceback, or the name of a signal.
    """
    names = list(getattr(importlib.import_module(module), cases))
    output = folder / "output"
    call = Call("ranks_forking", "run_groups", [module, cases, world, str(folder), timeout], output)
    run_forked_calls([call], seconds=60 + SECONDS * len(names))
    lines = [line for line in output.read_text().splitlines() if line.startswith("case ")]
    assert len(lines) == len(names), output.read_text()
    return dict(json.loads(line[5:]) for line in lines)


def run_groups(module: str, cases: str, world: int, folder: str, timeout: float) -> None:
    """Runs each case in a group of processes, one after the other."""
    for number, (name, case) in enumerate(getattr(importlib.import_module(module), cases).items()):
        home = Path(folder) / f"case{number}"
        home.mkdir()
        children = [_child(case, rank, world, home, timeout) for rank in range(world)]
        texts = [_ended(child, home / f"rank{rank}") for rank, child in enumerate(children)]
        sys.stdout.write("case " + json.dumps([name, texts]) + "\n")
        sys.stdout.flush()


def _child(case: object, rank: int, world: int, home: Path, timeout: float) -> int:
    child = os.fork()
    if child:
        return child
    text = ""
    try:
        store = f"file://{home / 'store'}"
        seconds = dt.timedelta(seconds=timeout)
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world, timeout=seconds)
        torch.manual_seed(1000 + rank)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            case(rank, world)  # type: ignore[operator]
    except BaseException:  # noqa: BLE001  # the test prints it
        text = traceback.format_exc()
    (home / f"rank{rank}").write_text(text)
    os._exit(0)


def _ended(child: int, path: Path) -> str:
    ends = time.monotonic() + SECONDS
    while time.monotonic() < ends:
        found, status = os.waitpid(child, os.WNOHANG)
        if found:
            return signal.Signals(status & 127).name if status & 127 else path.read_text()
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return f"did not end within {SECONDS} s"
