"""``anybatch demo --tour``: plan, step, several losses, a sequence, and a fault with its diagnosis."""

import tempfile
import time
from dataclasses import asdict
from pathlib import Path

import click
from rich.console import Console
from rich.syntax import Syntax

from anybatch.cli.options import write_json
from anybatch.demo.touring import CHAPTERS, FOLDER, Chapter, CommandRun, prepare, run
from anybatch.report.pages import missing_extra
from anybatch.units import format_seconds

_MOST_COLUMNS = 120


def show_tour(console: Console, page: Path, json_path: Path | None) -> None:
    """Runs all chapters."""
    began = time.monotonic()
    missing = missing_extra()
    _say(console, f"The scripts of this tour are in {FOLDER}. It takes about a minute; Ctrl-C ends it.")
    if missing:
        _say(console, f"\n{missing}\nEverything else runs without it.")
    stops = []
    shown: set[str] = set()
    with tempfile.TemporaryDirectory(prefix="anybatch-tour-", ignore_cleanup_errors=True) as name:
        folder = Path(name).resolve()
        prepare(folder)
        for number, chapter in enumerate(CHAPTERS, 1):
            _introduce(console, number, chapter, with_code=chapter.script not in shown)
            shown.add(chapter.script)
            stops.append((chapter, [_run(console, command, folder) for command in chapter.commands]))
        if not missing:
            from anybatch.demo.tourpage import tour_page

            page.write_text(tour_page(stops, folder, time.monotonic() - began), encoding="utf-8")
    if json_path is not None:
        _write(json_path, stops)
    console.print()
    if not missing:
        console.print(f"Page  {page.absolute()}", markup=False, soft_wrap=True)
    _say(console, f"Done in {format_seconds(time.monotonic() - began)}.")


def _introduce(console: Console, number: int, chapter: Chapter, *, with_code: bool) -> None:
    console.print()
    console.print(f"{number}. {chapter.title}", style="bold", markup=False)
    _say(console, chapter.text)
    if not with_code:
        return
    console.print()
    if console.is_terminal:
        console.print(Syntax(chapter.code, "python", theme="ansi_dark", background_color="default", word_wrap=True))
    else:
        console.print(chapter.code, markup=False, soft_wrap=True, end="")


def _run(console: Console, command: str, folder: Path) -> CommandRun:
    console.print()
    console.print(f"$ {command}", style="bold", markup=False, soft_wrap=True)
    columns = min(console.width, _MOST_COLUMNS)
    done = run(command, folder, columns=columns, on_line=lambda line: console.print(line, markup=False, soft_wrap=True))
    if done.code:
        raise click.ClickException(f"{command} ended with {done.code}; expected 0. Its output is above.")
    return done


def _say(console: Console, text: str) -> None:
    console.print(text, markup=False, width=min(console.width, _MOST_COLUMNS))


def _write(path: Path, stops: list[tuple[Chapter, list[CommandRun]]]) -> None:
    values = [{**asdict(chapter), "runs": [asdict(one) for one in runs]} for chapter, runs in stops]
    write_json(path, {"version": 1, "kind": "anybatch tour", "chapters": values})
