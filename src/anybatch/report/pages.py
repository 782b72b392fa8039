"""HTML pages from templates; each is one file that loads nothing else."""

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
    """A chart of a page."""

    title: str
    svg: str
    caption: str
    alternative: str
    legend: tuple[tuple[str, str], ...] = ()


def unit_of_bytes(largest: float) -> tuple[float, str]:
    """The largest unit in which a number of bytes is at least 1: its size in bytes and its name."""
    units = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"), (1, "B"))
    return next((one for one in units if largest >= one[0]), units[-1])


def missing_extra() -> str:
    """What to install before a page can be written; empty if nothing is missing."""
    if find_spec("jinja2") is not None:
        return ""
    return f"The page needs jinja2, which is not installed. Install it:\n  {install_command('report')}"


def install_command(extra: str) -> str:
    """The pip command that installs an extra from the source of anybatch itself: an index, a clone or a URL."""
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
    """Renders a template of this package, for which jinja2 has to be installed."""
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
    """Whether anybatch wrote this page, so that it may be overwritten."""
    with path.open("rb") as file:
        return _MARK.encode() in file.read(_HEAD_BYTES)
