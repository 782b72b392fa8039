"""Questions to a copy of a model after the script has ended, in a process of their own where that is possible."""

import contextlib
import logging
import os
import select
import signal
import sys
import time
import warnings
from collections.abc import Iterable
from typing import Any, NoReturn

from anybatch.doctor.ask import ignoring, leaks
from anybatch.doctor.ask.asking import asked
from anybatch.doctor.ask.trials import Trial, Unknown, undisturbed
from anybatch.records.lines import Fact, from_line, to_line
from anybatch.records.lossfacts import Probed
from anybatch.records.runs import Run

_SECONDS = 60.0  # that all probes may take together, in a process of their own
_ACTIVE_SECONDS = 300.0  # with those that train a copy


def probed(doctor: Any, *, active: bool) -> list[Fact]:
    """Runs the probes, in a fork of this process where that is possible.

    A fork can run out of time or memory, or crash, without a change of the script's exit code. If the script used a
    GPU there is no fork, since CUDA does not survive one.
    """
    if not hasattr(os, "fork") or _has_gpu():
        return list(_asked_silently(doctor, active=active))
    reading, writing = os.pipe()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, ValueError, OSError):  # there may be none, or it is closed
            stream.flush()  # or the copy would have it, too
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python 3.12 warns of a fork beside the threads of torch
        process = os.fork()
    if process == 0:
        _in_copy(doctor, writing, active=active)
    os.close(writing)
    try:
        lines = _read(reading, _ACTIVE_SECONDS if active else _SECONDS)
    finally:
        os.close(reading)
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
    facts = [from_line(line) for line in lines]
    return [fact for fact in facts if fact is not None]


def _has_gpu() -> bool:
    accelerator = getattr(sys.modules.get("torch"), "accelerator", None)
    if accelerator is None or not accelerator.is_available():
        return False
    from anybatch.accelerators import in_use

    return bool(in_use())


def _asked_silently(doctor: Any, *, active: bool) -> Iterable[Fact]:
    from anybatch.doctor.probing import run_probes

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found: Iterable[Fact] = run_probes(doctor, active=active)
    return found


def _in_copy(doctor: Any, writing: int, *, active: bool) -> NoReturn:
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that waits is told, and ends this one
        silence = os.open(os.devnull, os.O_RDWR)
        for number in (0, 1, 2):
            os.dup2(silence, number)
        torch = sys.modules["torch"]
        torch.set_num_threads(1)  # the threads of this process are not in its copy
        with open(writing, "w", encoding="utf-8") as file:
            for fact in _asked_silently(doctor, active=active):
                file.write(to_line(fact) + "\n")
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


_MOST_ROOTS = 4
_log = logging.getLogger(__name__)


def run_probes(doctor: Any, *, active: bool = False, seconds: float = 20.0) -> list[Probed]:
    """Asks copies of the models of a run what the run itself did not show.

    The user's models, gradients and random state are unchanged. A question without a sure answer is answered with
    ``"unknown"`` and the reason; those that come after the time limit get no answer.
    """
    found: list[Probed] = []
    try:
        until = time.perf_counter() + seconds
        given = dict(getattr(doctor, "last_inputs", None) or {})
        run = getattr(doctor, "run", None) or Run([])
        with undisturbed():
            for root in sorted(given)[:_MOST_ROOTS]:
                module, args, kwargs = given[root]
                found.extend(_of_root(doctor, run, root, module, args, kwargs, active, until))
            if (kept := getattr(doctor, "kept", None)) is not None:
                found.extend(asked(kept, run, {root: one[0] for root, one in given.items()}, until))
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # noqa: BLE001 - a question must never end the user's script otherwise than it ended
        _log.warning("the probes stopped: %s: %s", type(error).__name__, error)
    return found


def _of_root(
    doctor: Any, run: Run, root: int, module: Any, args: Any, kwargs: Any, active: bool, until: float
) -> list[Probed]:
    probes: list[tuple[str, Any]] = [
        ("batch", leaks.mixing),
        ("time", leaks.leaking),
        ("input", ignoring.ignored),
        ("padding read", ignoring.padding_read),
        ("modes", ignoring.random_in_evaluation),
        ("evaluated scores", ignoring.squashed_in_evaluation),
    ]
    if active:
        from anybatch.doctor.ask import training

        probes += training.PROBES
    try:
        trial = Trial(module, args, kwargs, until)
    except Unknown as reason:
        return [Probed(probe=name, root=root, detail=str(reason)) for name, _ in probes]
    return [_answer(name, probe, trial, run, root, doctor) for name, probe in probes]


def _answer(name: str, probe: Any, trial: Trial, run: Run, root: int, doctor: Any) -> Probed:
    """One answer; a question that fails leaves the others theirs."""
    try:
        answer: Probed = probe(trial, run, root, doctor)
    except Unknown as reason:
        return Probed(probe=name, root=root, detail=str(reason))
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # noqa: BLE001 - a question must never end the script otherwise than it ended
        _log.warning("the probe %s failed: %s: %s", name, type(error).__name__, error)
        return Probed(probe=name, root=root, detail=f"{type(error).__name__}: {error}"[:300])
    return answer
