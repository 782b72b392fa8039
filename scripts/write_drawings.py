#!/usr/bin/env python3
"""Draws docs/drawings/drawings.txt: one picture for each folder of the package, for docs/how-it-works.md.

.venv/bin/python scripts/write_drawings.py            # writes all
.venv/bin/python scripts/write_drawings.py --check    # exits with 1 if a file is not what this script draws
"""

import sys
from html import escape
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

FOLDER = Path(__file__).parents[1] / "docs" / "drawings"
CHARACTER, LINE, GAP, ROW_GAP, MARGIN = 7.6, 18, 26, 44, 18


class Box(NamedTuple):
    """A box: a kind of work, of data, or of a result."""

    name: str
    text: str
    kind: str = "work"


class Arrow(NamedTuple):
    """An arrow between two boxes, with a few words beside it."""

    start: str
    stop: str
    text: str = ""


class Drawing(NamedTuple):
    """Rows of boxes from top to bottom, and the arrows between them."""

    title: str
    rows: list[list[Box]]
    arrows: list[Arrow]


def drawings(text: str) -> dict[str, Drawing]:
    """Reads the descriptions; their form is said at the head of the file."""
    found: dict[str, Drawing] = {}
    for section in text.split("\n# ")[1:]:
        head, *lines = section.splitlines()
        name, _, title = head.partition(": ")
        drawing = found[name] = Drawing(title, [[]], [])
        for line in filter(None, lines):
            if line == "--":
                drawing.rows.append([])
            elif line.startswith("> "):
                ends, _, words = line[2:].partition(": ")
                drawing.arrows.append(Arrow(*ends.split(), words))
            else:
                head, _, words = line.partition(": ")
                box, _, kind = head.partition(" (")
                drawing.rows[-1].append(Box(box, words.replace(" | ", "\n"), kind.rstrip(")") or "work"))
    return found


class Place(NamedTuple):
    """Where a box lies."""

    x: float
    y: float
    width: float
    height: float
    row: int


def size_of(box: Box) -> tuple[float, float]:
    """Width and height by the longest line and the number of lines."""
    lines = box.text.split("\n")
    return max(map(len, lines)) * CHARACTER + 24, len(lines) * LINE + 16


def gap_of(drawing: Drawing, left: Box, right: Box) -> float:
    """The room between two boxes, with place for what an arrow between them says."""
    texts = [arrow.text for arrow in drawing.arrows if {arrow.start, arrow.stop} == {left.name, right.name}]
    return max(GAP, *(len(text) * CHARACTER + 24 for text in texts)) if texts else GAP


def places_of(drawing: Drawing) -> tuple[dict[str, Place], float, float]:
    """Each row is centred; gives the places, and the width and the height of all."""
    widths = []
    for row in drawing.rows:
        gaps = sum(gap_of(drawing, one, other) for one, other in pairwise(row))
        widths.append(sum(size_of(box)[0] for box in row) + gaps)
    total = max(*widths, len(drawing.title) * 8.6) + 2 * MARGIN
    places, y = {}, MARGIN + 34.0
    for number, (row, width) in enumerate(zip(drawing.rows, widths, strict=True)):
        x, height = (total - width) / 2, max(size_of(box)[1] for box in row)
        for index, box in enumerate(row):
            places[box.name] = Place(x, y, size_of(box)[0], height, number)
            x += size_of(box)[0]
            x += gap_of(drawing, box, row[index + 1]) if index + 1 < len(row) else 0
        y += height + ROW_GAP
    return places, total, y - ROW_GAP + MARGIN


def drawn_arrow(arrow: Arrow, places: dict[str, Place]) -> list[str]:
    """A line from one box to the other, with its words."""
    one, other = places[arrow.start], places[arrow.stop]
    if one.row == other.row:
        forward = one.x < other.x
        x1, x2 = (one.x + one.width, other.x) if forward else (one.x, other.x + other.width)
        y1 = y2 = one.y + one.height / 2
    else:
        down = one.row < other.row
        y1, y2 = (one.y + one.height, other.y) if down else (one.y, other.y + other.height)
        x1, x2 = towards(one, other), towards(other, one)
    lines = [f'<line x1="{x1:.0f}" y1="{y1:.0f}" x2="{x2:.0f}" y2="{y2:.0f}" class="arrow" marker-end="url(#head)"/>']
    if arrow.text:
        side = one.row == other.row
        x, y = (x1 + x2) / 2 + (0 if side else 8), (y1 + y2) / 2 - (8 if side else -4)
        anchor = "middle" if side else "start"
        lines.append(f'<text x="{x:.0f}" y="{y:.0f}" class="beside" text-anchor="{anchor}">{escape(arrow.text)}</text>')
    return lines


def towards(one: Place, other: Place) -> float:
    """Where on a box an arrow begins or ends: as straight above or below the other as its width allows."""
    middle = other.x + other.width / 2
    if one.width > other.width:
        return min(max(middle, one.x + 20), one.x + one.width - 20)
    return one.x + one.width / 2


STYLE = """<style>
text { font: 14px "DejaVu Sans", Verdana, "Segoe UI", Helvetica, Arial, sans-serif; fill: #1b2733; }
.middle { text-anchor: middle; }
.title { font-size: 15px; font-weight: bold; }
.box { font-size: 13px; }
.beside { font-size: 12px; fill: #4b5763; }
.arrow { stroke: #55606b; stroke-width: 1.5; }
.ground { fill: #ffffff; stroke: #cfd6dd; }
.work { fill: #e8f0fb; stroke: #4a76b0; }
.data { fill: #fdf3df; stroke: #b98327; }
.end { fill: #e7f5ea; stroke: #3f8a52; }
</style>"""
HEAD = (
    '<defs><marker id="head" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="8" markerHeight="8" orient="auto">'
    '<path d="M0 0 L8 4 L0 8 z" fill="#55606b"/></marker></defs>'
)


def svg(drawing: Drawing) -> str:
    """The picture; it has a light ground of its own, so that it reads the same on a dark page."""
    places, width, height = places_of(drawing)
    size = f'width="{width:.0f}" height="{height:.0f}"'
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" {size} role="img">',
        f"<title>{escape(drawing.title)}</title>",
        STYLE,
        HEAD,
        f'<rect x="0.5" y="0.5" width="{width - 1:.0f}" height="{height - 1:.0f}" rx="8" class="ground"/>',
        f'<text x="{width / 2:.0f}" y="{MARGIN + 12}" class="title middle">{escape(drawing.title)}</text>',
    ]
    for arrow in drawing.arrows:
        lines += drawn_arrow(arrow, places)
    for row in drawing.rows:
        for box in row:
            place = places[box.name]
            where = f'x="{place.x:.0f}" y="{place.y:.0f}" width="{place.width:.0f}" height="{place.height:.0f}"'
            lines.append(f'<rect {where} rx="5" class="{box.kind}"/>')
            words = box.text.split("\n")
            top = place.y + (place.height - len(words) * LINE) / 2 + 13
            for number, word in enumerate(words):
                x, y = place.x + place.width / 2, top + number * LINE
                lines.append(f'<text x="{x:.0f}" y="{y:.0f}" class="box middle">{escape(word)}</text>')
    return "\n".join([*lines, "</svg>", ""])


def main() -> int:
    """Writes or checks the drawings."""
    wanted = {
        f"{name}.svg": svg(drawing)
        for name, drawing in drawings((FOLDER / "drawings.txt").read_text(encoding="utf-8")).items()
    }
    there = {path.name: path.read_text(encoding="utf-8") for path in FOLDER.glob("*.svg")}
    if "--check" in sys.argv[1:]:
        stale = sorted(name for name in wanted.keys() | there.keys() if wanted.get(name) != there.get(name))
        if stale:
            sys.stderr.write(f"not what scripts/write_drawings.py draws: {', '.join(stale)}\n")
        return int(bool(stale))
    FOLDER.mkdir(exist_ok=True)
    for name, text in wanted.items():
        (FOLDER / name).write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
