"""What the verbs share: their script, options, checks of output files."""

import difflib
import importlib.machinery
import itertools
import os
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import click

_PATCH = b"--- a/"
_ALIKE = 0.7  # letters of two options, of which one may be meant by the other
_FILES = 100  # beside the script, in which its options are looked for
INTERRUPTED = 130
"""What a shell reports for a command that Ctrl-C ended."""

Function = TypeVar("Function", bound=Callable[..., Any])


class Target(NamedTuple):
    """The script or module to run."""

    name: str  # the script as the user wrote it, or ``-m`` and the name of a module
    command: tuple[str, ...]  # for the interpreter
    arguments: tuple[str, ...]  # of the script


class ScriptCommand(click.Command):
    """A command on a script, or on ``-m`` and a module, with the script's arguments behind it.

    Its options stand before the script. With ``options_behind`` they may stand behind it, too, where unknown ones are
    the script's; without, everything behind the script is the script's.
    """

    def __init__(self, *arguments: Any, options_behind: bool = True, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._options_behind = options_behind
        if options_behind:
            self.epilog = (
                "Instead of SCRIPT, -m MODULE runs a module. Options after SCRIPT that only anybatch has are "
                "anybatch's; those behind -- are the script's. An option that both have stands before SCRIPT or "
                "behind --."
            )

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Separates the options from the script and its arguments; everything after ``--`` is the script's."""
        options = [one for one in self.get_params(ctx) if isinstance(one, click.Option)]
        takes_value = {name: not (one.is_flag or one.is_eager) for one in options for name in one.opts}
        own: list[str] = []
        others: list[str] = []
        behind: list[str] = []  # what is taken of the words behind the script
        words = iter(args)
        for word in words:
            name = word.partition("=")[0] if word.startswith("--") else word[:2]
            if word == "--":
                others += words
            elif others and not self._options_behind:
                others += [word, *words]
            elif name == "-m" and not others:
                others += ["-m", *([word[2:]] if word != "-m" else itertools.islice(words, 1))]
            elif word.startswith("-") and name in takes_value:
                own += [word, *(itertools.islice(words, 1) if takes_value[name] and word == name else ())]
                behind += [name] if others and name not in ("-h", "--help") else []
            elif word.startswith("-") and word != "-" and not others:
                raise _no_option(ctx, name, takes_value)
            else:
                others.append(word)
        _check_behind(ctx, behind, others)
        return super().parse_args(ctx, [*own, *(["--", *others] if others else [])])


def _no_option(ctx: click.Context, name: str, known: Iterable[str]) -> click.NoSuchOption:
    where = f"options of the script stand behind it, as in: anybatch {ctx.info_name} train.py {name}"
    alike = difflib.get_close_matches(name, list(known), cutoff=_ALIKE)
    text = f"No such option {name!r} of anybatch {ctx.info_name}; {where}"
    return click.NoSuchOption(name, text, possibilities=alike, ctx=ctx)


def _check_behind(ctx: click.Context, names: Sequence[str], others: Sequence[str]) -> None:
    """Refuses options behind the script that both may have, and says which ones are taken where that is in doubt."""
    if not names:
        return
    is_module = others[0] == "-m"
    path = _path_of(others[1]) if is_module and len(others) > 1 else Path(others[0])
    for name in dict.fromkeys(names):
        if path is not None and _mentions(path, name, parsed=True):
            script = " ".join(others[: 1 + is_module])
            raise click.UsageError(
                f"{script} has an option {name}, too, as {path} shows. Put that of anybatch {ctx.info_name} before the "
                f"script, and that of the script behind --, as in: anybatch {ctx.info_name} {script} -- {name} ...",
                ctx,
            )
        near = [] if path is None else itertools.islice(path.parent.glob("*.py"), _FILES)
        if len(others) > 1 + is_module or any(_mentions(one, name) for one in near):
            click.echo(f"{name} was taken by anybatch {ctx.info_name}; options of the script stand behind --", err=True)


def _path_of(module: str) -> Path | None:
    """The file of a module in the working directory or on Python's path, without importing its packages."""
    folders: Sequence[str] | None = [str(Path.cwd()), *filter(None, sys.path)]
    found = None
    for part in f"{module}.__main__".split("."):
        try:
            spec = importlib.machinery.PathFinder.find_spec(part, folders)
        except (ImportError, ValueError):
            return None
        found = spec if spec is not None and spec.has_location else None
        folders = None if spec is None else spec.submodule_search_locations
        if folders is None:
            break
    return Path(found.origin) if found is not None and found.origin else None


def _mentions(path: Path, option: str, *, parsed: bool = False) -> bool:
    """Whether a file has an option as a text of its own; ``parsed``: as a parser of arguments is given it."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    key = r"(?!\s*:)"  # that of a mapping, which may be of help texts
    if not parsed or "argv" in text:
        key = ""
    elif not re.search(r"add_argument|option\(", text, re.IGNORECASE):
        return False
    return re.search(rf"[\"']{re.escape(option)}[\"'=]{key}", text) is not None


class _File(click.Path):
    """A file to write, which a name that ends as a folder does is not."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Refuses such a name."""
        if isinstance(value, str) and value.endswith(("/", os.sep)):
            self.fail(f"{value!r} is the name of a folder; expected that of a file, as in {value}out.html", param, ctx)
        return super().convert(value, param, ctx)


def of_script(function: Function) -> Function:
    """Adds the script and its arguments to a command, as a ``Target``."""
    return click.argument(
        "target", nargs=-1, required=True, type=click.UNPROCESSED, metavar="SCRIPT [ARGUMENTS]...", callback=_target_of
    )(function)


_LAUNCHERS = frozenset({"torch.distributed.run", "torch.distributed.launch", "accelerate.commands.launch"})
_SCRIPTS = frozenset({"torchrun", "accelerate"})


def launches_ranks(command: Sequence[str]) -> bool:
    """Whether a command is a launcher of ranks, such as torchrun."""
    if command[0] == "-m":
        return command[1] in _LAUNCHERS
    return Path(command[0]).name in _SCRIPTS


def _target_of(ctx: click.Context, param: click.Parameter, words: Sequence[str]) -> Target:
    verb, script, arguments = ctx.info_name, words[0], tuple(words[1:])
    if script == "-m":
        if not arguments:
            raise click.UsageError(f"Argument expected for the -m option, as in: anybatch {verb} -m package.train", ctx)
        target = Target(f"-m {arguments[0]}", ("-m", *arguments), arguments[1:])
    else:
        _check_script(ctx, param, script)
        target = Target(script, (script, *arguments), arguments)
    if launches_ranks(target.command) and verb != "doctor":
        raise click.UsageError(
            f"{target.name} starts other processes, in which a step would not be seen; name the script that trains, "
            "which then runs as one process"
        )
    return target


def _check_script(ctx: click.Context, param: click.Parameter, script: str) -> None:
    verb, path = ctx.info_name, Path(script)
    if not path.exists():
        raise click.BadParameter(
            f"{script!r} does not exist. Options of anybatch {verb} stand before the script, and those of the script "
            f"behind it, as in: anybatch {verb} --json out.json train.py --epochs 1",
            ctx,
            param,
        )
    if path.is_dir() and not (path / "__main__.py").exists():
        raise click.BadParameter(
            f"{script!r} is a folder without a __main__.py; name the script in it that trains", ctx, param
        )
    if path.suffix == ".ipynb":
        raise click.UsageError(
            f"{path} is a notebook; expected a script, as from: jupyter nbconvert --to script {path}. In a cell use "
            "anybatch.plan, anybatch.check and anybatch.Doctor"
        )


def json_option(what: str) -> Callable[[Function], Function]:
    """Adds the option ``--json`` to a command."""
    return click.option(
        "--json",
        "json_path",
        metavar="FILE",
        type=_File(dir_okay=False, writable=True, allow_dash=True, path_type=Path),
        help=f"Write {what} as JSON; - for standard output.",
    )


def file_option(*names: str, help: str, default: str | None = None) -> Callable[[Function], Function]:
    """Adds an option that names a file to write."""
    file = _File(dir_okay=False, writable=True, path_type=Path)
    return click.option(*names, metavar="FILE", type=file, default=default, show_default=True, help=help)


page_option = file_option("-o", "--output", help="Write an HTML page.")
force_option = click.option("--force", is_flag=True, help="Overwrite files that anybatch did not write.")
timeout_option = click.option(
    "--timeout",
    type=click.FloatRange(min=0, min_open=True),
    metavar="SECONDS",
    help="Stop the script if it takes longer.",
)


def check_folder(path: Path | None) -> None:
    """Refuses a file whose folder does not exist, or a new file in a folder that is not writable."""
    if path is not None and not path.absolute().parent.is_dir():
        raise click.UsageError(f"{path}: the folder {path.absolute().parent} does not exist; make it first")
    if path is not None and not path.exists() and not os.access(path.absolute().parent, os.W_OK):
        raise click.UsageError(f"{path}: the folder {path.absolute().parent} can't be written to; name another")


def check_file(path: Path | None, what: str, is_own: Callable[[Path], bool], *, force: bool) -> None:
    """Refuses a file that can't be written, or that would overwrite one of another kind."""
    check_folder(path)
    if path is not None and path.is_file() and not force and not is_own(path):
        raise click.UsageError(f"{path} exists and is not a {what}; name another or add --force")


def is_patch(path: Path) -> bool:
    """Whether a file is a patch; one without any change is empty."""
    with path.open("rb") as file:
        return file.read(len(_PATCH)) in (b"", _PATCH)
