"""What the verbs share: options, checks of output files, writing."""

import json
import os
import stat
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import click

_PATCH = b"--- a/"
MODULE = "anybatch.module"
"""Where a context has the name of the module that runs in place of a script."""
INTERRUPTED = 130
"""What a shell reports for a command that Ctrl-C ended."""

Function = TypeVar("Function", bound=Callable[..., Any])


class NoAnswer(click.ClickException):
    """The script did not reach a step that the question can be answered for."""

    exit_code = 2


class ScriptCommand(click.Command):
    """A command whose options stand before or after the script; unknown ones after it belong to the script."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.epilog = (
            "Instead of SCRIPT, -m MODULE runs a module of this folder. Options after SCRIPT that anybatch has too are "
            "anybatch's; those behind -- are the script's."
        )

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Separates its own options from the arguments of the script; everything after ``--`` is the script's."""
        options = [one for one in self.get_params(ctx) if isinstance(one, click.Option)]
        takes_value = {name: not (one.is_flag or one.is_eager) for one in options for name in one.opts}
        own: list[str] = []
        others: list[str] = []
        words = iter(args)
        for word in words:
            name = word.partition("=")[0] if word.startswith("--") else word[:2]
            if word == "--":
                others += words
            elif word == "-m" and not others:
                ctx.meta[MODULE] = next(words, "")
                others.append(_file_of(ctx.meta[MODULE]))
            elif word.startswith("-") and name in takes_value:
                own += [word, *([next(words, "")] if takes_value[name] and word == name else [])]
            elif word.startswith("-") and word != "-" and not others:
                raise click.NoSuchOption(name, possibilities=takes_value, ctx=ctx)
            else:
                others.append(word)
        return super().parse_args(ctx, [*own, *others[:1], "--", *others[1:]])


def _file_of(module: str) -> str:
    """The file of a module in the current folder; nothing is imported for it."""
    at = module.replace(".", "/")
    found = next((one for one in (f"{at}.py", f"{at}/__main__.py") if module and Path(one).is_file()), None)
    if found is None:
        raise click.UsageError(f"-m {module}: no such module in this folder; expected one as in: -m package.train")
    return found


def of_script(function: Function) -> Function:
    """Adds the script and its arguments to a command."""
    function = click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="[ARGUMENTS]...")(function)
    kind = click.Path(exists=True, dir_okay=False, path_type=Path)
    return click.argument("script", type=kind, callback=lambda ctx, param, path: no_notebook(path))(function)


def no_notebook(path: Path) -> Path:
    """Refuses a notebook, which Python can't run as a script."""
    if path.suffix == ".ipynb":
        raise click.UsageError(
            f"{path} is a notebook; expected a script, as from: jupyter nbconvert --to script {path}. In a cell use "
            "anybatch.plan, anybatch.check and anybatch.Doctor"
        )
    return path


def json_option(what: str) -> Callable[[Function], Function]:
    """Adds the option ``--json`` to a command."""
    return click.option(
        "--json",
        "json_path",
        metavar="FILE",
        type=click.Path(dir_okay=False, allow_dash=True, path_type=Path),
        help=f"Write {what} as JSON; - for standard output.",
    )


def file_option(*names: str, help: str) -> Callable[[Function], Function]:
    """Adds an option that names a file to write."""
    return click.option(*names, metavar="FILE", type=click.Path(dir_okay=False, path_type=Path), help=help)


page_option = file_option("-o", "--output", help="Write an HTML page.")
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


def check_page(path: Path | None, *, force: bool) -> None:
    """The same for a page."""
    from anybatch.report.pages import is_own_page

    check_file(path, "page that anybatch wrote", is_own_page, force=force)


def is_patch(path: Path) -> bool:
    """Whether a file is a patch; one without any change is empty."""
    with path.open("rb") as file:
        return file.read(len(_PATCH)) in (b"", _PATCH)


def json_text(values: Mapping[str, Any]) -> str:
    """Plain values as JSON."""
    return json.dumps(values, indent=2, allow_nan=False) + "\n"


def write_json(path: Path, values: Mapping[str, Any]) -> None:
    """Writes plain values as JSON, to standard output if the path is ``-``."""
    text = json_text(values)
    if str(path) == "-":
        click.echo(text, nl=False)
    else:
        write_whole(path, text)


def write_whole(path: Path, text: str) -> None:
    """Writes a file, atomically if it is a regular one in a writable folder."""
    path = path.resolve()
    if path.exists() and not path.is_file():
        path.write_text(text, encoding="utf-8")
        return
    try:
        descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    except PermissionError:  # of the folder; the file itself may be writable
        path.write_text(text, encoding="utf-8")
        return
    unfinished = Path(name)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
        unfinished.chmod(stat.S_IMODE(path.stat().st_mode) if path.exists() else 0o666 & ~_umask())
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
