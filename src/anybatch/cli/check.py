"""``anybatch check``: is the gradient of micro-batches the whole batch's, for the user's own script?"""

import json
import sys
from pathlib import Path

import click
from rich.console import Console
from rich.text import Text

from anybatch.cli.script import Ending, run_until_first_call
from anybatch.records.certificates import Certificate

_WIDTH = 80
_INTERRUPTED = 130  # what a shell reports for a command that Ctrl-C ended


class NoCertificate(click.ClickException):
    """The script did not come as far as a step that can be checked."""

    exit_code = 2


class ScriptCommand(click.Command):
    """A command that says where the options of the script go."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Explains an option that it does not know."""
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            raise click.UsageError(
                f"No such option: {error.option_name}. The script's own arguments go behind --, as in: anybatch check "
                "train.py -- --epochs 1",
                ctx,
            ) from None


@click.command("check", cls=ScriptCommand, short_help="Is the gradient of micro-batches the whole batch's?")
@click.argument("script", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="[-- ARGUMENTS...]")
@click.option(
    "--json",
    "json_path",
    metavar="FILE",
    type=click.Path(dir_okay=False, allow_dash=True, path_type=Path),
    help="Write the certificate as JSON; - for standard output.",
)
@click.option(
    "--fail-on",
    type=click.Choice(["not-exact", "note"]),
    help="Exit with 1 if the gradient is not exact, or also if there is a note.",
)
@click.option(
    "--timeout",
    type=click.FloatRange(min=0, min_open=True),
    metavar="SECONDS",
    help="Stop the script if it takes longer.",
)
def check_command(
    script: Path, arguments: tuple[str, ...], json_path: Path | None, fail_on: str | None, timeout: float | None
) -> None:
    """Checks whether SCRIPT may split its batches.

    SCRIPT runs as it is, with its own arguments behind --, until it first calls anybatch.TrainStep or
    anybatch.backward. There its model, loss and batch are checked: the whole batch against two splits of it. Nothing
    of the script runs after that, no finally block and no exit handler.

    Exit codes: 0 for a certificate, 1 for a finding if --fail-on was given, 2 if the script came to no step.
    """
    if json_path is not None and not json_path.absolute().parent.is_dir():
        raise click.UsageError(f"{json_path}: the folder {json_path.absolute().parent} does not exist; make it first")
    try:
        ending = run_until_first_call(script, arguments, timeout)
    except KeyboardInterrupt:
        sys.exit(_INTERRUPTED)
    certificate = _certificate_of(ending, script)
    if json_path is not None:
        _write_json(json_path, certificate)
    # JSON has standard output for itself.
    show(certificate, Console(stderr=str(json_path) == "-", highlight=False))
    if (fail_on and not certificate.exact) or (fail_on == "note" and certificate.notes):
        sys.exit(1)


def show(certificate: Certificate, console: Console) -> None:
    """Writes a certificate, in colour on a terminal and as plain text elsewhere.

    Args:
        certificate: what to write.
        console: where to.
    """
    head = certificate.verdict
    for line in str(certificate).splitlines():
        style = ""
        if line in head:
            style = "bold green" if certificate.exact else "bold red"
        elif line.startswith("    "):
            style = "cyan"
        elif line.startswith("note:"):
            style = "yellow"
        console.print(Text(line, style=style), soft_wrap=True)


def _certificate_of(ending: Ending, script: Path) -> Certificate:
    """The certificate, or the error that says why there is none."""
    facts = ending.facts
    if ending.status == "checked":
        return Certificate.from_dict(facts["certificate"])
    if ending.status == "refused":
        raise NoCertificate(f"the first step of {script} can't be checked. {facts['error']}")
    if ending.status == "broken":
        raise NoCertificate(f"the loss of {script} failed in the check, see above: {facts['error']}")
    if ending.status == "failed":
        raise NoCertificate(f"{script} failed before it called anybatch.TrainStep or anybatch.backward, see above.")
    if ending.status == "timeout":
        raise NoCertificate(
            f"{script} did not call anybatch.TrainStep or anybatch.backward within {facts['seconds']:g} seconds; raise "
            "--timeout, or give the script less to do before its first step."
        )
    how = f"ended with exit code {facts['code']}" if ending.status == "ended" else f"was ended ({facts['code']})"
    raise NoCertificate(
        f"{script} {how} without having called anybatch.TrainStep or anybatch.backward in its own process, so there is "
        "nothing to check. Are its arguments right? They go behind --, as in: anybatch check train.py -- --epochs 1"
    )


def _write_json(path: Path, certificate: Certificate) -> None:
    text = json.dumps(certificate.to_dict(), indent=2, allow_nan=False) + "\n"
    if str(path) == "-":
        click.echo(text, nl=False)
    else:
        path.write_text(text, encoding="utf-8")
