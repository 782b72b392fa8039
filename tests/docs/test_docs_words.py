"""Documentation, messages and code use the field's words: docs/glossary.md has them, and these are not among them."""

import re

import pytest

from source_tree import PACKAGE, ROOT

NOT_USED = (
    "lever", "levers", "lane", "lanes", "told of", "nothing traded", "settle", "settled", "habit", "habits",
    "pretends to have", "wired wrongly", "numbers never", "ways to run it", "came to no step", "what binds",
    "big batch", "recomputed away", "exact bytes",
)  # fmt: skip
PAGES = [
    *(path for path in sorted(PACKAGE.rglob("*")) if path.suffix in {".py", ".md", ".html", ".js"}),
    *(path for path in sorted((ROOT / "docs").rglob("*.md")) if "_build" not in path.parts),
    *(
        ROOT / name
        for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "examples/README.md", "benchmarks/README.md")
    ),
]
WORD = re.compile(rf"\b(?:{'|'.join(NOT_USED)})\b", re.IGNORECASE)


def test_coined_words_are_not_used() -> None:
    found = {}
    for path in PAGES:
        text = path.read_text(encoding="utf-8")
        if path.name != "glossary.md" and (words := WORD.findall(text)):
            found[str(path.relative_to(ROOT))] = words
    assert not found


@pytest.mark.parametrize("text", ["a lever", "Levers", "nothing traded", "is told of it"])
def test_a_coined_word_is_found(text: str) -> None:
    assert WORD.search(text)


def test_the_glossary_says_what_is_not_used() -> None:
    refused = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")
    assert all(word in refused for word in ("lever", "lane", "traded"))
