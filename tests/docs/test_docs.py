"""Every block of code in the README and the documentation runs, and says what it needs to be installed."""

import re
import sys
from pathlib import Path

import pytest

import versions
from pages import FENCE, PageError, blocks, pages, run_page
from source_tree import ROOT

PAGES = {str(page.relative_to(ROOT)): page for page in pages(ROOT)}
BESIDE = ("README.zh-CN.md", "CONTRIBUTING.md", "SECURITY.md", "examples/README.md", "benchmarks/README.md")
WRITTEN = [*PAGES.values(), *(ROOT / name for name in BESIDE)]


@pytest.mark.parametrize("name", [name for name in PAGES if not name.startswith("docs/zh/")])  # the same code there
def test_the_code_of_a_page_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if name == "docs/why.md" and not versions.SHOWS_SAVED_TENSORS:
        pytest.skip("shows what the graph keeps, which this torch (2.6 is one) does not tell")
    monkeypatch.chdir(tmp_path)  # a page may write files
    text = PAGES[name].read_text(encoding="utf-8")
    assert run_page(text, name) <= len(list(blocks(text)))


@pytest.mark.parametrize("name", PAGES)
def test_a_page_says_how_to_install_what_only_it_imports(name: str) -> None:
    text = PAGES[name].read_text(encoding="utf-8")
    code = "\n".join(block.text for block in blocks(text) if "no-run" not in block.info)
    imported = {found[1] for found in re.finditer(r"^\s*(?:from|import) (\w+)", code, re.MULTILINE)}
    others = imported - sys.stdlib_module_names - {"torch", "anybatch", "pytest"}
    installed = " ".join(re.findall(r"pip install[^`]*", text)).replace("scikit-learn", "sklearn")
    assert not [one for one in others if one not in installed]


def test_the_pages_are_found() -> None:
    assert {"README.md", "docs/index.md"} <= set(PAGES)


def test_every_page_is_in_the_table_of_contents() -> None:
    trees = re.findall(r"```\{toctree\}(.*?)```", PAGES["docs/index.md"].read_text(encoding="utf-8"), re.DOTALL)
    lines = [line.strip() for tree in trees for line in tree.splitlines()]
    listed = {f"docs/{line}.md" for line in lines if line and line[0] != ":"}
    beneath = {name for name in PAGES if name.count("/") > 1}  # in the index of their folder
    deeper = {name for name in beneath if name.count("/") > 2 or not name.endswith("/index.md")}
    assert listed == {name for name in PAGES if name.startswith("docs/")} - {"docs/index.md"} - deeper


def long_lines(text: str) -> list[str]:
    """The lines within fences of a page that are longer than a window shows."""
    found: list[str] = []
    fence, shown = "", False
    for line in text.splitlines():
        opening = FENCE.match(line)
        if fence and line.strip() == fence:
            fence = ""
        elif fence:
            found += [line] if shown and len(line) > 100 else []
        elif opening:
            fence, shown = opening["fence"], not opening["info"].startswith("{")  # directives hold text
    return found


@pytest.mark.parametrize("path", WRITTEN, ids=lambda path: str(path.relative_to(ROOT)))
def test_code_has_100_columns(path: Path) -> None:
    assert not long_lines(path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("opening", ["```python", "```text", "````", "  ```diff", "~~~"])
def test_a_long_line_of_code_is_seen(opening: str) -> None:
    page = f"{'prose ' * 20}\n{opening}\n{'x' * 101}\n{'y' * 100}\n{opening.strip('abcdefinoprtxhy ')}\n{'z' * 101}\n"
    assert long_lines(page) == ["x" * 101]


GOOD = """
<!-- setup
x = 1
-->
```python
from dataclasses import dataclass

@dataclass
class A:
    y: "int" = x
```
Text.

- in a list:
  ```python
  y = A().y + 1
  ```
```pycon
>>> z = y + 1
>>> z
3
```
```python
assert z == 3
```
<!-- raises: ZeroDivisionError -->
```python
1 / 0
```
```python no-run
undefined(
)
```
````text
```python
not code
```
````
```
>>> not python
```
"""

BAD = {
    "an error": "```python\n1 / 0\n```",
    "another error than announced": "<!-- raises: KeyError -->\n```python\n1 / 0\n```",
    "no error": "<!-- raises: KeyError -->\n```python\n1\n```",
    "no block to raise it": "<!-- raises: KeyError -->\nText.\n```python\n1\n```",
    "a comment at the end": "<!-- raises: KeyError -->\n",
    "another result": "```python\n>>> 1 + 1\n3\n```",
    "an error in a doctest": "```pycon\n>>> 1 / 0\n```",
    "names of another page": "```python\ny\n```",
    "does not compile": "```python no-run\n1 +\n```",
    "a misspelt mark": "```python norun\n1\n```",
    "no end": "```python\n1\n",
}


def test_a_page_shares_its_names() -> None:
    assert run_page(GOOD, "good") == 6


@pytest.mark.parametrize("fault", BAD)
def test_a_page_that_is_wrong_fails(fault: str) -> None:
    with pytest.raises((PageError, ZeroDivisionError, NameError, SyntaxError)):
        run_page(BAD[fault], fault)
