"""Runs Python in processes forked from one that has loaded torch, as if it had been started.

A process that is started loads torch, and what optimizers import, for longer than most tests take. Here the command
line and the Python that it starts for a script are forked (see forks.py). They find torch and this package when they
import them, as for the first time (see preloaded.py); but modules that those have loaded are there before. So each verb
has tests, too, that start processes.
"""

import atexit
import importlib.machinery
import importlib.util
import io
import json
import os
import runpy
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any

import preloaded
from forks import Call, run_forked_calls

SECONDS = 240
HERE = Path(__file__).parent


def run(
    command: Sequence[str], folder: Path, environment: Mapping[str, str] | None = None, stdin: str = "", to: str = ""
) -> "subprocess.CompletedProcess[str]":
    """Runs a command that begins with ``sys.executable``, as ``subprocess.run`` does.

    Args:
        command: what would be typed.
        folder: in which it runs.
        environment: of the process; that of this one by default.
        stdin: its standard input.
        to: a file for what it prints, which is not returned then.
    """
    with tempfile.TemporaryDirectory() as home:
        values = dict(os.environ if environment is None else environment)
        request = {"folder": str(folder), "arguments": [*command[1:]], "environment": values, "to": to}
        (Path(home) / "request").write_text(json.dumps(request), encoding="utf-8")
        (Path(home) / "in").write_text(stdin, encoding="utf-8")
        run_forked_calls([Call("forked_python", "answer", [home], Path(home) / "trouble")], SECONDS)
        code = Path(home) / "code"
        assert code.exists(), (Path(home) / "trouble").read_text()
        out, err = ("" if to else (Path(home) / name).read_text(encoding="utf-8") for name in ("out", "err"))
        return subprocess.CompletedProcess([*command], int(code.read_text()), out, err)


def answer(home: str) -> None:
    """Runs what is asked for in a folder; this process has been forked for it."""
    request = json.loads((Path(home) / "request").read_text(encoding="utf-8"))
    subprocess.Popen = ForkedPython  # type: ignore[misc]
    to = request["to"]
    paths = (Path(home) / "in", to or Path(home) / "out", to or Path(home) / "err")
    given, out, err = (os.open(path, os.O_RDWR | os.O_CREAT, 0o600) for path in paths)
    process = ForkedPython(
        [sys.executable, *request["arguments"]], stdin=given, stdout=out, stderr=err, env=request["environment"],
        cwd=request["folder"],
    )  # fmt: skip
    (Path(home) / "code").write_text(str(process.wait()))


class ForkedPython(subprocess.Popen):  # type: ignore[type-arg]
    """A process of Python as ``Popen`` starts it, forked from this one; any other program is started."""

    def _execute_child(
        self, args: Any, executable: Any, preexec_fn: Any, close_fds: Any, pass_fds: Any, cwd: Any, env: Any, *more: Any
    ) -> None:
        pipes = more[3:9]
        if isinstance(args, str) or args[0] != sys.executable or executable is not None:
            given = (args, executable, preexec_fn, close_fds, pass_fds, cwd, env)
            super()._execute_child(*given, *more)  # type: ignore[misc]
            return
        _flush()
        self.pid = os.fork()
        if self.pid == 0:
            code = 255
            try:
                streams = [(os.dup(pipes[at]), to) for to, at in enumerate((0, 3, 5)) if pipes[at] != -1]
                for copied, to in streams:
                    os.dup2(copied, to)
                if close_fds and not pass_fds:
                    os.closerange(3, 1024)
                if preexec_fn is not None:
                    preexec_fn()
                code = _python([*map(str, args[1:])], os.environ if env is None else env, cwd or Path.cwd())
            finally:
                os._exit(code & 0xFF)
        self._child_created = True
        self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]


def _python(arguments: list[str], environment: Mapping[str, str], folder: str | Path) -> int:
    """Does what ``python ARGUMENTS`` does, and returns the exit code."""
    paths = [*filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)), str(HERE)]
    installed = [path for path in sys.path[1:] if path not in paths]
    values = dict(environment)
    os.environ.clear()
    os.environ.update(values)
    os.chdir(folder)
    _renew_streams()
    sys.path[:] = [*filter(None, values.get("PYTHONPATH", "").split(os.pathsep)), *installed]
    sys.path_importer_cache.clear()
    preloaded.forget()
    sys.modules.pop("sitecustomize", None)
    for one in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        one.detach()  # such as that of a folder of the process that has forked this one, which it deletes itself
    code = _code_of(lambda: _run(arguments))
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    _flush()
    return code


def _renew_streams() -> None:
    """Makes new ones, which are buffered as those of a process whose output is a pipe."""
    sys.stdin = sys.__stdin__ = open(0, encoding="utf-8", closefd=False)  # type: ignore[misc]  # noqa: SIM115
    sys.stdout = sys.__stdout__ = io.TextIOWrapper(open(1, "wb", closefd=False), "utf-8")  # type: ignore[misc]  # noqa: SIM115
    sys.stderr = sys.__stderr__ = io.TextIOWrapper(  # type: ignore[misc]
        open(2, "wb", closefd=False), "utf-8", errors="backslashreplace", line_buffering=True  # noqa: SIM115
    )  # fmt: skip


def _flush() -> None:
    sys.stdout.flush()
    sys.stderr.flush()


def _code_of(run: Any) -> int:
    """The exit code of Python that runs something."""
    try:
        run()
    except SystemExit as stop:
        if stop.code is None or isinstance(stop.code, int):
            return stop.code or 0
        sys.stderr.write(f"{stop.code}\n")
        return 1
    except BaseException as error:  # noqa: BLE001 - as Python itself
        frames: TracebackType | None = error.__traceback__
        while frames is not None and frames.tb_frame.f_code.co_filename in (__file__, "<frozen runpy>"):
            frames = frames.tb_next
        sys.last_type, sys.last_value, sys.last_traceback = type(error), error, frames
        sys.excepthook(type(error), error.with_traceback(frames), frames)
        return 130 if isinstance(error, KeyboardInterrupt) else 1
    return 0


def _run(arguments: list[str]) -> None:
    if importlib.util.find_spec("sitecustomize") is not None:
        importlib.import_module("sitecustomize")
    if arguments[0] == "-u":
        arguments = arguments[1:]
        sys.stdout.reconfigure(write_through=True)  # type: ignore[union-attr]
    if arguments[0] == "-m":
        sys.path.insert(0, str(Path.cwd()))
        sys.argv[:] = arguments[1:]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        return
    main = ModuleType("__main__")
    vars(main)["__builtins__"] = __builtins__
    sys.modules["__main__"] = main
    if arguments[0] == "-c":
        sys.path.insert(0, "")
        sys.argv[:] = ["-c", *arguments[2:]]
        exec(compile(arguments[1], "<string>", "exec", dont_inherit=True), vars(main))
        return
    assert not arguments[0].startswith("-"), f"{arguments}: expected a script, -m or -c"
    path = Path(arguments[0]).absolute()
    sys.path.insert(0, str(path.parent))
    sys.argv[:] = arguments
    loader = importlib.machinery.SourceFileLoader("__main__", str(path))
    vars(main).update(__file__=str(path), __cached__=None, __loader__=loader)
    exec(compile(path.read_bytes(), str(path), "exec", dont_inherit=True), vars(main))
