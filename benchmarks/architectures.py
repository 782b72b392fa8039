"""Which architectures and which of their heads split exactly, and with which count.

    python benchmarks/architectures.py --jobs 2 --json benchmarks/results/architectures.json -o docs/architectures.md
    python benchmarks/architectures.py --resume --json ... -o ...        # goes on with what is missing in the JSON file
    python benchmarks/architectures.py --only bert --only llama          # prints the table of some architectures

Tiny models of Transformers, torchvision and timm are made from configurations; nothing is downloaded. Heads run in
processes of their own with a time limit each; what fails or takes longer is in the table with its reason. The JSON file
is written after every head. ``--render`` writes the page from it and measures nothing.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import os
import select
import subprocess
import sys
import threading
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import architecture_page
import click
from architecture_names import TRANSFORMERS
from architecture_sizes import TIMM, TORCHVISION

Item = tuple[str, str, str]  # library, architecture, head


def quiet() -> None:
    """Lets torchvision be imported beside a torch without its compiled operators, and Transformers say nothing."""
    torch = importlib.import_module("torch")
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    warnings.simplefilter("ignore")
    spec = importlib.util.find_spec("torchvision")
    if spec is not None and "+cpu" in torch.__version__:
        for name in ("nms", "qnms"):  # registered by the missing library; no classifier calls them
            torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    transformers = importlib.import_module("transformers")
    transformers.logging.set_verbosity_error()


def items(only: Sequence[str]) -> list[Item]:
    """All heads that are to be looked at: first one of each architecture, then a second, so that many are there soon.

    Args:
        only: architectures, libraries, or an architecture and its head with a slash between; empty for all.
    """
    models = importlib.import_module("architecture_models")
    found: list[tuple[int, Item]] = []
    for name, heads in TRANSFORMERS.items():
        found += [(turn, ("transformers", name, head)) for turn, head in enumerate(models.heads_of(name, heads))]
    for library, names in (("torchvision", TORCHVISION), ("timm", TIMM)):
        found += [(0, (library, name, "image")) for name in names]
    chosen = [item for _, item in sorted(found, key=lambda one: one[0])]
    return [item for item in chosen if not only or {item[0], item[1], f"{item[1]}/{item[2]}"} & set(only)]


def measured(item: Item) -> dict[str, Any]:
    """The row of one head; what it fails with if it does."""
    library, name, head = item
    models, rows = importlib.import_module("architecture_models"), importlib.import_module("architecture_rows")
    try:
        case = models.transformer(name, head) if library == "transformers" else models.classifier(library, name)
        return dict(rows.row_of(case))
    except Exception as error:  # noqa: BLE001 - a table of strangers' models: what fails is a row of it
        return {"missing": f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:160]}


def work() -> None:
    """Reads heads from standard input, one a line, and writes their rows, until there are no more."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a library prints does not mix with the rows
    quiet()
    for line in sys.stdin:
        answers.write(json.dumps(measured(tuple(json.loads(line)))) + "\n")
        answers.flush()


class Worker:
    """A process that makes rows, and that is started again after a head that took too long.

    Args:
        limit: seconds a head.
    """

    def __init__(self, limit: float) -> None:
        self._limit = limit
        self._process: subprocess.Popen[bytes] | None = None

    def row(self, item: Item) -> dict[str, Any]:
        """The row of one head."""
        process = self._started()
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps(item).encode() + b"\n")
        process.stdin.flush()
        ready, _, _ = select.select([process.stdout], [], [], self._limit)
        line = process.stdout.readline() if ready else b""
        if line:
            return dict(json.loads(line))
        self.stop()
        return {"missing": "the process ended" if ready else f"took longer than {self._limit:g} s"}

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            command = [sys.executable, __file__, "--worker"]
            pipe = subprocess.PIPE
            environment = {**os.environ, "OMP_NUM_THREADS": "1"}
            self._process = subprocess.Popen(
                command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, env=environment, bufsize=0
            )
        return self._process

    def stop(self) -> None:
        """Ends the process."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


class Table:
    """The rows so far, which several workers add to.

    Args:
        wanted: the heads, in order.
        path: the JSON file, ``None`` for none.
        known: rows from before.
    """

    def __init__(self, wanted: Sequence[Item], path: Path | None, known: dict[Item, dict[str, Any]]) -> None:
        self._wanted = list(wanted)
        self._path = path
        self._rows = known
        self._before = load(path)[0] if known and path is not None else facts()
        self._todo = iter([item for item in wanted if item not in known])
        self._lock = threading.Lock()

    @property
    def facts(self) -> dict[str, str]:
        """The versions, those of rows from before where a library is not there now."""
        return {name: found if found != "not installed" else self._before[name] for name, found in facts().items()}

    def next(self) -> Item | None:
        """The next head that has no row."""
        with self._lock:
            return next(self._todo, None)

    def add(self, item: Item, row: dict[str, Any]) -> None:
        """Keeps a row and writes the file."""
        with self._lock:
            self._rows[item] = row
            self.write()
            said = row.get("missing") or ("agrees" if row["agrees"] else "DISAGREES")
            click.echo(f"{len(self._rows)}/{len(self._wanted)} {' '.join(item[1:])}: {said}", err=True)

    def write(self) -> None:
        """Writes the file."""
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            lines = ",\n".join(json.dumps(row) for row in self.rows())
            self._path.write_text(f'{{"facts": {json.dumps(self.facts)},\n"rows": [\n{lines}\n]}}\n')

    def rows(self) -> list[dict[str, Any]]:
        """All rows, in order, those from before that are not wanted now too."""
        names = ("library", "architecture", "head")
        wanted = dict.fromkeys([*items(()), *self._rows])
        return [{**dict(zip(names, item, strict=True)), **self._rows[item]} for item in wanted if item in self._rows]


def facts() -> dict[str, str]:
    """The versions that the rows were made with."""
    return {name: _version(name) for name in ("torch", "transformers", "torchvision", "timm")}


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def load(path: Path) -> tuple[dict[str, str], list[dict[str, Any]]]:
    """The versions and the rows of a file."""
    found = json.loads(path.read_text())
    return found["facts"], found["rows"]


def known_rows(path: Path | None, *, resume: bool) -> dict[Item, dict[str, Any]]:
    """The rows of the file by head, without those that failed."""
    if not resume or path is None or not path.exists():
        return {}
    rows = load(path)[1]
    keys = ("library", "architecture", "head")
    return {
        tuple(row[key] for key in keys): {k: v for k, v in row.items() if k not in keys}  # type: ignore[misc]
        for row in rows
        if "missing" not in row
    }


def run(table: Table, jobs: int, limit: float) -> None:
    """Makes all rows that are missing."""

    def one() -> None:
        worker = Worker(limit)
        while (item := table.next()) is not None:
            table.add(item, worker.row(item))
        worker.stop()

    threads = [threading.Thread(target=one) for _ in range(jobs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@click.command(help="Finds out which heads of which architectures split exactly, and with which count.")
@click.option("--only", multiple=True, help="An architecture, or its head as in llama/causal; several times for more.")
@click.option("--jobs", default=2, show_default=True, type=click.IntRange(min=1), help="Processes.")
@click.option("--limit", default=90.0, show_default=True, help="Seconds a head.")
@click.option("--resume", is_flag=True, help="Keep the rows of the JSON file that did not fail.")
@click.option("--render", is_flag=True, help="Write the page from the JSON file, measure nothing.")
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="The unrounded rows.")
@click.option("-o", "--output", type=click.Path(path_type=Path), help="The page, as Markdown.")
@click.option("--worker", is_flag=True, hidden=True)
def main(
    only: tuple[str, ...],
    jobs: int,
    limit: float,
    resume: bool,
    render: bool,
    json_path: Path | None,
    output: Path | None,
    worker: bool,
) -> None:
    """Parses the options, makes the rows and writes the files."""
    if worker:
        work()
        return
    if render:
        if json_path is None:
            raise click.UsageError("--render needs --json FILE, from which the page is written")
        text = architecture_page.page(*load(json_path))
    else:
        quiet()
        wanted = [item for item in items(only) if item[0] == "transformers" or facts()[item[0]] != "not installed"]
        table = Table(wanted, json_path, known_rows(json_path, resume=resume))
        run(table, jobs, limit)
        table.write()
        text = architecture_page.page(table.facts, table.rows())
    if output is None:
        click.echo(text)
    else:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(text)


if __name__ == "__main__":
    main()
