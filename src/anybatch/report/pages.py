"""HTML pages from templates; each is one file that loads nothing else."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

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


def render_page(template: str, **values: Any) -> str:
    """Renders a template of this package."""
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
