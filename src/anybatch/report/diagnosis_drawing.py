"""Pictures of a run as SVG that takes its colours from the page, light or dark, with its texts as text."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from anybatch.report.diagnosis import clean, number_text
from anybatch.report.diagnosis_series import Curve

_WIDTH, _HEIGHT = 460, 220
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 14, 10, 38
_LEGEND_LINE = 16
_NAME_LENGTH = 30
_DOTS_UP_TO = 40
_FACTOR_OF_LOG = 30.0
_LEAST_SHARE = 0.5


@dataclass(frozen=True, slots=True)
class Band:
    """A range of values that is shaded.

    Args:
        low: where it begins.
        high: where it ends.
        name: written in the legend.
    """

    low: float
    high: float
    name: str


def text_of(text: str, most: int = 0) -> str:
    """A text for markup; in the middle of a long one some is left out.

    Args:
        text: the user's or our own.
        most: characters, 0 for all.

    Example:
        >>> text_of("encoder.layers.11.attention.<b>", 15)
        'encoder…ion.&lt;b&gt;'
    """
    text = clean(text)
    if most and len(text) > most:
        text = f"{text[: most // 2]}…{text[len(text) - (most - most // 2 - 1) :]}"
    return escape(text)


def line_picture(
    curves: Sequence[Curve],
    *,
    x_label: str,
    is_logarithmic: bool | None = None,
    least_span: float = 0.0,
    levels: Sequence[tuple[str, float]] = (),
    area: tuple[Curve, Curve] | None = None,
    band: Band | None = None,
) -> str:
    """Draws lines over steps; values that are not finite are gaps with a mark above them.

    Args:
        curves: at most four.
        x_label: what is along the bottom.
        is_logarithmic: whether equal distances are equal factors; by the values themselves where it is left out.
        least_span: of an axis that is not logarithmic, relative to the largest value, so that noise stays small.
        levels: names and values drawn across.
        area: two curves between which it is shaded.
        band: a range that is shaded from side to side.

    Returns:
        The text of an ``svg`` element.
    """
    drawn = [*curves, *(area or ())]
    values = [value for curve in drawn for value in curve.values if math.isfinite(value)]
    scale = _scale([*values, *(value for _, value in levels)], is_logarithmic, least_span)
    steps = [step for curve in drawn for step in curve.steps] or [0]
    first, last = min(steps), max(steps)
    names = [(f"curve c{index}", curve.name) for index, curve in enumerate(curves)]
    names += [("level", name) for name, _ in levels] + ([("band", band.name)] if band else [])
    top = _TOP + _LEGEND_LINE * -(-len(names) // 2)
    bottom = top + _HEIGHT - _TOP - _BOTTOM
    frame = _Frame(first, max(last, first + 1), top, bottom, scale)
    parts = _legend(names)
    if band:
        parts.append(frame.band(band))
    parts += frame.axes(x_label)
    parts += [frame.level(value) for _, value in levels]
    if area:
        parts.append(frame.area(*area))
    for index, curve in enumerate(curves):
        parts += frame.curve(curve, index)
    return _svg(_WIDTH, bottom + _BOTTOM, parts)


@dataclass(frozen=True, slots=True)
class _Scale:
    """From values to parts of the height: 0 at the bottom, 1 at the top."""

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
            step = _round_step((self.high - self.low) / 4)
            if not math.isfinite(step):  # the ends are so far apart that their difference is no number
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


def _round_step(step: float) -> float:
    if not 0 < step < math.inf:
        return math.inf
    power = 10.0 ** math.floor(math.log10(step))
    return next((factor * power for factor in (1, 2, 5) if factor * power >= step), 10 * power)


@dataclass(frozen=True, slots=True)
class _Frame:
    """The plane of a picture, from steps and values to places."""

    first: int
    last: int
    top: float
    bottom: float
    scale: _Scale

    def x(self, step: float) -> float:
        return _LEFT + (_WIDTH - _LEFT - _RIGHT) * (step - self.first) / (self.last - self.first)

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
        every = max(1, math.ceil(_round_step((self.last - self.first) / 5)))
        for step in range(-(-self.first // every) * every, self.last + 1, every):
            parts.append(f'<text class="mid" x="{self.x(step):.1f}" y="{self.bottom + 15}">{step}</text>')
        middle = (_LEFT + right) / 2
        return [*parts, f'<text class="mid" x="{middle}" y="{self.bottom + 31}">{text_of(x_label)}</text>']

    def band(self, band: Band) -> str:
        top, bottom = self.y(band.high), self.y(band.low)
        return (
            f'<rect class="band" x="{_LEFT}" y="{top:.1f}" width="{_WIDTH - _LEFT - _RIGHT}"'
            f' height="{max(0.0, bottom - top):.1f}"/>'
        )

    def level(self, value: float) -> str:
        return f'<path class="level" d="M{_LEFT} {self.y(value):.1f}H{_WIDTH - _RIGHT}"/>'

    def area(self, low: Curve, high: Curve) -> str:
        ends = [
            f"{self.x(step):.1f} {self.y(value):.1f}"
            for curve, way in ((low, 1), (high, -1))
            for step, value in list(zip(curve.steps, curve.values, strict=True))[::way]
            if math.isfinite(value)
        ]
        return f'<path class="area" d="M{"L".join(ends)}Z"/>' if ends else ""

    def curve(self, curve: Curve, index: int) -> list[str]:
        parts, marks, pieces = [], [], [[]]  # type: list[str], list[str], list[list[str]]
        for step, value in zip(curve.steps, curve.values, strict=True):
            if math.isfinite(value):
                pieces[-1].append(f"{self.x(step):.1f} {self.y(value):.1f}")
                continue
            pieces.append([])
            x = self.x(step)
            title = f"<title>{text_of(curve.name)}, step {step}: {value}</title>"
            marks.append(f'<path class="odd" d="M{x - 4:.1f} {self.top}h8l-4 7Z">{title}</path>')
        dots = len(curve.steps) <= _DOTS_UP_TO
        for piece in pieces:
            if piece:
                parts.append(f'<path class="curve c{index}" d="M{"L".join(piece)}"/>')
            if piece and (dots or len(piece) == 1):
                circles = "".join(f"M{place}h0" for place in piece)
                parts.append(f'<path class="dot c{index}" d="{circles}"/>')
        return parts + marks


def _legend(names: Sequence[tuple[str, str]]) -> list[str]:
    parts = []
    for index, (kind, name) in enumerate(names):
        x, y = _LEFT + (index % 2) * 200, 12 + _LEGEND_LINE * (index // 2)
        parts.append(
            f'<rect class="band" x="{x}" y="{y - 9}" width="18" height="10"/>'
            if kind == "band"
            else f'<path class="{kind}" d="M{x} {y - 4}h18"/>'
        )
        parts.append(f'<text x="{x + 23}" y="{y}">{text_of(name, _NAME_LENGTH)}<title>{text_of(name)}</title></text>')
    return parts


def _svg(width: float, height: float, parts: Sequence[str]) -> str:
    # The figure around it has the alternative text.
    return f'<svg viewBox="0 0 {width:g} {height:g}" aria-hidden="true">{"".join(parts)}</svg>'
