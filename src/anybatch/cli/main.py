"""The command ``anybatch``: one verb a file, loaded when it is asked for."""

import importlib
from typing import NamedTuple

import click

from anybatch._version import __version__


class Verb(NamedTuple):
    """Where a verb is, and what the list of verbs says about it.

    Args:
        module: that has it.
        name: of the command in it.
        help: one line.
    """

    module: str
    name: str
    help: str


VERBS = {
    "check": Verb("anybatch.cli.check", "check_command", "Is the gradient of micro-batches the whole batch's?"),
    "demo": Verb("anybatch.cli.demo", "demo_command", "Train a small model here, on text that is here."),
    "doctor": Verb("anybatch.cli.doctor", "doctor_command", "Why does it not learn?"),
    "explain": Verb("anybatch.cli.explain", "explain_command", "What does a finding of the doctor mean?"),
    "plan": Verb("anybatch.cli.plan", "plan_command", "What is the fastest way to run a step within a budget?"),
    "report": Verb("anybatch.cli.report", "report_command", "Show what the doctor has recorded."),
}


class Verbs(click.Group):
    """A group whose commands are imported on first use."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The names of the verbs."""
        return sorted(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Imports the module of a verb."""
        verb = VERBS.get(cmd_name)
        if verb is None:
            return None
        command: click.Command = getattr(importlib.import_module(verb.module), verb.name)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Lists the verbs without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, VERBS[name].help) for name in self.list_commands(ctx)])


@click.group(cls=Verbs, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 80})
@click.version_option(__version__, prog_name="anybatch")
def main() -> None:
    """Train any batch in any memory, with the gradient the whole batch would have given."""
