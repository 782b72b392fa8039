"""Runs a script in this process as a trial of a fix would run it in one of its own, and tries the fixes of it."""

import linecache
import sys
import warnings
from pathlib import Path
from typing import Any

from torch.optim.optimizer import register_optimizer_step_post_hook

from anybatch.doctor.ask.asking import run_probes
from anybatch.doctor.crashes import explain
from anybatch.doctor.diagnosing import diagnosis
from anybatch.doctor.fixes.scene import reader
from anybatch.doctor.fixes.source import Edit
from anybatch.doctor.fixes.trying import LEAST_STEPS, Outcome, Tried, steps_for, tried, with_edits
from anybatch.doctor.recorder import Doctor
from anybatch.records.events import Ended
from anybatch.records.findings import Finding


def trial(path: Path, text: str, steps: int = LEAST_STEPS) -> Tried:
    """A run of a text that stands for a file, ended after some steps of an optimizer."""
    path.write_text(text, encoding="utf-8")
    linecache.cache[str(path)] = (len(text), None, text.splitlines(keepends=True), str(path))
    counts: dict[int, int] = {}

    def stepped(optimizer: Any, *more: Any) -> None:
        counts[id(optimizer)] = counts.get(id(optimizer), 0) + 1
        if counts[id(optimizer)] >= steps:
            raise SystemExit(0)

    code = 0
    arguments, sys.argv = sys.argv, [str(path)]
    with Doctor() as doctor:
        doctor.kept.on = True
        hook = register_optimizer_step_post_hook(stepped)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("default")  # as in a process of its own
                exec(compile(text, str(path), "exec"), {"__name__": "__main__", "__file__": str(path)})
        except SystemExit:
            pass
        except Exception as error:  # noqa: BLE001 - whatever the script raises
            code, crashed = 1, explain(error, doctor)
            if crashed is not None:
                doctor.emit(crashed)
        finally:
            hook.remove()
            sys.argv = arguments
        doctor.detach()
        for fact in run_probes(doctor):
            doctor.emit(fact)
        doctor.emit(Ended(exit_code=code))
    return Tried(diagnosis(doctor.run), doctor.run, code=code)


def fixed(path: Path, text: str, name: str = "") -> tuple[Finding, Outcome, Tried]:
    """What is found in a text, that stands in a file: the cause, what became of its fix, and the run without it."""
    path.write_text(text, encoding="utf-8")
    first = trial(path, text, steps=100_000)
    found = [one for one in with_edits(first.diagnosis) if name in ("", one.name)]
    assert found, [one.name for one in first.diagnosis.findings]
    runs: list[Tried] = []
    steps = steps_for(found[:1])

    def without() -> Tried:
        if not runs:
            runs.append(trial(path, text, steps))
        return runs[0]

    def start(edit: Edit | None) -> Tried:
        return trial(path, text if edit is None else edit.after, steps)

    outcome = tried(found[0], first.run, reader(lambda one: one == str(path), {}), without, start, 4)
    return found[0], outcome, without()
