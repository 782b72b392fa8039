"""``anybatch report``: the diagnosis of a recorded run."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from anybatch.cli.doctor_records import MOST, damage_of, is_record
from anybatch.cli.reporting import Wanted, reporting_options
from anybatch.records.diagnoses import Diagnosis
from anybatch.records.runs import Run, load_run


@click.command("report", short_help="Report on a run that the doctor recorded.")
@click.argument("record", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.argument("other", type=click.Path(exists=True, dir_okay=False, path_type=Path), required=False)
@reporting_options
def report_command(record: Path, other: Path | None, **reporting: Any) -> None:
    """Diagnoses a RECORD that anybatch doctor --record run.jsonl or anybatch.Doctor(path=...) wrote.

    With a second record, OTHER, and -o FILE, which it needs, a page shows both runs on the same axes.

    Nothing is run, and torch is not needed. The rules are those of this version, which may find more than the version
    that recorded the run.
    """
    ignored = any(reporting[name] for name in ("json_path", "formats", "quiet", "baseline"))
    if other is not None and reporting["output"] is None:
        raise click.UsageError(
            f"two records are compared on a page, which needs a name: anybatch report {record} {other} -o both.html"
        )
    if other is not None and ignored:
        raise click.UsageError(
            "two records are compared on a page only; leave --json, --format, --quiet and --baseline out"
        )
    wanted = Wanted(Path(), **reporting)
    with _readable(record) as run:
        found = _diagnosed(run, wanted)
        if other is None:
            # JSON has standard output for itself.
            wanted.write(found, run, Console(stderr=wanted.outputs.takes_stdout, highlight=False), {})
    if other is not None:
        with _readable(other) as second:
            _show_both((record, found, run), (other, _diagnosed(second, wanted), second), wanted)


@contextmanager
def _readable(record: Path) -> Iterator[Run]:
    """The run of a record; what does not fit together is an error with a remedy."""
    if not record.stat().st_size:
        raise click.UsageError(
            f"{record} is empty, so there is no run in it; anybatch doctor --record {record.stem}.jsonl makes a record"
        )
    if not is_record(record):
        raise click.UsageError(
            f"{record} is no record of a run; anybatch doctor --record {record.stem}.jsonl makes one"
        )
    run = load_run(record)
    try:
        yield run
    except (AttributeError, ArithmeticError, LookupError, RecursionError, TypeError, ValueError) as error:
        what = "".join(f"\n  {one}" for one in run.damaged[:MOST])
        raise click.ClickException(
            f"{record} can't be reported: what it holds does not fit together ({type(error).__name__}: {error}). "
            f"Record the run again, or remove the lines that are damaged.{what}"
        ) from error


def _diagnosed(run: Run, wanted: Wanted) -> Diagnosis:
    from anybatch.doctor.diagnosing import diagnosis

    found = wanted.diagnosed(lambda policy: diagnosis(run, policy))
    return replace(found, notes=(*damage_of(run), *found.notes))


def _show_both(first: tuple[Path, Diagnosis, Run], second: tuple[Path, Diagnosis, Run], wanted: Wanted) -> None:
    from anybatch.report.comparison import Recorded, comparison_page
    from anybatch.report.diagnosis import verdict_of

    names = [path.stem for path, *_ in (first, second)]
    names = names if names[0] != names[1] else [str(path) for path, *_ in (first, second)]
    both = [Recorded(name, found, run) for name, (_, found, run) in zip(names, (first, second), strict=True)]

    def show(console: Console) -> None:
        for one in both:
            console.print(f"{one.name}: {verdict_of(one.diagnosis, one.run)}.", markup=False, soft_wrap=True)

    wanted.outputs.write({}, show, lambda: comparison_page(*both))
