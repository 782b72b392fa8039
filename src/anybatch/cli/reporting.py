"""How a diagnosis is reported: which findings, in which formats, and where to."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import click
from rich.console import Console

from anybatch.cli.doctor_records import values_of
from anybatch.cli.options import Function, check_folder, write_json, write_whole
from anybatch.doctor.policy import Policy, baseline_of, checked_codes, read_baseline, read_policy
from anybatch.records.diagnoses import Diagnosis
from anybatch.records.runs import Run

FORMATS = ("terminal", "json", "sarif", "github", "junit", "line")


class Output(NamedTuple):
    """One of the formats, and where it goes.

    Args:
        name: of the format.
        path: the file, ``None`` for standard output.
    """

    name: str
    path: Path | None = None


class _OutputType(click.ParamType):  # type: ignore[type-arg,unused-ignore]
    name = "format"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Output:
        """Reads ``NAME`` or ``NAME=FILE``."""
        name, _, file = str(value).partition("=")
        if name not in FORMATS or (name == "terminal" and file):
            self.fail(
                f"got {value!r}; expected one of {', '.join(FORMATS)}, and a file as in sarif=out.sarif", param, ctx
            )
        return Output(name, Path(file) if file else None)


def reporting_options(function: Function) -> Function:
    """Gives a command the options that ``Wanted`` reads.

    Args:
        function: of the command.
    """
    file = click.Path(dir_okay=False, path_type=Path)
    for option in (
        click.option("-q", "--quiet", is_flag=True, help="A line for each finding, and nothing if there is none."),
        click.option("--update-baseline", is_flag=True, help="Write the file of --baseline anew."),
        click.option("--baseline", metavar="FILE", type=file,
                     help="Report what is not in this file; where there is none, write it."),
        click.option("--ignore", multiple=True, metavar="CODES", help="Do not report these, such as AB108,AB6."),
        click.option("--select", multiple=True, metavar="CODES", help="Report only these."),
        click.option("--format", "formats", multiple=True, type=_OutputType(), metavar="NAME[=FILE]",
                     help=f"Write {', '.join(FORMATS)}; to standard output if no file is named."),
    ):  # fmt: skip
        function = option(function)
    return function


class Wanted:
    """What is reported of a diagnosis, and how.

    Args:
        folder: whose ``pyproject.toml`` has the settings, or one above it.
        formats: that are written.
        select: codes, which replace those of the settings.
        ignore: codes, in addition to those of the settings.
        baseline: the file of known findings, ``None`` for none.
        update_baseline: whether it is written anew.
        quiet: whether the report is a line for each finding.
        json_path: the diagnosis as JSON, ``None`` for none.

    Raises:
        click.UsageError: something of this is not known or fits to nothing.
    """

    def __init__(
        self,
        folder: Path,
        *,
        formats: Sequence[Output],
        select: Sequence[str],
        ignore: Sequence[str],
        baseline: Path | None,
        update_baseline: bool,
        quiet: bool,
        json_path: Path | None,
    ) -> None:
        if update_baseline and baseline is None:
            raise click.UsageError("--update-baseline needs the file, as in --baseline known.json --update-baseline")
        for path in (baseline, *(one.path for one in formats)):
            check_folder(path)
        self.formats = tuple(one for one in formats if one.name != "terminal")
        self.takes_stdout = str(json_path) == "-" or any(one.path is None for one in self.formats)
        if (str(json_path) == "-") + sum(one.path is None for one in self.formats) > 1:
            raise click.UsageError(
                "standard output takes one format; name files for the others: --format sarif=out.sarif"
            )
        self.quiet = quiet
        self._json_path = json_path
        self._is_shown = any(one.name == "terminal" for one in formats) or all(one.path for one in self.formats)
        self._baseline, self._is_new = baseline, baseline is not None and (update_baseline or not baseline.exists())
        try:
            policy = read_policy(folder)
            policy = replace(
                policy,
                select=checked_codes(select, "--select") or policy.select,
                ignore=(*policy.ignore, *checked_codes(ignore, "--ignore")),
            )
            if baseline is not None and not self._is_new:
                policy = replace(policy, baseline=read_baseline(baseline))
        except ValueError as error:
            raise click.UsageError(str(error)) from error
        self.policy = policy

    @staticmethod
    def stops(words: Sequence[str]) -> tuple[str, ...]:
        """What ``--stop-on`` was given, in capitals: ``NAN``, ``ERROR``, codes, beginnings of codes, names."""
        found = [word.strip().upper() for text in words for word in text.split(",") if word.strip()]
        try:
            return (*found, *checked_codes([one for one in found if one not in ("NAN", "ERROR")], "--stop-on"))
        except ValueError as error:
            raise click.UsageError(str(error)) from error

    def diagnosed(self, diagnose: Callable[[Policy], Diagnosis]) -> Diagnosis:
        """A diagnosis; if there is no baseline yet, all that it has is known from now on.

        Args:
            diagnose: makes it.
        """
        found = diagnose(self.policy)
        if self._baseline is None or not self._is_new:
            return found
        values = baseline_of(found.findings, self.policy)
        write_json(self._baseline, values)
        self.policy, self._is_new = replace(self.policy, baseline=read_baseline(self._baseline)), False
        found = diagnose(self.policy)
        number = len(values["findings"])
        note = f"{self._baseline} has {number} finding{'s' * (number != 1)} now, which will not be reported."
        return replace(found, notes=(*found.notes, note))

    def write(
        self,
        diagnosis: Diagnosis,
        run: Run,
        console: Console,
        page: Path | None = None,
        more: dict[str, Any] | None = None,
        *,
        is_last: bool = True,
    ) -> None:
        """Writes a diagnosis in all formats, to the terminal, and its page.

        Args:
            diagnosis: what to write.
            run: its facts.
            console: of the terminal.
            page: the file, ``None`` for none.
            more: entries of the JSON.
            is_last: whether the run has ended; standard output takes what is written then.
        """
        values = values_of(diagnosis, run) | (more or {})
        if self._json_path is not None and (is_last or str(self._json_path) != "-"):
            write_json(self._json_path, values)
        for one in self.formats:
            text = json.dumps(values, indent=2, allow_nan=False) + "\n" if one.name == "json" else None
            text = text if text is not None else _text(one.name, diagnosis, run)
            if one.path is None and is_last:
                click.echo(text, nl=False)
            elif one.path is not None:
                write_whole(one.path, text)
        is_shown = self._is_shown or not is_last
        if self.quiet and is_shown:
            console.print(_text("line", diagnosis, run), end="", markup=False, soft_wrap=True)
        elif is_shown:
            from anybatch.report.diagnosis_terminal import show

            show(diagnosis, run, console)
        if page is not None:
            from anybatch.report import diagnosis_page

            write_whole(page, diagnosis_page.page(diagnosis, run))
            if not self.quiet:
                console.print(f"\nPage  {page.absolute()}", markup=False, soft_wrap=True)


def _text(name: str, diagnosis: Diagnosis, run: Run) -> str:
    described = {}
    if name == "sarif":
        from anybatch.doctor.rules.registry import all_rules

        described["rules"] = all_rules().values()
    text: str = import_module(f"anybatch.report.diagnosis_{name}").text_of(diagnosis, run, **described)
    return text
