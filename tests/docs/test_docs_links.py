"""Links of the README and the documentation lead somewhere, and nothing is left out of the reference and the drawings.

How it could be silently wrong: a link to a page or a file that was renamed; an anchor of a heading that was reworded; a
public name that nobody added to the reference; a drawing that is not what its description says, or of no folder.
"""

import importlib.util
import re
import urllib.parse
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest

import anybatch
from anybatch import errors
from pages import FENCE, pages
from source_tree import PACKAGE, ROOT

WRITTEN = [*pages(ROOT), ROOT / "README.zh-CN.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "examples").glob("*.md")),
           *sorted((ROOT / "benchmarks").glob("*.md"))]  # fmt: skip
PAGES = {str(page.relative_to(ROOT)): page for page in WRITTEN}
LINK = re.compile(r"!?\[(?:[^\]\[]|\[[^\]]*\])*\]\((?P<target>[^()\s]+(?:\([^()\s]*\))?)\)")
CODE = re.compile(r"(`+)(?!`).*?(?<!`)\1(?!`)", re.DOTALL)
EXTERNAL = ("https://", "http://", "mailto:")
HOSTS = {"arxiv.org", "docs.pytorch.org", "github.com", "pytorch.org", "torchjd.org"}
"""Where links may lead outside; a new one is added here when somebody has looked at it."""


def prose(text: str) -> str:
    """A page without its blocks and spans of code."""
    kept: list[str] = []
    fence = ""
    for line in text.splitlines():
        opening = FENCE.match(line)
        if fence:
            fence = "" if line.strip() == fence else fence
        elif opening:
            fence = opening["fence"]
        else:
            kept.append(line)
    return CODE.sub("", "\n".join(kept))


def headings(text: str) -> Iterator[str]:
    """The headings of a page, outside of its code."""
    fence = ""
    for line in text.splitlines():
        opening = FENCE.match(line)
        if fence:
            fence = "" if line.strip() == fence else fence
        elif opening:
            fence = opening["fence"]
        elif found := re.match(r"#{1,6} (.*)", line):
            yield found[1]


def slug(heading: str) -> str:
    """The anchor of a heading as GitHub and MyST make it."""
    plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "").strip().lower()
    return re.sub(r"[^\w\- ]", "", plain).replace(" ", "-")


@cache
def anchors(page: Path) -> frozenset[str]:
    """All anchors of a page; a heading that occurs again is numbered."""
    found: dict[str, int] = {}
    names = set()
    for heading in headings(page.read_text(encoding="utf-8")):
        name = slug(heading)
        number = found.get(name, 0)
        names.add(f"{name}-{number}" if number else name)
        found[name] = number + 1
    return frozenset(names)


def fault(page: Path, target: str) -> str:
    """What is wrong with a link; empty if nothing is."""
    if target.startswith(EXTERNAL):
        host = urllib.parse.urlsplit(target).netloc
        return "" if host in HOSTS else f"leads to {host!r}, which is not among HOSTS"
    path, _, anchor = target.partition("#")
    file = (page.parent / urllib.parse.unquote(path)).resolve() if path else page
    if not file.exists():
        return "leads to no file"
    if not file.is_relative_to(ROOT):
        return "leads out of the repository"
    if anchor and file.suffix == ".md" and anchor not in anchors(file):
        near = sorted(name for name in anchors(file) if name[:8] == anchor[:8])
        return f"has no such heading to lead to; there is {near}"
    return ""


@pytest.mark.parametrize("name", PAGES)
def test_links_lead_somewhere(name: str) -> None:
    page = PAGES[name]
    targets = [found["target"] for found in LINK.finditer(prose(page.read_text(encoding="utf-8")))]
    faults = {target: said for target in targets if (said := fault(page, target))}
    assert not faults, faults


@pytest.mark.parametrize("name", [name for name in PAGES if name.startswith("docs/")])
def test_pages_link_only_what_is_built(name: str) -> None:
    """Within docs/ a link stays there: a path to the sources leads nowhere on the site."""
    targets = [found["target"] for found in LINK.finditer(prose(PAGES[name].read_text(encoding="utf-8")))]
    assert not [target for target in targets if target.startswith("..") and name.count("/") == 1]


def test_a_link_that_leads_nowhere_is_found(tmp_path: Path) -> None:
    page = ROOT / "docs" / "index.md"
    wrong = ["nowhere.md", "quickstart.md#no-such-heading", "https://example.org/", "../../outside.md"]
    assert all(fault(page, target) for target in wrong)
    assert not fault(page, "quickstart.md#the-first-step")
    text = "`[a](b.md)` and\n```text\n[c](d.md)\n```\n[e](f.md#g) [h `i`](j.md)\n"
    assert [found["target"] for found in LINK.finditer(prose(text))] == ["f.md#g", "j.md"]


def test_the_anchors_of_headings() -> None:
    assert slug('"Trying to backward": why? When is `retain_graph=True` right') == (
        "trying-to-backward-why-when-is-retain_graphtrue-right"
    )


def test_every_public_name_is_in_the_reference_and_in_the_guide() -> None:
    reference = PAGES["docs/reference.md"].read_text(encoding="utf-8")
    guide = PAGES["docs/api.md"].read_text(encoding="utf-8")
    names = set(anybatch.__all__) - {"__version__", "testing"}
    assert not [name for name in names if not re.search(rf"auto\w+:: anybatch\.{name}$", reference, re.MULTILINE)]
    assert "anybatch.testing.assert_exact" in reference
    assert not [name for name in names if f"{name}" not in guide]
    raised = {name for name, value in vars(errors).items() if isinstance(value, type) and name in names}
    assert all(f"autoexception:: anybatch.{name}" in reference for name in raised)


@pytest.fixture(scope="module")
def writer() -> ModuleType:
    spec = importlib.util.spec_from_file_location("write_drawings", ROOT / "scripts" / "write_drawings.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_drawings_are_what_their_descriptions_say(writer: ModuleType) -> None:
    folder = ROOT / "docs" / "drawings"
    wanted = writer.drawings((folder / "drawings.txt").read_text(encoding="utf-8"))
    there = {path.stem: path.read_text(encoding="utf-8") for path in folder.glob("*.svg")}
    stale = sorted(
        name for name in {*wanted, *there} if name not in wanted or there.get(name) != writer.svg(wanted[name])
    )
    assert not stale, f"run scripts/write_drawings.py: {stale}"


def test_each_folder_has_a_drawing_on_the_page() -> None:
    page = PAGES["docs/how-it-works.md"].read_text(encoding="utf-8")
    folders = {path.name for path in PACKAGE.iterdir() if (path / "__init__.py").exists()} | {"step"}
    assert not sorted(name for name in folders if f"](drawings/{name}.svg)" not in page)


def test_files_that_drawings_name_are_there() -> None:
    text = (ROOT / "docs" / "drawings" / "drawings.txt").read_text(encoding="utf-8")
    named = {one for line in text.splitlines() if not line.startswith("#") for one in re.findall(r"\b\w+\.py\b", line)}
    assert len(named) > 20
    assert named - {path.name for path in PACKAGE.rglob("*.py")} <= {"train.py", "write_drawings.py"}
