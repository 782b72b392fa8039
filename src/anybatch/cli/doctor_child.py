"""The doctor in the process of the user's script: attaches once torch is imported, and finishes at the exit.

Python itself runs the script, so ``__main__``, arguments, tracebacks and exit codes are as without the doctor. This
module is loaded before the script, and loads nothing that the script might notice before it imports torch.
"""

import atexit
import contextlib
import copy
import functools
import os
import select
import signal
import sys
import threading
import time
import traceback
import types
import warnings
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NoReturn

from anybatch.doctor.frames import HiddenFrames, without_own_frames

BEGAN = "began"
ATTACHED = "attached"
BROKEN = "broken"
LOST = "lost"
LEFT = "left"
PROCESSES = "processes"
_WHOLE = "all were asked"  # the last line of the process of the questions
_LAUNCHED_BY = "ANYBATCH_DOCTOR_LAUNCHED_BY"
_SECONDS = 60.0  # that all probes may take together, in a process of their own
_ACTIVE_SECONDS = 300.0  # with those that train a copy


def begin(folder: str, settings: Mapping[str, Any]) -> None:
    """Makes the doctor attach as soon as torch has been imported.

    Args:
        settings: ``record``, ``script``, ``arguments``, ``every``, ``active``, ``ask``, ``launches_ranks``
            (whether this process starts others that train, each of which then writes a record of its
            own), ``steps`` after which the run ends, and ``trial`` if a fix is tried.
    """
    if settings.get("launches_ranks"):
        if os.environ.pop(_LAUNCHED_BY, None) != folder:
            others = os.environ.get("PYTHONPATH")
            os.environ["PYTHONPATH"] = os.pathsep.join([folder, *([others] if others else [])])
            os.environ[_LAUNCHED_BY] = folder
            return
        settings = {**settings, "record": of_rank(settings["record"], os.environ.get("RANK", "0"))}
    attendance = Attendance(folder, settings)
    attendance.note(BEGAN, "")
    if settings.get("trial"):
        from anybatch.cli import doctor_trial

        attendance.trial = doctor_trial.Trial(settings["trial"])
        attendance.trial.begin()
    if "torch" in sys.modules:
        attendance.attach()
    else:
        sys.meta_path.insert(0, TorchFinder(attendance))
        atexit.register(attendance.left)


def of_rank(record: str, rank: int | str) -> str:
    """The path of the record of one rank: ``run.rank1.jsonl`` for ``run.jsonl``."""
    stem, suffix = os.path.splitext(record)  # noqa: PTH122 - pathlib is not loaded for this
    return f"{stem}.rank{rank}{suffix}"


class TorchFinder:
    """An import hook that attaches something once torch has been loaded."""

    def __init__(self, attendance: Any) -> None:
        self._attendance = attendance

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """The spec of another finder for torch, with a loader that attaches; ``None`` for other modules."""
        if name != "torch":
            return None
        others: list[Any] = [one for one in sys.meta_path if one is not self and hasattr(one, "find_spec")]
        spec = next((spec for one in others if (spec := one.find_spec(name, path, target)) is not None), None)
        if spec is None:
            return None
        loader = spec.loader
        load = getattr(loader, "exec_module", None)
        if load is None:
            return spec

        def load_and_attach(module: types.ModuleType) -> None:
            with contextlib.suppress(AttributeError):
                del loader.exec_module
            load(module)
            with contextlib.suppress(ValueError):
                sys.meta_path.remove(self)
            self._attendance.attach()

        with contextlib.suppress(AttributeError):  # a loader that can't be changed: the script runs on its own
            loader.exec_module = load_and_attach
        return spec


class Attendance:
    """The doctor in one process, from the import of torch to the exit."""

    def __init__(self, folder: str, settings: Mapping[str, Any]) -> None:
        self._folder = folder
        self._settings = settings
        self.trial: Any = None  # of a fix, if one is tried
        self._process = os.getpid()
        self._doctor: Any = None
        self._told: BaseException | None = None
        self._hooks: tuple[Any, Any] = (None, None)
        self._frames = HiddenFrames()

    def note(self, name: str, text: str) -> None:
        """Appends to a file that the parent process reads; an ``OSError`` is ignored."""
        with contextlib.suppress(OSError), open(os.path.join(self._folder, name), "a", encoding="utf-8") as file:  # noqa: PTH118, PTH123
            file.write(text)

    def left(self) -> None:
        """Notes that the process ended normally."""
        if os.getpid() == self._process:
            self.note(LEFT, "")

    def _broken(self, error: BaseException) -> None:
        if not isinstance(error, KeyboardInterrupt):  # a second Ctrl-C while the doctor works is no fault of it
            self.note(BROKEN, "".join(traceback.format_exception(error)))

    def attach(self) -> None:
        """Attaches the doctor; if that fails, the script runs without it."""
        if self._doctor is not None:
            return
        try:
            from anybatch.doctor.recorder import Doctor

            settings = self._settings
            doctor = Doctor(
                path=Path(settings["record"]),
                script=settings["script"],
                arguments=tuple(settings["arguments"]),
                every=settings["every"],
                ask=settings["ask"],
                active=settings["active"],
            )
            limit = _ACTIVE_SECONDS if settings["active"] else _SECONDS
            doctor.answers = functools.partial(_apart, doctor.answers, limit)
            doctor.attach()
        except BaseException as error:  # the script must not notice
            self._broken(error)
            if isinstance(error, KeyboardInterrupt):
                raise
            return
        self._doctor = doctor
        self.note(ATTACHED, "")
        if settings.get("steps"):
            from anybatch.doctor.live import AfterStep

            AfterStep(doctor, lambda step: sys.exit(0) if step >= settings["steps"] else None)
        if self.trial is not None:
            self.trial.with_torch(sys.modules["torch"], self.finish)
        atexit.register(self.finish)
        self._hooks = (sys.excepthook, threading.excepthook)
        self._frames.put_on()
        sys.excepthook = self.excepthook
        threading.excepthook = self.thread_excepthook

    def excepthook(self, kind: type[BaseException], error: BaseException, frames: types.TracebackType | None) -> None:
        """Records an exception and its explanation; Python prints it without the doctor's frames."""
        crashed = self._tell(error)
        try:
            self._hooks[0](kind, error, error.__traceback__ if error.__traceback__ is not None else frames)
        finally:
            self._emit(crashed, error)

    def thread_excepthook(self, arguments: Any) -> None:
        """The same in a thread; the explanation is printed at once, because the script continues."""
        if arguments.exc_value is not None and arguments.exc_type is not SystemExit:
            self._emit(self._tell(arguments.exc_value, at_once=True), None)
        self._hooks[1](arguments)

    def _tell(self, error: BaseException, *, at_once: bool = False) -> Any:
        """What is known of an exception that ends the script or a thread; ``None`` where nothing is to be told."""
        if os.getpid() != self._process or self._told is error or isinstance(error, SystemExit):
            return None
        self._told = error
        try:
            without_own_frames(error)
            if isinstance(error, KeyboardInterrupt):
                return None
            from anybatch.doctor.crashes import explain, prefix

            crashed = explain(error, self._doctor)
            # Not all ranks are reported.
            if crashed is not None and crashed.name and (at_once or self._settings.get("launches_ranks")):
                sys.stderr.write(f"{prefix(crashed)}\n")
                sys.stderr.flush()
        except BaseException as failure:  # noqa: BLE001 - the script's own traceback has to come in any case
            self._broken(failure)
            return None
        return crashed

    def _emit(self, crashed: Any, ended: BaseException | None) -> None:
        """Records a crash; where it ended the script for want of memory with a plan, for which frames are emptied."""
        if crashed is None:
            return
        try:
            if crashed.name == "OUT_OF_MEMORY" and ended is not None:
                from anybatch.cli.plan_loops import with_plan

                crashed = with_plan(crashed, ended)
            self._doctor.emit(crashed)
        except BaseException as failure:  # noqa: BLE001 - the script has ended, and not for this
            self._broken(failure)

    def _note_processes(self) -> None:
        """Notes how many processes the script has started, in which nothing is seen."""
        module = sys.modules.get("multiprocessing.process")
        counter = getattr(module, "_process_counter", None)  # gives the next number, from 1
        number = next(copy.copy(counter)) - 1 if counter is not None else 0
        if number > 0:
            self.note(PROCESSES, str(number))

    def finish(self) -> None:
        """Has the doctor put its questions and close the record; the exit code is unchanged."""
        if os.getpid() != self._process:
            return
        try:
            self._note_processes()
            error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
            if isinstance(error, BaseException):  # of a script with an excepthook of its own
                self._emit(self._tell(error), error)
        except BaseException as failure:  # noqa: BLE001 - the script has ended, and not for this
            self._broken(failure)
        try:
            self._doctor.close()
        except BaseException as failure:  # noqa: BLE001 - also Ctrl-C, which ends the questions and nothing else
            self._broken(failure)
        self._frames.take_off()
        if self._doctor.lost:
            self.note(BROKEN, self._doctor.lost)
            self.note(LOST, "")


def _apart(answers: Callable[[], Iterable[Any]], limit: float) -> Iterable[Any]:
    """Puts the questions in a fork of this process where that is possible.

    This process loads nothing for them: Python, where it compiles a text, forgets that Ctrl-C ended the script, and
    gives it another exit code. A fork can run out of time or memory, or crash, without a change of that code. If the
    script used a GPU there is no fork, since CUDA does not survive one.
    """
    if not hasattr(os, "fork") or _has_gpu():
        return answers()
    reading, writing = os.pipe()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, ValueError, OSError):  # there may be none, or it is closed
            stream.flush()  # or the copy would have it, too
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python 3.12 warns of a fork beside the threads of torch
        process = os.fork()
    if process == 0:
        _in_copy(answers, writing)
    os.close(writing)
    try:
        lines = _read(reading, limit)
    finally:
        os.close(reading)
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
    from anybatch.records.lines import from_line

    facts = [from_line(line) for line in lines if line != _WHOLE]
    if lines[-1:] != [_WHOLE]:
        from anybatch.records.lossfacts import ALL_ASKED, Probed

        facts.append(Probed(probe=ALL_ASKED, detail=f"their process ended, or had to be ended, after {len(facts)}"))
    return [fact for fact in facts if fact is not None]


def _has_gpu() -> bool:
    accelerator = getattr(sys.modules.get("torch"), "accelerator", None)
    if accelerator is None or not accelerator.is_available():
        return False
    from anybatch.accelerators import in_use

    return bool(in_use())


def _in_copy(answers: Callable[[], Iterable[Any]], writing: int) -> NoReturn:
    try:
        from anybatch.records.lines import to_line

        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that waits is told, and ends this one
        silence = os.open(os.devnull, os.O_RDWR)
        for number in (0, 1, 2):
            os.dup2(silence, number)
        torch = sys.modules["torch"]
        torch.set_num_threads(1)  # the threads of this process are not in its copy
        with open(writing, "w", encoding="utf-8", buffering=1) as file:  # by lines: a crash leaves what came before it
            for fact in answers():
                file.write(to_line(fact) + "\n")
            file.write(_WHOLE + "\n")
    except BaseException:  # noqa: BLE001 - a copy ends here whatever happens
        os._exit(1)
    os._exit(0)


def _read(reading: int, seconds: float) -> list[str]:
    """The whole lines that came in time."""
    end = time.monotonic() + seconds
    read = b""
    while (left := end - time.monotonic()) > 0:
        if not select.select([reading], [], [], left)[0]:
            break
        part = os.read(reading, 65536)
        if not part:
            break
        read += part
    return read.decode("utf-8", "replace").split("\n")[:-1]
