"""The command ``anybatch``: one file per verb, loaded on first use."""

import contextlib
import errno
import importlib
import io
import os
import sys
from collections.abc import Sequence
from typing import Any

import click

from anybatch._version import __version__
from anybatch.cli.options import INTERRUPTED

NOT_WRITTEN = 74
"""What a command ends with that can't write its output, as sysexits.h has it."""


VERBS = {
    "check": "Does gradient accumulation change the gradient here?",
    "demo": "Run a self-contained demo on local files.",
    "doctor": "Why does it not learn?",
    "estimate": "How much memory does training a known model take?",
    "explain": "What does a finding of the doctor mean?",
    "plan": "What is the fastest configuration within a memory budget?",
    "tune": "Which batch size and learning rate should I use?",
    "report": "Report on a run that the doctor recorded.",
    "watch": "Follow a run from another terminal.",
}
"""The lines of help of the verbs, each of which is a command in a module of its name."""


class Verbs(click.Group):
    """A group whose commands are imported on first use."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The names of the verbs."""
        return sorted(VERBS)

    def main(  # type: ignore[override]
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        *,
        standalone_mode: bool = True,
        **more: Any,
    ) -> Any:
        """Runs a verb; Ctrl-C and an output that can't be written each have an exit code of their own."""
        if not standalone_mode:
            return super().main(args, prog_name, standalone_mode=False, **more)
        for stream in (sys.stdout, sys.stderr):  # of an encoding that does not have all letters
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(errors="backslashreplace")
        try:
            code = super().main(args, prog_name, standalone_mode=False, **more)
            if sys.stdout is not None and not sys.stdout.closed:
                sys.stdout.flush()
        except click.ClickException as error:
            error.show()
            code = error.exit_code
        except (KeyboardInterrupt, click.Abort):
            code = INTERRUPTED
        except OSError as error:
            code = _without_output(error)
        sys.exit(code if isinstance(code, int) else 0)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Imports the module of a verb."""
        if cmd_name not in VERBS:
            return None
        command: click.Command = getattr(importlib.import_module(f"anybatch.cli.{cmd_name}"), f"{cmd_name}_command")
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Lists the verbs without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, VERBS[name]) for name in self.list_commands(ctx)])


def _without_output(error: OSError) -> int:
    """Says that something can't be written, and gives the exit code; who has closed a pipe is told nothing."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.__stdout__.fileno() if sys.__stdout__ else 1)
    if error.errno != errno.EPIPE:
        where = f"{error.filename}: " if error.filename else ""
        with contextlib.suppress(OSError):
            click.echo(f"Error: the output can't be written: {where}{error.strerror or error}", err=True)
    return NOT_WRITTEN


@click.group(cls=Verbs, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 80})
@click.version_option(__version__, prog_name="anybatch")
def main() -> None:
    """Exact gradient accumulation within a memory budget, and a doctor for training runs."""
