"""The Chinese pages say what the English ones say.

How they could be silently wrong: code that was changed in one language only; a section, a row of a table, a finding or
a link that was added to the English page; an answer in another place; another name or command; a figure that was
measured anew; stars that Markdown shows, because emphasis beside Chinese full stops and brackets is none.
"""
# ruff: noqa: RUF001 - full-width punctuation is what this is about

import re
from collections.abc import Iterator
from typing import NamedTuple

import pytest

from pages import FENCE, blocks
from source_tree import ROOT
from test_docs_links import CODE, LINK

ENTRY = "docs/zh/index.md"
CHINESE = {"README.zh-CN.md": "README.md"} | {
    str(page.relative_to(ROOT)): str(page.relative_to(ROOT)).replace("docs/zh/", "docs/")
    for page in sorted((ROOT / "docs" / "zh").rglob("*.md"))
    if str(page.relative_to(ROOT)) != ENTRY
}
"""The Chinese pages, and the English one of each."""

HAN = r"[\u4e00-\u9fff]"
HALF_WIDTH = re.compile(rf"[,;:?!.](?=\s|$)|[,;:?!\"](?={HAN})|(?<={HAN})[,.;:?!\"]|[()]")
FIGURE = re.compile(r"(?<![\w.])\d+(?:[.,]\d+)*(?:e-\d+)?")
FINDING = re.compile(r"AB\d{3}")
BOLD = re.compile(r"(?<!\*)\*\*([^*]+)\*\*")


class Section(NamedTuple):
    """A part of a page: its heading, its code with the comments that belong to it, and its other lines."""

    level: int
    heading: str
    code: list[str]
    lines: list[str]

    def __repr__(self) -> str:
        return self.heading

    @property
    def prose(self) -> str:
        """Heading and text, with a Chinese character for each span of code."""
        return CODE.sub("码", "\n".join([self.heading, *self.lines]))

    @property
    def links(self) -> set[str]:
        """The files that are linked, as in the English page; headings have other names in another language."""
        paths = {found["target"].partition("#")[0] for found in LINK.finditer(self.prose)}
        return {path.replace("../", "").replace("docs/zh/", "docs/") for path in paths if path[:6] != "README"} - {""}

    @property
    def spans(self) -> set[str]:
        """The names, options and commands in the text."""
        return {" ".join(hit[0].split()) for hit in CODE.finditer("\n".join([self.heading, *self.lines]))}

    @property
    def figures(self) -> set[str]:
        return set(FIGURE.findall(without_targets(self.prose)))


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def sections(text: str) -> list[Section]:
    """The parts of a page, each from its heading on."""
    found: list[Section] = []
    lines = iter(text.splitlines())
    for line in lines:
        if opening := FENCE.match(line):
            found[-1].code.append("\n".join([line, *until(lines, opening["fence"])]))
        elif line.startswith("<!--"):
            found[-1].code.append("\n".join([line] if "-->" in line else [line, *until(lines, "-->")]))
        elif heading := re.match(r"(#{1,6}) (.*)", line):
            found.append(Section(len(heading[1]), heading[2], [], []))
        else:
            found[-1].lines.append(line)
    return found


def until(lines: Iterator[str], end: str) -> Iterator[str]:
    for line in lines:
        yield line
        if line.strip() == end:
            return


def pairs(name: str) -> list[tuple[Section, Section]]:
    """The sections of a Chinese page, each with the English one in the same place."""
    return list(zip(sections(read(name)), sections(read(CHINESE[name])), strict=True))


def without_targets(text: str) -> str:
    return re.sub(r"\]\([^)\s]*\)", "]", text)


def half_width(section: Section) -> list[str]:
    """Where a line of Chinese has punctuation of another width."""
    found = []
    for line in without_targets(section.prose).splitlines():
        text = re.sub(r"“[^”\u4e00-\u9fff]*”", "“”", line)  # an English message keeps its own
        text = re.sub(r"^\s*(?:[-*]|\d+\.)\s+|!(?=\[)|[\[\]|*]", "", text)
        if re.search(HAN, text):
            found += [text[max(0, hit.start() - 8) : hit.end() + 8] for hit in HALF_WIDTH.finditer(text)]
    return found


def shown_stars(line: str) -> list[str]:
    """Emphasis that CommonMark shows as stars: with punctuation at its inner edge and a letter at the outer one."""
    found = []
    for hit in BOLD.finditer(line):
        before, inner, after = line[: hit.start()][-1:], hit[1], line[hit.end() :][:1]
        if (before.isalnum() and not inner[0].isalnum()) or (after.isalnum() and not inner[-1].isalnum()):
            found.append(hit[0])
    return found


@pytest.mark.parametrize("name", CHINESE)
def test_the_code_is_the_same(name: str) -> None:
    chinese, english = read(name), read(CHINESE[name])
    assert [code for part in sections(chinese) for code in part.code] == [
        code for part in sections(english) for code in part.code
    ]
    assert [block.text for block in blocks(chinese)] == [block.text for block in blocks(english)]  # as it would run


@pytest.mark.parametrize("name", CHINESE)
def test_the_sections_are_the_same_and_in_the_same_order(name: str) -> None:
    for chinese, english in pairs(name):
        assert chinese.level == english.level, (chinese, english)
        assert chinese.code == english.code, (chinese, english)
        assert chinese.spans == english.spans, (chinese, english)
        assert chinese.links == english.links, (chinese, english)
        assert chinese.figures == english.figures, (chinese, english)


@pytest.mark.parametrize("name", CHINESE)
def test_the_tables_have_the_same_rows_in_the_same_order(name: str) -> None:
    for chinese, english in pairs(name):
        rows, expected = (
            [FINDING.findall(line) for line in one.lines if line[:1] == "|"] for one in (chinese, english)
        )
        assert rows == expected, (chinese, english)


@pytest.mark.parametrize("name", [*CHINESE, ENTRY])
def test_the_text_is_chinese(name: str) -> None:
    for section in sections(read(name)):
        assert re.search(HAN, section.heading) or section.heading == "anybatch"
        assert not half_width(section), section
        assert not [stars for line in section.lines for stars in shown_stars(line)], section


def test_the_readmes_link_each_other_at_the_top() -> None:
    assert read("README.md").splitlines()[2] == "English | [简体中文](README.zh-CN.md)"
    assert read("README.zh-CN.md").splitlines()[2] == "[English](README.md) | 简体中文"


def test_every_chinese_page_has_an_english_one_and_is_in_the_table_of_contents() -> None:
    there = {name for name in CHINESE if name.startswith("docs/")}
    assert all((ROOT / CHINESE[name]).exists() for name in there)
    assert not list(blocks(read(ENTRY)))
    assert {*listed(ENTRY), *listed("docs/zh/questions/index.md")} == there


def listed(name: str) -> set[str]:
    """The pages in the table of contents of a page."""
    tree = re.search(r"```\{toctree\}(.*?)```", read(name), re.DOTALL)
    assert tree is not None
    return {f"{name.rpartition('/')[0]}/{line}.md" for line in tree[1].split() if line[0] != ":"}


def test_what_is_wrong_with_a_text_is_found() -> None:
    wrong = ["对,错。", "错了: 是的。", "见（a）, 是", "使用 `x`, 再用。", '他说"好"。', "见(这里)。", "完了."]
    right = [
        "对，错。",
        "`a`、`b`（1.5 倍）。",
        "见[这里](there.md#a)。",
        "![图](a.svg)",
        "1. 第一。",
        "English, (only).",
    ]
    assert all(half_width(Section(1, "", [], [line])) for line in wrong)
    assert not [line for line in right if half_width(Section(1, "", [], [line]))]
    assert all(shown_stars(line) for line in ("**短。**然后", "用**`x`**做", "是**“对”**的"))
    assert not [line for line in ("**短**：然后", "**`x` 错了**，是", "是**对**的") if shown_stars(line)]
