"""Runs the script or module that the user names as Python would, with a part of anybatch in its process."""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import click

from anybatch.cli.edited import RUN

_STDERR = 2
_PATIENCE = 20.0  # seconds that a script has to end by itself after it was interrupted
_LITTLE_PATIENCE = 5.0  # the same after Ctrl-C, for a script that is killed at its time limit
_PR_SET_PDEATHSIG = 1
_LOOKS = 0.5  # seconds between two looks at what the script does
_FORWARDED = ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2")
_START = """\
import os, sys
try:
    sys.path.remove({folder!r})
except ValueError:
    pass
sys.path_importer_cache.pop({folder!r}, None)
os.environ.pop("PYTHONPATH", None)
os.environ.update({environment!r})
sys.path.append({root!r})
try:
    from anybatch.cli import {child}
    {child}.begin({folder!r}, {settings!r})
except Exception as error:
    with open(os.path.join({folder!r}, "broken"), "a", encoding="utf-8") as file:
        file.write(repr(error))
    if {child!r} != "doctor_child":  # a verb that stops the script, which would train to its end instead
        os._exit(2)
finally:
    sys.path.pop()
own = sys.modules.pop("sitecustomize")
try:
    import sitecustomize
except ImportError as error:
    if error.name != "sitecustomize":
        raise
    sys.modules["sitecustomize"] = own
"""
"""Runs before the script: takes its own traces away, loads our part, then what the place itself has of this name."""


class Finished(NamedTuple):
    """How a script ended."""

    code: int  # its exit code; the negative number of the signal that ended it
    seconds: float  # that it took
    limit: float | None  # the seconds after which it was interrupted, ``None`` if it was not
    came: frozenset[int] = frozenset()  # the signals that came for it meanwhile, from a terminal or a process

    @property
    def shell_code(self) -> int:
        """The exit code as a shell shows it: 128 and the number of the signal."""
        return self.code if self.code >= 0 else 128 - self.code


def launch(
    command: Sequence[str],
    folder: Path,
    settings: Mapping[str, Any],
    timeout: float | None,
    *,
    kills: bool = False,
    is_edited: bool = False,
    child: str = "doctor_child",
    quiet: bool = False,
    output: Path | None = None,
    look: Callable[[], bool] | None = None,
    variables: Mapping[str, str] = MappingProxyType({}),
) -> Finished:
    """Runs a script with a part of anybatch in its process.

    Args:
        command: the script or module with its arguments, for the interpreter.
        folder: the folder of this run, for what the two processes exchange.
        settings: what ``begin`` of the child gets.
        timeout: seconds after which it is interrupted as by Ctrl-C; ``None`` for never.
        kills: whether it is killed at once then, so that nothing of it runs in between; and some seconds after Ctrl-C.
        is_edited: whether the child takes edited text of the user's files, see ``edited``.
        child: the module of this package whose ``begin`` runs before the script.
        quiet: whether its standard output goes to standard error.
        output: the file for all its output, ``None`` for the terminal; with a file it has no input, and
            ``PYTHONHASHSEED`` is 0.
        look: is called twice a second; if it returns true, the script is interrupted. ``None`` for nothing.
        variables: are added to its environment.
    """
    if is_edited and command[0] != "-m":
        (folder / "run.py").write_text(RUN, encoding="utf-8")
        command = [str(folder / "run.py"), *command]
    fixed = {} if output is None else {"PYTHONHASHSEED": "0"}
    environment = {**os.environ, **variables, **fixed, "PYTHONPATH": _path(folder, child, settings)}
    started = time.monotonic()
    written = contextlib.nullcontext() if output is None else output.open("wb")

    def start(in_child: Callable[[], None] | None) -> "subprocess.Popen[bytes]":
        return subprocess.Popen(
            [sys.executable, *command],
            env=environment,
            stdin=None if output is None else subprocess.DEVNULL,
            stdout=(_STDERR if quiet else None) if output is None else file,
            stderr=None if output is None else file,
            preexec_fn=in_child,  # noqa: PLW1509 - this process has one thread
        )

    wait = _wait_for_signals if hasattr(signal, "sigtimedwait") else _wait_with_handlers
    with written as file:
        code, timed_out, came = wait(start, None if timeout is None else started + timeout, look, kills)
    return Finished(code, time.monotonic() - started, timeout if timed_out else None, came)


def _path(folder: Path, child: str, settings: Mapping[str, Any]) -> str:
    """Writes what Python loads before a script, and gives the ``PYTHONPATH`` on which it is found."""
    before = os.environ.get("PYTHONPATH")
    root = str(Path(__file__).resolve().parents[2])
    own = {} if before is None else {"PYTHONPATH": before}
    text = _START.format(child=child, folder=str(folder), environment=own, root=root, settings=dict(settings))
    (folder / "sitecustomize.py").write_text(text, encoding="utf-8")
    return os.pathsep.join([str(folder), *([before] if before else [])])


def _wait_for_signals(
    start: Callable[..., "subprocess.Popen[bytes]"],
    end: float | None,
    look: Callable[[], bool] | None = None,
    kills: bool = False,
) -> tuple[int, bool, frozenset[int]]:
    """Waits for the script, and hands on what other processes send; a terminal has sent it to both itself."""
    numbers = {getattr(signal, name) for name in _FORWARDED}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers | {signal.SIGCHLD})
    try:
        process = start(_before_script(before))
        deadline = Deadline(process, end, look, kills)
        while (code := process.poll()) is None:
            info = signal.sigtimedwait(numbers | {signal.SIGCHLD}, deadline.left())
            if info is None:
                deadline.passed()
            elif info.si_signo in numbers:
                deadline.note(info.si_signo)
                if info.si_code <= 0:
                    process.send_signal(info.si_signo)
        while (info := signal.sigtimedwait(numbers | {signal.SIGCHLD}, 0)) is not None:
            deadline.note(info.si_signo)  # what was meant for the script must not end its report
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return code, deadline.timed_out, frozenset(deadline.came - {signal.SIGCHLD})


def _before_script(mask: Any) -> Callable[[], None]:
    """What the new process does before it becomes Python: the mask as it was, and no life without this process."""
    prctl = None
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            prctl = ctypes.CDLL(None).prctl

    def in_child() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        if prctl is not None:
            prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)

    return in_child


def _wait_with_handlers(
    start: Callable[..., "subprocess.Popen[bytes]"],
    end: float | None,
    look: Callable[[], bool] | None = None,
    kills: bool = False,
) -> tuple[int, bool, frozenset[int]]:
    """The same where signals can't be waited for: Ctrl-C is the terminal's to send, the others are handed on."""
    process = start(None)
    deadline = Deadline(process, end, look, kills)

    def hand_on(number: int, frame: Any) -> None:
        deadline.note(number)
        if number != signal.SIGINT:
            process.send_signal(number)

    numbers = [getattr(signal, name) for name in _FORWARDED if hasattr(signal, name)]
    before = {number: signal.signal(number, hand_on) for number in numbers}
    try:
        while True:
            try:
                code = process.wait(min(deadline.left(), 1.0))  # a signal may have brought the end nearer
                return code, deadline.timed_out, frozenset(deadline.came)
            except subprocess.TimeoutExpired:
                deadline.passed()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class Deadline:
    """Interrupts a process after its time limit or when ``look`` says so; kills it if it does not end then."""

    def __init__(
        self, process: "subprocess.Popen[bytes]", end: float | None, look: Callable[[], bool] | None, kills: bool
    ) -> None:
        self._process = process
        self._end = end
        self._look = look
        self._kills = kills
        self._next_look = time.monotonic() + _LOOKS
        self._is_interrupted = False
        self._failures: set[str] = set()
        self.timed_out = False
        self.came: set[int] = set()  # signals

    def note(self, number: int) -> None:
        """Notes a signal that came for the process; one that is killed at its time limit ends soon after Ctrl-C."""
        self.came.add(number)
        if number == signal.SIGINT and self._kills and not self._is_interrupted:
            self._is_interrupted = True
            self._end = time.monotonic() + _LITTLE_PATIENCE

    def left(self) -> float:
        """Seconds until the next call of ``look`` or the time limit, at most an hour."""
        now = time.monotonic()
        ends = [*([] if self._end is None else [self._end]), *([] if self._look is None else [self._next_look])]
        return max(0.0, min([3600.0, *(end - now for end in ends)]))

    def passed(self) -> None:
        """Calls ``look``, interrupts or kills the process, if it is time."""
        if self._look is not None and time.monotonic() >= self._next_look:
            if self._safely(self._look) and not self._is_interrupted:
                self._interrupt()
            self._next_look = time.monotonic() + _LOOKS
        if self._end is None or time.monotonic() < self._end:
            return
        self.timed_out |= not self._is_interrupted
        if self._is_interrupted or self._kills:
            self._process.kill()
            self._end = time.monotonic() + _PATIENCE
        else:
            self._interrupt()

    def _safely(self, look: Callable[[], bool]) -> bool:
        """What a look says; one that fails is reported once, and the script goes on."""
        try:
            return look()
        except Exception as error:  # noqa: BLE001 - the script must not end with what looks at it
            text = f"anybatch doctor: a look at the run failed: {type(error).__name__}: {error}"
            if text not in self._failures:
                self._failures.add(text)
                with contextlib.suppress(OSError, ValueError):
                    click.echo(text, err=True)
            return False

    def _interrupt(self) -> None:
        self._process.send_signal(getattr(signal, "CTRL_C_EVENT", signal.SIGINT))
        self._is_interrupted = True
        self._end = time.monotonic() + _PATIENCE


def end_as(code: int) -> None:
    """Ends this process as the script ended: with its exit code, or by the same signal."""
    if code < 0:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        with contextlib.suppress(ImportError, ValueError, OSError):
            import resource

            resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
        with contextlib.suppress(OSError, ValueError):
            if -code != signal.SIGKILL:
                signal.signal(-code, signal.SIG_DFL)
            os.kill(os.getpid(), -code)
    sys.exit(code if code >= 0 else 128 - code)
