"""``anybatch check``: do micro-batches of the user's script give the gradient of the whole batch?"""

import sys
from functools import partial
from pathlib import Path

import click
from rich.console import Console
from rich.text import Text

from anybatch.cli.options import ScriptCommand, Target, json_option, of_script, timeout_option
from anybatch.cli.reporting import Output, Outputs, format_option, text_of
from anybatch.cli.script import run_until_first_call
from anybatch.records.certificates import Certificate, Reason
from anybatch.records.diagnoses import Diagnosis
from anybatch.records.findings import Finding, Place, Severity
from anybatch.records.runs import Run

VERSION = 1
"""Of the form of the JSON."""


@click.command("check", cls=ScriptCommand, short_help="Does gradient accumulation change the gradient here?")
@of_script
@json_option("the certificate")
@format_option
@click.option(
    "--fail-on",
    type=click.Choice(["not-exact", "note"]),
    help="Exit with 1 if the gradient is not exact, or also if there is a note.",
)
@timeout_option
def check_command(
    target: Target,
    json_path: Path | None,
    formats: tuple[Output, ...],
    fail_on: str | None,
    timeout: float | None,
) -> None:
    """Checks whether SCRIPT may split its batches into micro-batches.

    SCRIPT runs unchanged, with the arguments after it, until it first calls anybatch.TrainStep or anybatch.backward; a
    plain loop runs until its first optimizer step. There the gradient of the whole batch is compared with that of two
    splits of it. Then the process ends: no finally block or exit handler of the script runs.

    Exit codes: 0 for a certificate, 1 for a finding if --fail-on was given, 2 if the script never reached a step.
    """
    outputs = Outputs(json_path, formats)
    ending = run_until_first_call(target, timeout, {"verb": "check"})
    certificate = Certificate.from_dict(ending.facts["certificate"])
    values = {"version": VERSION, "kind": "anybatch certificate"} | certificate.to_dict()
    findings = _diagnosis_of(certificate, target, ending.facts["at"])
    outputs.write(values, partial(show, certificate), text_of=lambda name: text_of(name, findings, Run([])))
    if (fail_on and not certificate.exact) or (fail_on == "note" and certificate.notes):
        sys.exit(1)


def show(certificate: Certificate, console: Console) -> None:
    """Prints a certificate, in colour on a terminal and as plain text elsewhere."""
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


def _diagnosis_of(certificate: Certificate, target: Target, at: tuple[str, int]) -> Diagnosis:
    """The reasons and notes of a certificate as findings at the line of the backward, for formats of findings."""
    kinds: list[tuple[Severity, Reason]] = [("error", one) for one in certificate.reasons]
    kinds += [("info", one) for one in certificate.notes]
    found = tuple(
        Finding(
            one.message, Place(one.where if one.where != "loss" else "", file=at[0], line=at[1]),
            "\n".join(one.remedies), severity=severity, code=one.code,
        )
        for severity, one in kinds
    )  # fmt: skip
    said = " ".join(certificate.verdict.split())
    return Diagnosis(found, script=target.name, arguments=target.arguments, verdict="checked", reason=said)
