"""Processes forked from one that has loaded torch and the package, which takes each of them seconds else.

One such process serves all tests of a worker. It never runs anything itself, so that what it forks begins as a fresh
process does that has imported these.
"""

import atexit
import functools
import gc
import importlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import preloaded

HERE = Path(__file__).parent
Argument = str | int | float
_ONE_AT_A_TIME = threading.Lock()


class Call(NamedTuple):
    """A function of a module, what it is given, and the file for all that it prints."""

    module: str
    function: str
    arguments: Sequence[Argument]
    output: Path


def run_forked_calls(calls: Sequence[Call], seconds: float) -> None:
    """Runs calls at once, each in a process of its own, and kills those that don't end in time."""
    request = {
        "calls": [[*call[:3], str(call.output)] for call in calls],
        "seconds": seconds,
        "path": [str(HERE), *sys.path],
        "environment": {**os.environ, "OMP_NUM_THREADS": "1"},
        "folder": str(Path.cwd()),
    }
    with _ONE_AT_A_TIME:
        server = _server()
        assert server.stdin is not None
        assert server.stdout is not None
        server.stdin.write(json.dumps(request) + "\n")
        server.stdin.flush()
        assert server.stdout.readline() == "ended\n", "the process that forks has ended"


@functools.cache
def _server() -> "subprocess.Popen[str]":
    """It ends when its standard input is closed, and so with the worker at the latest."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE), *sys.path]), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__]
    server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, text=True)
    atexit.register(server.communicate)
    return server


def _serve() -> None:
    import torch

    torch.set_num_threads(1)
    # A forked process renews torch's pool of threads at its next use: two devices' threads of a backward, which start
    # at once, would race for it, and one would find none.
    os.register_at_fork(after_in_child=functools.partial(torch.set_num_threads, 1))
    importlib.import_module("torch._dynamo")  # optimizers and DistributedDataParallel load it
    preloaded.load("anybatch")
    gc.collect()
    gc.freeze()  # else each collection that a plan or a retry asks for goes through all that torch has made
    for line in sys.stdin:
        request: dict[str, Any] = json.loads(line)
        children = [_child(request, *call) for call in request["calls"]]
        ends = time.monotonic() + request["seconds"]
        while children and time.monotonic() < ends:
            children = [child for child in children if not os.waitpid(child, os.WNOHANG)[0]]
            time.sleep(0.01)
        for child in children:
            with suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        sys.stdout.write("ended\n")
        sys.stdout.flush()


def _child(request: dict[str, Any], module: str, function: str, arguments: list[Argument], output: str) -> int:
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        nothing = os.open(os.devnull, os.O_RDONLY)
        for kept, stream in ((nothing, 0), (file, 1), (file, 2)):
            os.dup2(kept, stream)
        sys.path[:] = request["path"]
        os.environ.clear()
        os.environ.update(request["environment"])
        os.chdir(request["folder"])
        getattr(importlib.import_module(module), function)(*arguments)
        code = 0
    except BaseException:  # noqa: BLE001  # it is in the output
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    _serve()
