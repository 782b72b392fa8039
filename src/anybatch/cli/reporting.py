"""How a diagnosis is reported: which findings, in which formats, to which files."""

import json
import os
import stat
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import click
from rich.console import Console

from anybatch.cli import options
from anybatch.cli.doctor_records import values_of
from anybatch.doctor.policy import Policy, baseline_of, checked_codes, read_baseline, read_policy
from anybatch.records.diagnoses import Diagnosis
from anybatch.records.runs import Run
from anybatch.report.pages import is_own_page

FORMATS = ("terminal", "sarif", "github", "junit", "line")


class Output(NamedTuple):
    """A format and its destination."""

    name: str  # of the format
    path: Path | None = None  # the file, ``None`` for standard output


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


format_option = click.option(
    "--format", "formats", multiple=True, type=_OutputType(), metavar="NAME[=FILE]",
    help=f"Write {', '.join(FORMATS)}; to standard output if no file is named.",
)  # fmt: skip


class Outputs:
    """The destinations of a report: files, standard output for one format, a page, and the terminal.

    Raises:
        click.UsageError: a file can't be written, or the page would overwrite one that anybatch did not write.
    """

    def __init__(
        self,
        json_path: Path | None,
        formats: Sequence[Output] = (),
        page: Path | None = None,
        *,
        force: bool = False,
        is_quiet: bool = False,
    ) -> None:
        # whether the terminal gets the report, too
        self.is_shown = any(one.name == "terminal" for one in formats) or all(one.path for one in formats)
        self.json_path = json_path if str(json_path) != "-" else None  # the file for the JSON, if it goes to one
        own = [] if json_path is None else [Output("json", self.json_path)]
        self._outputs = [*own, *(one for one in formats if one.name != "terminal")]
        self._page, self._is_quiet = page, is_quiet
        for one in self._outputs:
            options.check_folder(one.path)
        if page is not None and page.suffix == ".json":
            raise click.UsageError(
                f"-o writes an HTML page, got {page}; expected a name such as {page.stem}.html, or, "
                f"for JSON: --json {page}"
            )
        options.check_file(page, "page that anybatch wrote", is_own_page, force=force)
        to_stdout = sum(one.path is None for one in self._outputs)
        self.takes_stdout = to_stdout > 0  # whether a format takes standard output
        if to_stdout > 1:
            raise click.UsageError(
                "standard output takes one format; name a file for the other: --format sarif=out.sarif"
            )

    def console(self) -> Console:
        """The terminal; on standard error where a format takes standard output."""
        return Console(stderr=self.takes_stdout, quiet=not self.is_shown, highlight=False)

    def write(
        self,
        values: Mapping[str, Any],
        show: Callable[[Console], None] = lambda console: None,
        page_of: Callable[[], str] | None = None,
        *others: Callable[[], None],
        text_of: Callable[[str], str] = str,
        console: Console | None = None,
    ) -> None:
        """Writes values as JSON, the other formats, ``others``, the page and what ``show`` prints.

        A failure does not stop the rest.
        """
        console = console or self.console()
        page = self._page if page_of is not None else None

        def to_output(one: Output) -> None:
            text = json_text(values) if one.name == "json" else text_of(one.name)
            if one.path is not None:
                write_whole(one.path, text)
            else:
                click.echo(text, nl=False)

        def to_page() -> None:
            if page is not None and page_of is not None:
                write_whole(page, page_of())

        def to_terminal() -> None:
            show(console)
            if page is not None and not self._is_quiet:
                console.print(f"\nPage  {page.absolute()}", markup=False, soft_wrap=True)

        failed: list[OSError] = []
        writes: list[Callable[[], None]] = [partial(to_output, one) for one in self._outputs]
        for write in (*writes, *others, to_page, to_terminal):
            try:
                write()
            except OSError as error:
                failed.append(error)
        if failed:
            raise failed[0]


def json_text(values: Mapping[str, Any]) -> str:
    """Plain values as JSON."""
    return json.dumps(values, indent=2, allow_nan=False) + "\n"


def write_whole(path: Path, text: str) -> None:
    """Writes a file whole or not at all, if it is a regular one in a writable folder."""
    path = path.resolve()
    is_new = not path.exists()
    if not (is_new or path.is_file()) or not os.access(path.parent, os.W_OK):
        path.write_text(text, encoding="utf-8")
        return
    mask = os.umask(0)
    os.umask(mask)
    mode = 0o666 & ~mask if is_new else stat.S_IMODE(path.stat().st_mode)
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=".anybatch-")
    unfinished = Path(name)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
        unfinished.chmod(mode)
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def reporting_options(function: options.Function) -> options.Function:
    """Adds the options that ``Wanted`` reads to a command."""
    file = click.Path(dir_okay=False, path_type=Path)
    for option in (
        click.option("-q", "--quiet", is_flag=True, help="A line for each finding, and nothing if there is none."),
        click.option("--update-baseline", is_flag=True, help="Write the file of --baseline anew."),
        click.option("--baseline", metavar="FILE", type=file,
                     help="Report what is not in this file; where there is none, write it."),
        click.option("--ignore", multiple=True, metavar="CODES", help="Do not report these, such as AB108,AB6."),
        click.option("--select", multiple=True, metavar="CODES", help="Report only these."),
        format_option,
        options.force_option,
        options.page_option,
        options.json_option("the diagnosis"),
    ):  # fmt: skip
        function = option(function)
    return function


class Wanted:
    """Which findings are reported, and how."""

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
        output: Path | None,
        force: bool,
    ) -> None:
        if update_baseline and baseline is None:
            raise click.UsageError("--update-baseline needs the file, as in --baseline known.json --update-baseline")
        options.check_folder(baseline)
        self.outputs = Outputs(json_path, formats, output, force=force, is_quiet=quiet)
        self.quiet = quiet
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
        """The values of ``--stop-on`` in capitals: ``NAN``, ``ERROR``, codes, code prefixes, names."""
        found = [word.strip().upper() for text in words for word in text.split(",") if word.strip()]
        try:
            return (*found, *checked_codes([one for one in found if one not in ("NAN", "ERROR")], "--stop-on"))
        except ValueError as error:
            raise click.UsageError(str(error)) from error

    def diagnosed(self, diagnose: Callable[[Policy], Diagnosis]) -> Diagnosis:
        """A diagnosis; if there is no baseline yet or it is to be updated, its findings are written there as known."""
        found = diagnose(self.policy)
        if self._baseline is None or not self._is_new:
            return found
        values = baseline_of(found.findings, self.policy)
        write_whole(self._baseline, json_text(values))
        self.policy, self._is_new = replace(self.policy, baseline=read_baseline(self._baseline)), False
        found = diagnose(self.policy)
        number = len(values["findings"])
        note = f"{self._baseline} has {number} finding{'s' * (number != 1)} now, which will not be reported."
        return replace(found, notes=(*found.notes, note))

    def write(self, diagnosis: Diagnosis, run: Run, console: Console, more: Mapping[str, Any]) -> None:
        """Writes a diagnosis in all formats, to the terminal, and as a page, with ``more`` values for JSON."""
        from anybatch.report import diagnosis_page
        from anybatch.report.diagnosis_terminal import show

        def to_terminal(console: Console) -> None:
            if self.quiet and self.outputs.is_shown:
                console.print(text_of("line", diagnosis, run), end="", markup=False, soft_wrap=True)
            elif self.outputs.is_shown:
                show(diagnosis, run, console)

        self.outputs.write(
            values_of(diagnosis, run) | dict(more), to_terminal, lambda: diagnosis_page.page(diagnosis, run),
            text_of=lambda name: text_of(name, diagnosis, run), console=console,
        )  # fmt: skip


def text_of(name: str, diagnosis: Diagnosis, run: Run) -> str:
    """The text of a report in a format for other programs."""
    described = {}
    if name == "sarif" and diagnosis.verdict != "checked":
        from anybatch.doctor.rules.registry import all_rules

        described["rules"] = all_rules().values()
    from anybatch.report.formats import TEXTS

    return TEXTS[name](diagnosis, run, **described)
