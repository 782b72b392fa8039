"""The tour as one page."""

import json
from collections.abc import Sequence
from pathlib import Path

from anybatch.demo.touring import PLAN, RECORD, Chapter, CommandRun
from anybatch.records.plans import Plan
from anybatch.records.runs import load_run
from anybatch.report.diagnosis_page import page as diagnosis_page
from anybatch.report.frontier import frontier_picture
from anybatch.report.pages import render_page
from anybatch.units import format_seconds


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
