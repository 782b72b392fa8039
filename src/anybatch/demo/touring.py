"""The tour: scripts that are shown and then run, each in a process of its own, as a user would; and its page."""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from anybatch.records.plans import Plan
from anybatch.records.runs import load_run
from anybatch.report.diagnosis_page import page as diagnosis_page
from anybatch.report.frontier import frontier_picture
from anybatch.report.pages import render_page
from anybatch.units import format_seconds

FOLDER = Path(__file__).parent / "chapters"
RECORD = "faulty.jsonl"
PLAN = "plan.json"


@dataclass(frozen=True, slots=True)
class Chapter:
    """One part of the tour."""

    title: str  # its heading
    text: str  # what it shows, in a sentence or two
    script: str  # the file in ``FOLDER`` that is shown and run
    commands: tuple[str, ...]  # what is run, as a user types it in the folder of the script

    @property
    def code(self) -> str:
        """The text of the script."""
        return (FOLDER / self.script).read_text(encoding="utf-8")


@dataclass(frozen=True, slots=True)
class CommandRun:
    """A command that was run."""

    command: str  # as a user types it
    output: str  # what it wrote, standard error included
    code: int  # how it ended; 0 is well
    seconds: float  # how long it took


CHAPTERS = (
    Chapter(
        "Plan",
        "The script asks for 20 MiB, and its batch of 37 sequences needs more. anybatch plan runs the script up to its "
        "first step, traces that step, and shows what fits, the fastest first. Nothing is trained yet.",
        "training.py",
        (f"anybatch plan --json {PLAN} training.py",),
    ),
    Chapter(
        "Step",
        "The same script, run as it is: TrainStep plans on its first batch and takes each logical batch in the "
        "micro-batches of its plan, with one update of the optimizer.",
        "training.py",
        ("python training.py",),
    ),
    Chapter(
        "The gradient of the whole batch",
        "Micro-batches of unequal size, texts of unequal length. The usual loop divides by the number of "
        "micro-batches; anybatch weighs each by its tokens.",
        "exactness.py",
        ("python exactness.py",),
    ),
    Chapter(
        "Several losses",
        "Six heads on one trunk. Summed, the graphs of all heads are alive together; yielded at a cut, one at a time, "
        "with one backward through the trunk.",
        "losses.py",
        ("python losses.py",),
    ),
    Chapter(
        "A long sequence",
        "Back-propagation through 2000 steps of an LSTM, all of them, in chunks of time.",
        "sequence.py",
        ("python sequence.py",),
    ),
    Chapter(
        "A fault, and its diagnosis",
        "This script has a fault, and its loss falls all the same, only not as far as it should. anybatch doctor runs "
        "it unchanged and says what is wrong, where, and what to change.",
        "faulty.py",
        (f"anybatch doctor --record {RECORD} faulty.py",),
    ),
)


def prepare(folder: Path) -> None:
    """Copies the scripts of all chapters."""
    for chapter in CHAPTERS:
        shutil.copy(FOLDER / chapter.script, folder / chapter.script)


def run(command: str, folder: Path, *, columns: int, on_line: Callable[[str], None]) -> CommandRun:
    """Runs a command of a chapter."""
    first, *rest = command.split()
    arguments = [sys.executable, *(["-m", "anybatch"] if first == "anybatch" else []), *rest]
    surroundings = {
        **os.environ, "COLUMNS": str(columns), "NO_COLOR": "1", "PYTHONUNBUFFERED": "1", "PYTHONIOENCODING": "utf-8",
    }  # fmt: skip
    # OpenMP's threads spin while they wait; with other work on the cores that made a pass up to ten times slower.
    surroundings.setdefault("OMP_WAIT_POLICY", "passive")
    began = time.monotonic()
    lines: list[str] = []
    with subprocess.Popen(
        arguments, cwd=folder, env=surroundings, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, encoding="utf-8", errors="replace",
    ) as process:  # fmt: skip
        try:
            for line in process.stdout or ():
                lines.append(line.rstrip())
                on_line(lines[-1])
            code = process.wait()
        except BaseException:
            process.kill()
            raise
    return CommandRun(command, "\n".join(lines).strip("\n"), code, time.monotonic() - began)


def tour_page(stops: Sequence[tuple[Chapter, Sequence[CommandRun]]], folder: Path, seconds: float) -> str:
    """Renders the page of a tour.

    Raises:
        ImportError: jinja2 is not installed.
    """
    from anybatch.doctor.diagnosing import diagnosis

    run = load_run(folder / RECORD)
    plan = Plan.from_dict(json.loads((folder / PLAN).read_text(encoding="utf-8")))
    chapters = []
    shown: set[str] = set()
    for chapter, runs in stops:
        code = "" if chapter.script in shown else chapter.code
        shown.add(chapter.script)
        names = {name for one in runs for name in one.command.split()}
        chapters.append(
            {
                "title": chapter.title,
                "text": chapter.text,
                "script": chapter.script,
                "code": code,
                "runs": runs,
                "frontier": frontier_picture(plan) if PLAN in names else None,
                "diagnosis": diagnosis_page(diagnosis(run), run) if RECORD in names else "",
            }
        )
    return render_page("tour.html.j2", title="anybatch: a tour", seconds=format_seconds(seconds), chapters=chapters)
