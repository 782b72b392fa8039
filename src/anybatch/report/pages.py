"""Pages from templates: one file each, which loads nothing from anywhere."""

import json
from importlib.metadata import PackageNotFoundError, distribution
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

_NEEDED = ("jinja2", "matplotlib")
_MARK = '<meta name="generator" content="anybatch">'
_HEAD_BYTES = 4096


def missing_extra() -> str:
    """Says what to install before a page can be written.

    Returns:
        The sentence with the command, or nothing if all is there.
    """
    missing = [name for name in _NEEDED if find_spec(name) is None]
    if not missing:
        return ""
    return f"The page needs {' and '.join(missing)}. To install what is missing:\n  {install_command('report')}"


def install_command(extra: str) -> str:
    """The command that installs an extra from where anybatch itself was installed: an index, a clone or an address.

    Args:
        extra: its name.
    """
    try:
        origin = json.loads(distribution("anybatch").read_text("direct_url.json") or "{}")
    except (PackageNotFoundError, ValueError):
        origin = {}
    url, vcs = str(origin.get("url", "")), origin.get("vcs_info", {}).get("vcs", "")
    if url.startswith("file://"):
        editable = "-e " if origin.get("dir_info", {}).get("editable") else ""
        return f"pip install {editable}'{unquote(urlsplit(url).path)}[{extra}]'"
    where = f" @ {vcs + '+' if vcs else ''}{url}" if url else ""
    return f"pip install 'anybatch[{extra}]{where}'"


def render_page(template: str, **values: Any) -> str:
    """Fills a template of this package.

    Args:
        template: its file name in ``anybatch/report/templates``.
        values: by name; text is escaped, and so is everything that is not marked as markup.

    Returns:
        The text of the page.

    Raises:
        ImportError: jinja2 is not installed.
    """
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(template).render(mark=_MARK, **values)


def is_own_page(path: Path) -> bool:
    """Whether a file is a page that anybatch wrote, so that it may be written anew.

    Args:
        path: an existing file.

    Returns:
        True if its head says so.
    """
    with path.open("rb") as file:
        return _MARK.encode() in file.read(_HEAD_BYTES)
