"""``anybatch report``: what the doctor has recorded, shown again."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from anybatch.cli.doctor_records import MOST, damage_of, is_record
from anybatch.cli.options import check_folder, json_option
from anybatch.cli.reporting import Wanted, reporting_options
from anybatch.records.runs import Run, load_run
from anybatch.report.pages import is_own_page, missing_extra


@click.command("report", short_help="Show what the doctor has recorded.")
@click.argument("record", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@json_option("the diagnosis")
@click.option(
    "-o", "--output", metavar="FILE", type=click.Path(dir_okay=False, path_type=Path), help="Write a page, in HTML."
)
@click.option("--force", is_flag=True, help="Overwrite a file that anybatch did not write.")
@reporting_options
def report_command(record: Path, json_path: Path | None, output: Path | None, force: bool, **reporting: Any) -> None:
    """Diagnoses a RECORD, which anybatch doctor --record run.jsonl or anybatch.Doctor(path=...) has written.

    Nothing runs, and torch is not needed. The rules are those of this version, which may find more than the version
    that recorded the run.
    """
    for path in (json_path, output):
        check_folder(path)
    if output is not None and (missing := missing_extra()):
        raise click.UsageError(missing)
    if output is not None and output.is_file() and not force and not is_own_page(output):
        raise click.UsageError(f"{output} exists and is no page of anybatch; name another or add --force")
    if not is_record(record):
        raise click.UsageError(
            f"{record} is no record of a run; anybatch doctor --record {record.stem}.jsonl makes one"
        )
    wanted = Wanted(Path(), json_path=json_path, **reporting)
    run = load_run(record)
    try:
        _show(run, wanted, output)
    except (AttributeError, ArithmeticError, LookupError, RecursionError, TypeError, ValueError) as error:
        what = "".join(f"\n  {one}" for one in run.damaged[:MOST])
        raise click.ClickException(
            f"{record} can't be reported: what it holds does not fit together ({type(error).__name__}: {error}). "
            f"Record the run again, or remove the lines that are damaged.{what}"
        ) from error


def _show(run: Run, wanted: Wanted, output: Path | None) -> None:
    from anybatch.doctor.diagnosing import diagnosis

    found = wanted.diagnosed(lambda policy: diagnosis(run, policy))
    found = replace(found, notes=(*damage_of(run), *found.notes))
    # JSON has standard output for itself.
    wanted.write(found, run, Console(stderr=wanted.takes_stdout, highlight=False), output)
