"""How many faulty programs does ``anybatch doctor --fix`` mend, and are they what their repaired twins are?

    python benchmarks/doctor/fixes.py                 # all programs of faulty/
    python benchmarks/doctor/fixes.py f07 f16         # some
    python benchmarks/doctor/fixes.py --of FOLDER     # NAME.py and its twin NAME_ok.py in a folder

A patch is right beyond doubt where the program with it prints, to the last digit, what its twin prints. Where it prints
something else the last lines of both are shown: a learning rate may be another one than the twin's, and be right.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import click

FAULTY = Path(__file__).resolve().parent / "faulty"
PATIENCE = 1800


class Case(NamedTuple):
    """A faulty program, and the command of its twin."""

    program: Path
    twin: tuple[str, ...]


class Mended(NamedTuple):
    """What became of one: the finding, what was said of its fix, and what patched program and twin print at the end."""

    finding: str
    said: str
    same: bool = False
    patched: str = ""
    twin: str = ""


def cases(folder: Path | None, keys: tuple[str, ...]) -> list[Case]:
    """The programs.

    Args:
        folder: with programs and their twins, ``None`` for those of the benchmark.
        keys: beginnings of their names; all of them without any.
    """
    if folder is None:
        found = [Case(one, (str(one), "--fixed")) for one in sorted(FAULTY.glob("*.py"))]
    else:
        twins = sorted(folder.glob("*_ok.py"))
        found = [Case(one.with_name(one.name.replace("_ok.py", ".py")), (str(one),)) for one in twins]
    return [one for one in found if not keys or one.program.name.startswith(keys)]


def mended(case: Case) -> Mended:
    """Tries to mend one program, in a folder of its own.

    Args:
        case: which.
    """
    with tempfile.TemporaryDirectory(prefix="benchmark-") as name:
        folder = Path(name)
        program = folder / case.program.name
        program.write_bytes(case.program.read_bytes())
        files = ["--json", "out.json", "--patch", "fix.patch"]
        _printed(folder, "-m", "anybatch", "doctor", *files, program.name)
        values = json.loads((folder / "out.json").read_text(encoding="utf-8"))
        first = next((one for one in values["findings"] if one["fix_kind"] == "tried" and one["patch"]), None)
        if first is None:
            causes = [one for one in values["findings"] if one["severity"] != "info"]
            said = [note for note in values["notes"] if note.startswith(("AB", "No fix was tried"))]
            return Mended(causes[0]["name"] if causes else "-", "; ".join(said))
        subprocess.run(["git", "apply", "fix.patch"], cwd=folder, check=True)
        patched, twin = _printed(folder, program.name), _printed(folder, *case.twin)
        return Mended(first["name"], first["proof"], patched == twin, _end(patched), _end(twin))


def _printed(folder: Path, *command: str) -> str:
    """What a command of Python prints on standard output."""
    threads = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}
    done = subprocess.run(
        [sys.executable, *command], cwd=folder, env=os.environ | threads, capture_output=True, text=True,
        timeout=PATIENCE, check=False,
    )  # fmt: skip
    return done.stdout


def _end(text: str) -> str:
    return " | ".join(text.strip().splitlines()[-2:])


@click.command()
@click.argument("keys", nargs=-1)
@click.option("--of", "folder", type=click.Path(file_okay=False, exists=True, path_type=Path), help="Other programs.")
def main(keys: tuple[str, ...], folder: Path | None) -> None:
    """Mends the programs one after the other, and counts."""
    chosen = cases(folder, keys)
    rows = []
    for case in chosen:
        row = mended(case)
        rows.append(row)
        mark = "same as its twin" if row.same else "other output than its twin" if row.patched else "no fix"
        click.echo(f"{case.program.stem}: {row.finding}: {mark}; {row.said}")
        if row.patched and not row.same:
            click.echo(f"    patched  {row.patched}\n    twin     {row.twin}")
    patched = [row for row in rows if row.patched]
    same = sum(row.same for row in patched)
    click.echo(
        f"{len(rows)} programs, {len(patched)} with a fix that was tried and is good, {same} of them as their twins"
    )


if __name__ == "__main__":
    main()
