"""Pages from templates: one file each, which loads nothing from anywhere."""

import json
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

_MARK = '<meta name="generator" content="anybatch">'
_HEAD_BYTES = 4096


@dataclass(frozen=True, slots=True)
class Picture:
    """A picture of a page.

    Args:
        title: its heading; empty for none.
        svg: its markup.
        caption: below it.
        alternative: what it shows, in words, for those who can't see it.
        legend: classes of cells with their names, which may be empty within a range.
    """

    title: str
    svg: str
    caption: str
    alternative: str
    legend: tuple[tuple[str, str], ...] = ()


def unit_of_bytes(largest: float) -> tuple[float, str]:
    """The largest unit in which a number of bytes is at least one."""
    units = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"), (1, "B"))
    return next((one for one in units if largest >= one[0]), units[-1])


def missing_extra() -> str:
    """Says what to install before a page can be written."""
    if find_spec("jinja2") is not None:
        return ""
    return f"The page needs jinja2. To install what is missing:\n  {install_command('report')}"


def install_command(extra: str) -> str:
    """The command that installs an extra from where anybatch itself was installed: an index, a clone or an address."""
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
    """Whether a file is a page that anybatch wrote, so that it may be written anew."""
    with path.open("rb") as file:
        return _MARK.encode() in file.read(_HEAD_BYTES)
