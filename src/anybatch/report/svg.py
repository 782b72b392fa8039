"""Charts as SVG. The colours come from the style of the page, light or dark; no script is needed.

A chart over steps has its scale in ``data-x`` and its values in ``data-values``, so that the script of the page can
draw one cursor over all charts.
"""

import itertools
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape

from anybatch.report.tables import clean, number_text

_WIDTH, _HEIGHT = 460, 220
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 14, 10, 38
_LEGEND_LINE = 16
_HALF_A_LINE = 24  # characters
_NAME_LENGTH = 30
_DOTS_UP_TO = 40
_FACTOR_OF_LOG = 30.0
_LEAST_SHARE = 0.5
_LONG = 60
"""Longer runs use a logarithmic axis of steps, because causes show in the first steps."""
_FIRST = 10.0
_TICK_ROOM = 0.075
_COLOURS = 4
_TITLES_UP_TO = 1600


@dataclass(frozen=True, slots=True)
class Curve:
    """Values over steps, or over another ascending quantity."""

    name: str  # its name in the legend
    steps: Sequence[float]  # ascending; equal steps are allowed
    values: Sequence[float]  # one per step; some may not be finite


@dataclass(frozen=True, slots=True)
class Axis:
    """A horizontal axis, from 0 (left) to 1 (right): linear, or logarithmic for more than 60 steps."""

    first: float = 0.0  # the first step
    last: float = 1.0  # the last step
    is_even: bool = False  # whether it is linear for any number of steps

    @property
    def is_long(self) -> bool:
        """Whether the axis is logarithmic."""
        return self.last - self.first > _LONG and not self.is_even

    def part(self, step: float) -> float:
        """The position of a step, 0 to 1."""
        return self._warped(step) / (self._warped(max(self.last, self.first + 1e-9)) or 1.0)

    def _warped(self, step: float) -> float:
        return math.log1p((step - self.first) / _FIRST) if self.is_long else step - self.first

    def ticks(self) -> list[float]:
        """Round steps with enough room for their labels."""
        span = self.last - self.first
        if not self.is_long:
            every = round_step(span / 5)
            if not math.isfinite(every):  # the axis has a single step
                return [self.first]
            every = every if self.is_even else max(1.0, every)
            start, end = math.ceil(self.first / every - 1e-9), math.floor(self.last / every + 1e-9)
            return [index * every for index in range(start, end + 1)]
        found: list[float] = []
        for step in (0, *(factor * 10**power for power in range(12) for factor in (1, 2, 5))):
            if self.first <= step <= self.last and (not found or self.part(step) - self.part(found[-1]) > _TICK_ROOM):
                found.append(float(step))
        return found


def text_of(text: str, most: int = 0) -> str:
    """Escapes a text for markup; a text longer than ``most`` characters is shortened in the middle.

    Example:
        >>> text_of("encoder.layers.11.attention.<b>", 15)
        'encoder…ion.&lt;b&gt;'
    """
    text = clean(text)
    if most and len(text) > most:
        text = f"{text[: most // 2]}…{text[len(text) - (most - most // 2 - 1) :]}"
    return escape(text)


def line_chart(
    curves: Sequence[Curve],
    *,
    x_label: str,
    y_label: str = "",
    axis: Axis | None = None,
    is_logarithmic: bool | None = None,
    least_span: float = 0.0,
    levels: Sequence[tuple[str, float]] = (),
    marks: Sequence[tuple[str, float]] = (),
) -> str:
    """Draws lines over steps; values that are not finite are gaps with a mark at the top.

    By default the horizontal axis covers all curves, and the values decide whether the vertical one is logarithmic; a
    linear one spans ``least_span`` of the largest value, so that noise does not fill the chart. ``levels`` are
    horizontal lines, ``marks`` vertical ones.
    """
    values = [value for curve in curves for value in curve.values if math.isfinite(value)]
    scale = _scale([*values, *(value for _, value in levels)], is_logarithmic, least_span)
    steps = [step for curve in curves for step in curve.steps]
    first = min(steps, default=0.0)
    axis = axis or Axis(first, max(max(steps, default=1.0), first + 1e-9))
    names = [(f"curve c{index % _COLOURS}", curve.name) for index, curve in enumerate(curves)]
    names += [("level", name) for name, _ in levels]
    top = _TOP + _LEGEND_LINE * (-(-len(names) // _in_a_line(names)) + bool(y_label))
    bottom = top + _HEIGHT - _TOP - _BOTTOM
    plane = _Plane(axis, top, bottom, scale)
    parts = _legend(names, _LEGEND_LINE if y_label else 0)
    if y_label:
        parts.append(f'<text x="{_LEFT}" y="12">{text_of(y_label)}</text>')
    parts += plane.axes(x_label)
    parts += [plane.level(value) for _, value in levels]
    for index, curve in enumerate(curves):
        parts += plane.curve(curve, index % _COLOURS)
    for name, step in marks:
        x = plane.x(step)
        parts.append(f'<path class="begin" d="M{x:.1f} {top}V{bottom}"><title>{text_of(name)}</title></path>')
        side = ("end", -4) if x > _WIDTH * 0.6 else ("", 4)
        parts.append(
            f'<text class="begin {side[0]}" x="{x + side[1]:.1f}" y="{bottom - 6}">{text_of(name, _NAME_LENGTH)}</text>'
        )
    return _svg(_WIDTH, bottom + _BOTTOM, parts, cursor(axis, _LEFT, _WIDTH - _RIGHT, curves))


def cursor(axis: Axis, left: float, right: float, curves: Sequence[Curve] = ()) -> str:
    """The attributes with which a chart takes part in the cursor that all charts over steps share."""
    shown = {curve.name: [list(curve.steps), [number_text(value) for value in curve.values]] for curve in curves}
    place = json.dumps([axis.first, axis.last, _FIRST if axis.is_long else 0, left, right])
    return f' data-x="{place}" data-values="{escape(clean(json.dumps(shown)))}"'


def heat_chart(
    rows: Sequence[tuple[str, Sequence[float | None]]],
    steps: Sequence[int],
    *,
    axis: Axis,
    shade: Callable[[float | None], str],
    said: Callable[[float | None], str],
) -> str:
    """Draws a row of cells per layer; only the cells are stretched, so that names stay readable at any width."""
    places = [100 * axis.part(step) for step in steps]
    edges = [0.0, *((one + other) / 2 for one, other in itertools.pairwise(places)), 100.0]
    height = 17 if len(rows) <= 32 else 13
    titled = len(rows) * len(steps) <= _TITLES_UP_TO
    names = [f'<div title="{text_of(name)}">{text_of(name or "(the model)", 40)}</div>' for name, _ in rows]
    parts = []
    for index, (name, values) in enumerate(rows):
        for step, value, left, right in zip(steps, values, edges[:-1], edges[1:], strict=True):
            title = f"<title>{text_of(name)}, step {step}: {said(value)}</title>" if titled else ""
            parts.append(
                f'<rect class="{shade(value)}" x="{left:.2f}%" y="{index * height}"'
                f' width="{max(0.15, right - left):.2f}%" height="{height - 1}"'
                + (f">{title}</rect>" if title else "/>")
            )
    bottom = len(rows) * height
    for tick in axis.ticks():
        place = 100 * axis.part(tick)
        side = "" if place < 3 else "end" if place > 97 else "mid"
        parts.append(f'<text class="{side}" x="{place:.2f}%" y="{bottom + 14}">{tick:g}</text>')
    svg = f'<svg height="{bottom + 20}" aria-hidden="true"{cursor(axis, 0, 100)}>{"".join(parts)}</svg>'
    return f'<div class="heat" style="--row: {height}px"><div>{"".join(names)}</div>{svg}</div>'


def fan_chart(steps: Sequence[int], rows: Sequence[Sequence[float]], axis: Axis) -> str:
    """Draws percentiles over steps, small enough for a table cell; each row has an odd number of them, ascending."""
    finite = [value for row in rows for value in row if math.isfinite(value)]
    low, high = min(finite, default=0.0), max(finite, default=1.0)
    room = (high - low) or 1.0

    def place(step: float, value: float) -> str:
        return f"{160 * axis.part(step):.1f} {30 - 28 * (value - low) / room:.1f}"

    usable = [(step, row) for step, row in zip(steps, rows, strict=True) if all(map(math.isfinite, row))]
    parts = []
    if low <= 0 <= high:
        parts.append(f'<path class="grid" d="M0 {30 - 28 * (0 - low) / room:.1f}H160"/>')
    for inner in range(len(rows[0]) // 2 if rows else 0):
        ends = [place(step, row[inner]) for step, row in usable]
        ends += [place(step, row[-1 - inner]) for step, row in reversed(usable)]
        parts.append(f'<path class="area" d="M{"L".join(ends)}Z"/>' if ends else "")
    middle = "L".join(place(step, row[len(row) // 2]) for step, row in usable)
    parts.append(f'<path class="curve c0" d="M{middle}"/>' if middle else "")
    return f'<svg class="fan" viewBox="0 0 160 32" aria-hidden="true">{"".join(parts)}</svg>'


def bar_chart(
    bars: Sequence[tuple[str, float]],
    *,
    label: str,
    level: tuple[str, float] | None = None,
    is_logarithmic: bool = False,
) -> str:
    """Draws horizontal bars (dots if logarithmic), the first one on top, and an optional vertical line ``level``."""
    values = [value for _, value in bars] + ([level[1]] if level else [])
    scale = _scale(values if is_logarithmic else [0.0, *values], is_logarithmic, 0.0)
    left, top, height = 130, 24 if level else 6, 30
    bottom = top + height * len(bars)

    def x(value: float) -> float:
        return left + (_WIDTH - left - 30) * scale.part(value)

    parts = []
    ticks = scale.ticks()
    for value, text in zip(ticks, scale.labels(ticks), strict=True):
        parts.append(f'<path class="grid" d="M{x(value):.1f} {top}V{bottom}"/>')
        parts.append(f'<text class="mid" x="{x(value):.1f}" y="{bottom + 15}">{text}</text>')
    for index, (name, value) in enumerate(bars):
        y = top + height * (index + 0.5)
        parts.append(f'<text class="end" x="{left - 8}" y="{y + 4:.1f}">{text_of(name, _NAME_LENGTH)}</text>')
        parts.append(
            f'<path class="dot c0" d="M{x(value):.1f} {y}h0"/>'
            if is_logarithmic
            else f'<rect class="bar" x="{left}" y="{y - 9:.1f}" width="{max(0.5, x(value) - left):.1f}" height="18"/>'
        )
    if level:
        side = ("end", -4) if x(level[1]) > _WIDTH * 0.7 else ("", 4)
        parts.append(f'<path class="level" d="M{x(level[1]):.1f} {top - 4}V{bottom}"/>')
        parts.append(f'<text class="{side[0]}" x="{x(level[1]) + side[1]:.1f}" y="12">{text_of(level[0])}</text>')
    parts.append(f'<text class="mid" x="{(left + _WIDTH - 30) / 2}" y="{bottom + 32}">{text_of(label)}</text>')
    return _svg(_WIDTH, bottom + 38, parts)


def dot_chart(
    dots: Sequence[tuple[float, float]],
    *,
    chosen: int,
    names: Sequence[str],
    x_label: str,
    y_label: str,
    level: tuple[str, float] | None = None,
) -> str:
    """Draws configurations by two costs, and a line through the Pareto front.

    Dots to the right of ``level``, the budget, are greyed out.
    """
    xs = [x for x, _ in dots] + ([level[1]] if level else [])
    least = 0.0 if min(xs) < _LEAST_SHARE * max(xs) else 0.94 * min(xs)
    axis, scale = Axis(least, 1.04 * max(xs), is_even=True), _scale([0.0, *(y for _, y in dots)], False, 0.0)
    plane = _Plane(axis, _TOP + _LEGEND_LINE, _HEIGHT + 40, scale)
    parts = [f'<text x="{_LEFT}" y="12">{text_of(y_label)}</text>', *plane.axes(x_label)]
    best = best_of(dots)
    # A budget between two configurations has room for the smaller one only: the line is a staircase.
    path = "".join(f"H{plane.x(x):.1f}V{plane.y(y):.1f}" for x, y in best[1:])
    parts.append(f'<path class="curve c0" d="M{plane.x(best[0][0]):.1f} {plane.y(best[0][1]):.1f}{path}"/>')
    for row, ((x, y), name) in enumerate(zip(dots, names, strict=True)):
        kind = "chosen" if row == chosen else "far" if level and x > level[1] else ""
        title = f"<title>{text_of(name)}</title>"
        parts.append(f'<circle class="{kind}" cx="{plane.x(x):.1f}" cy="{plane.y(y):.1f}" r="4">{title}</circle>')
    attributes = f' data-scale="{json.dumps([_LEFT, _WIDTH - _RIGHT, axis.first, axis.last])}"'
    if level:
        x = plane.x(level[1])
        side = ("end", -5) if x > _WIDTH * 0.55 else ("", 5)
        parts.append(
            f'<g class="budget" transform="translate({x:.1f} 0)">'
            f'<path class="level" d="M0 {plane.top}V{plane.bottom}"/>'
            f'<text class="{side[0]}" x="{side[1]}" y="{plane.top + 12}">{text_of(level[0])}</text></g>'
        )
    return _svg(_WIDTH, plane.bottom + _BOTTOM, parts, attributes)


def best_of(dots: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The Pareto front of two costs, in order of the first cost."""
    best: list[tuple[float, float]] = []
    for dot in sorted(dots):
        if not best or dot[1] < best[-1][1]:
            best.append(dot)
    return best


def stack_chart(
    layers: Mapping[str, Sequence[float]], *, x_label: str, y_label: str, along: int = 0, most: float = 0.0
) -> str:
    """Draws a stacked area chart, such as bytes by category over operations.

    The horizontal axis ends with ``along``, by default the number of points; the vertical one reaches ``most``.
    """
    count = max((len(values) for values in layers.values()), default=0)
    totals = [sum(column) for column in zip(*layers.values(), strict=True)]
    axis = Axis(0.0, max(along, count, 1), is_even=True)
    width = axis.last / max(count, 1)
    names = [(f"layer s{index}", name) for index, name in enumerate(layers) if any(layers[name])]
    top = _TOP + _LEGEND_LINE * (1 + -(-len(names) // _in_a_line(names)))
    plane = _Plane(axis, top, top + _HEIGHT, _scale([0.0, most, *totals], False, 0.0))
    below, parts = [0.0] * count, []
    for index, values in enumerate(layers.values()):
        above = [low + value for low, value in zip(below, values, strict=True)]
        upper = "".join(
            f"V{plane.y(value):.1f}H{plane.x((place + 1) * width):.1f}" for place, value in enumerate(above)
        )
        lower = "".join(
            f"V{plane.y(below[place]):.1f}H{plane.x(place * width):.1f}" for place in range(count - 1, -1, -1)
        )  # fmt: skip
        start = f"M{plane.x(0):.1f} {plane.y(below[0]):.1f}" if count else "M0 0"
        if any(values):
            parts.append(f'<path class="layer s{index}" d="{start}{upper}{lower}Z"/>')
        below = above
    head = [f'<text x="{_LEFT}" y="12">{text_of(y_label)}</text>', *_legend(names, _LEGEND_LINE)]
    details = f' data-places="{json.dumps([_LEFT, _WIDTH - _RIGHT, count])}"'  # of each point
    return _svg(_WIDTH, plane.bottom + _BOTTOM, [*head, *plane.axes(x_label), *parts], details)


@dataclass(frozen=True, slots=True)
class _Scale:
    """Maps values to the height of a chart: 0 at the bottom, 1 at the top."""

    low: float
    high: float
    is_logarithmic: bool
    has_zero: bool

    def part(self, value: float) -> float:
        if self.is_logarithmic:
            if value <= 0:
                return 0.0
            value = math.log10(value)
        return min(1.0, max(0.0, (value - self.low) / (self.high - self.low)))

    def ticks(self) -> list[float]:
        if not self.is_logarithmic:
            step = round_step((self.high - self.low) / 4)
            if not math.isfinite(step):  # the difference of the ends overflows
                return []
            first = math.ceil(self.low / step - 1e-9)
            return [index * step for index in range(first, math.floor(self.high / step + 1e-9) + 1)]
        decades = range(math.ceil(self.low) + self.has_zero, math.floor(self.high) + 1)
        every = max(1, -(-len(decades) // 6))
        return [*([0.0] if self.has_zero else []), *(10.0**decade for decade in list(decades)[::-every][::-1])]

    def labels(self, ticks: Sequence[float]) -> list[str]:
        step = ticks[1] - ticks[0] if len(ticks) > 1 else 0.0
        if self.is_logarithmic or not 1e-4 <= step < 1e6:
            return [number_text(value) for value in ticks]
        decimals = max(0, -math.floor(math.log10(step) + 1e-9))
        return [f"{value:.{decimals}f}" for value in ticks]


def _scale(values: Sequence[float], is_logarithmic: bool | None, least_span: float) -> _Scale:
    positive = [value for value in values if value > 0]
    if is_logarithmic is None:
        is_logarithmic = bool(values) and len(positive) == len(values) and max(values) > _FACTOR_OF_LOG * min(values)
    if is_logarithmic and positive:
        has_zero = len(positive) < len(values)
        first, last = math.floor(math.log10(min(positive))) - has_zero, math.ceil(math.log10(max(positive)) - 1e-9)
        return _Scale(first, max(last, first + 1), True, has_zero)
    low, high = (min(values), max(values)) if values else (0.0, 1.0)
    missing = least_span * abs(high) - (high - low)
    if missing > 0:
        low, high = low - missing / 2, high + missing / 2
    if 0 <= low < _LEAST_SHARE * high or low == high >= 0:
        low = 0.0
    room = 0.05 * (high - low) or abs(high) or 1.0
    return _Scale(low - (room if low else 0.0), high + room, False, False)


def round_step(step: float) -> float:
    """Rounds a step up to 1, 2 or 5 times a power of ten; infinite for a step that is not positive and finite."""
    if not 0 < step < math.inf:
        return math.inf
    power = 10.0 ** math.floor(math.log10(step))
    return next((factor * power for factor in (1, 2, 5) if factor * power >= step), 10 * power)


@dataclass(frozen=True, slots=True)
class _Plane:
    """The drawing area of a chart: maps steps and values to coordinates."""

    axis: Axis
    top: float
    bottom: float
    scale: _Scale

    def x(self, step: float) -> float:
        return _LEFT + (_WIDTH - _LEFT - _RIGHT) * min(1.0, max(0.0, self.axis.part(step)))

    def y(self, value: float) -> float:
        return self.bottom - (self.bottom - self.top) * self.scale.part(value)

    def axes(self, x_label: str) -> list[str]:
        right = _WIDTH - _RIGHT
        parts = []
        ticks = self.scale.ticks()
        for value, label in zip(ticks, self.scale.labels(ticks), strict=True):
            y = self.y(value)
            parts.append(f'<path class="grid" d="M{_LEFT} {y:.1f}H{right}"/>')
            parts.append(f'<text class="end" x="{_LEFT - 6}" y="{y + 4:.1f}">{label}</text>')
        parts.append(f'<path class="axis" d="M{_LEFT} {self.bottom}H{right}"/>')
        for step in self.axis.ticks():
            parts.append(f'<text class="mid" x="{self.x(step):.1f}" y="{self.bottom + 15}">{step:.6g}</text>')
        middle = (_LEFT + right) / 2
        return [*parts, f'<text class="mid" x="{middle}" y="{self.bottom + 31}">{text_of(x_label)}</text>']

    def level(self, value: float) -> str:
        return f'<path class="level" d="M{_LEFT} {self.y(value):.1f}H{_WIDTH - _RIGHT}"/>'

    def curve(self, curve: Curve, index: int) -> list[str]:
        parts, marks, pieces = [], [], [[]]  # type: list[str], list[str], list[list[str]]
        for step, value in zip(curve.steps, curve.values, strict=True):
            if math.isfinite(value):
                pieces[-1].append(f"{self.x(step):.1f} {self.y(value):.1f}")
                continue
            pieces.append([])
            x = self.x(step)
            title = f"<title>{text_of(curve.name)}, step {step:g}: {value}</title>"
            marks.append(f'<path class="odd" d="M{x - 4:.1f} {self.top}h8l-4 7Z">{title}</path>')
        dots = len(curve.steps) <= _DOTS_UP_TO
        for piece in pieces:
            if piece:
                parts.append(f'<path class="curve c{index}" d="M{"L".join(piece)}"/>')
            if piece and (dots or len(piece) == 1):
                circles = "".join(f"M{place}h0" for place in piece)
                parts.append(f'<path class="dot c{index}" d="{circles}"/>')
        return parts + marks


def _in_a_line(names: Sequence[tuple[str, str]]) -> int:
    """How many entries of a legend stand side by side."""
    return 1 if any(len(name) > _HALF_A_LINE for _, name in names) else 2


def _legend(names: Sequence[tuple[str, str]], down: float = 0) -> list[str]:
    parts, width = [], _in_a_line(names)
    for index, (kind, name) in enumerate(names):
        x, y = _LEFT + (index % width) * 200, 12 + down + _LEGEND_LINE * (index // width)
        parts.append(
            f'<path class="{kind}" d="M{x} {y - 4}h18"/>'
            if kind == "level" or kind.startswith("curve")
            else f'<rect class="{kind}" x="{x}" y="{y - 9}" width="18" height="10"/>'
        )
        parts.append(f'<text x="{x + 23}" y="{y}">{text_of(name, _NAME_LENGTH)}<title>{text_of(name)}</title></text>')
    return parts


def _svg(width: float, height: float, parts: Sequence[str], attributes: str = "") -> str:
    # aria-hidden, because the figure around it has the alternative text.
    return f'<svg viewBox="0 0 {width:g} {height:g}" aria-hidden="true"{attributes}>{"".join(parts)}</svg>'
