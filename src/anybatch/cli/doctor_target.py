"""The script or module after the doctor's options, and its arguments."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import click


class Target(NamedTuple):
    """The script or module to run."""

    name: str  # the script as the user wrote it, or ``-m`` and the name of a module
    command: tuple[str, ...]  # for the interpreter
    arguments: tuple[str, ...]  # of the script


class TargetCommand(click.Command):
    """A command whose options end at the script: everything after it belongs to the script."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.allow_interspersed_args = False

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Ends the options before the script, or before ``-m``."""
        return super().parse_args(ctx, self._divided(args))

    def _divided(self, args: list[str]) -> list[str]:
        """The arguments with ``--`` before ``-m``, which ends the options as it does for Python."""
        options = [one for one in self.params if isinstance(one, click.Option)]
        with_value = {name for one in options if not one.is_flag for name in one.opts}
        index = 0
        while index < len(args):
            word = args[index]
            if word.startswith("-m") and not word.startswith("--"):
                joined = [word[2:]] if len(word) > 2 else []
                return [*args[:index], "--", "-m", *joined, *args[index + 1 :]]
            if word in ("--", "-") or not word.startswith("-"):
                break
            index += 2 if word in with_value else 1
        return args


def target_of(ctx: click.Context, param: click.Parameter, words: Sequence[str]) -> Target:
    """Reads the words after the options."""
    if words[0] == "-m":
        if len(words) < 2:
            raise click.UsageError("Argument expected for the -m option, as in: anybatch doctor -m package.train", ctx)
        arguments = _without_dashes(words[2:])
        return Target(f"-m {words[1]}", ("-m", words[1], *arguments), arguments)
    if words[0].startswith("-"):
        raise click.NoSuchOption(words[0], ctx=ctx)
    if not Path(words[0]).exists():
        raise click.BadParameter(
            f"{words[0]!r} does not exist. Options of the doctor stand before the script, and those of the script "
            "behind it, as in: anybatch doctor --json out.json train.py --epochs 1",
            ctx,
            param,
        )
    if Path(words[0]).is_dir() and not Path(words[0], "__main__.py").exists():
        raise click.BadParameter(
            f"{words[0]!r} is a folder without a __main__.py; name the script in it that trains", ctx, param
        )
    arguments = _without_dashes(words[1:])
    return Target(words[0], (words[0], *arguments), arguments)


def _without_dashes(arguments: Sequence[str]) -> tuple[str, ...]:
    """Arguments may stand behind ``--``, as with the other verbs."""
    return tuple(arguments[1:] if arguments[:1] in (["--"], ("--",)) else arguments)
