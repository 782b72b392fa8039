"""``anybatch check``: is the gradient of micro-batches the whole batch's, for the user's own script?"""

import sys
from pathlib import Path

import click
from rich.console import Console
from rich.text import Text

from anybatch.cli.options import (
    INTERRUPTED,
    ScriptCommand,
    check_folder,
    json_option,
    of_script,
    timeout_option,
    write_json,
)
from anybatch.cli.script import Ending, no_answer, run_until_first_call
from anybatch.records.certificates import Certificate

VERSION = 1
"""Of the form of the JSON."""


class NoCertificate(click.ClickException):
    """The script did not come as far as a step that can be checked."""

    exit_code = 2


@click.command("check", cls=ScriptCommand, short_help="Is the gradient of micro-batches the whole batch's?")
@of_script
@json_option("the certificate")
@click.option(
    "--fail-on",
    type=click.Choice(["not-exact", "note"]),
    help="Exit with 1 if the gradient is not exact, or also if there is a note.",
)
@timeout_option
def check_command(
    script: Path, arguments: tuple[str, ...], json_path: Path | None, fail_on: str | None, timeout: float | None
) -> None:
    """Checks whether SCRIPT may split its batches.

    SCRIPT runs as it is, with its own arguments behind it, until it first calls anybatch.TrainStep or
    anybatch.backward. There its model, loss and batch are checked: the whole batch against two splits of it. Nothing
    of the script runs after that, no finally block and no exit handler.

    Exit codes: 0 for a certificate, 1 for a finding if --fail-on was given, 2 if the script came to no step.
    """
    check_folder(json_path)
    try:
        ending = run_until_first_call(script, arguments, timeout, {"verb": "check"})
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    certificate = _certificate_of(ending, script)
    if json_path is not None:
        write_json(json_path, {"version": VERSION, "kind": "anybatch certificate"} | certificate.to_dict())
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
    if ending.status == "checked":
        return Certificate.from_dict(ending.facts["certificate"])
    raise NoCertificate(no_answer(ending, script, "check", "checked"))
