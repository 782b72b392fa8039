"""The flow of the gradient as a picture: layers by steps, each cell as dark as its gradient is large."""

import math
from collections.abc import Sequence

from anybatch.report.diagnosis import number_text
from anybatch.report.diagnosis_drawing import text_of
from anybatch.report.diagnosis_flow import Flow

SHADES = 10
_WIDTH = 960
_NAMES = 240
_RIGHT = 12
_WIDEST = 64
_LABEL_LENGTH = 36
_LEAST_DECADES = 6  # a range of less would make small differences look large
_TITLES_UP_TO = 1600
_STEP_ROOM = 34
_PATTERNS = (
    '<defs><pattern id="zero" width="5" height="5" patternUnits="userSpaceOnUse">'
    '<path class="ground" d="M0 0h5v5H0Z"/><path class="hatch" d="M0 5L5 0"/></pattern>'
    '<pattern id="none" width="5" height="5" patternUnits="userSpaceOnUse">'
    '<path class="ground" d="M0 0h5v5H0Z"/><path class="hatch" d="M2 2h1v1h-1Z"/></pattern></defs>'
)


def heat_picture(flow: Flow) -> str:
    """Draws norms of gradients.

    Args:
        flow: with at least one row and one column.

    Returns:
        The text of an ``svg`` element.
    """
    height = 17 if len(flow.rows) <= 32 else 13
    width = min(_WIDEST, (_WIDTH - _NAMES - _RIGHT) / len(flow.steps))
    low, high = decades_of(flow)
    titled = len(flow.rows) * len(flow.steps) <= _TITLES_UP_TO
    parts = [_PATTERNS]
    for index, row in enumerate(flow.rows):
        y = index * height
        name = text_of(row.name or "(the model)", _LABEL_LENGTH)
        label = f"{name}<title>{text_of(row.name)}</title>"
        parts.append(f'<text class="end" x="{_NAMES - 8}" y="{y + height - 4}">{label}</text>')
        for column, (step, value) in enumerate(zip(flow.steps, row.values, strict=True)):
            kind = shade_of(value, low, high)
            says = f"<title>{text_of(row.name)}, step {step}: {norm_text(value)}</title>" if titled else ""
            parts.append(
                f'<rect class="{kind}" x="{_NAMES + column * width:.1f}" y="{y}" width="{width - 1:.1f}"'
                f' height="{height - 1}"' + (f">{says}</rect>" if says else "/>")
            )
    bottom = len(flow.rows) * height
    parts += _steps(flow.steps, width, bottom)
    parts += _legend(low, high, bottom + 46)
    return f'<svg viewBox="0 0 {_WIDTH} {bottom + 84}" aria-hidden="true">{"".join(parts)}</svg>'


def decades_of(flow: Flow) -> tuple[int, int]:
    """The powers of ten at which the shades begin and end.

    Args:
        flow: the norms.
    """
    norms = [v for row in flow.rows for v in row.values if v is not None and 0 < v < math.inf]
    if not norms:
        return -_LEAST_DECADES, 0
    high = math.ceil(math.log10(max(norms)) - 1e-9)
    return min(math.floor(math.log10(min(norms))), high - _LEAST_DECADES), high


def shade_of(value: float | None, low: int, high: int) -> str:
    """The class of a cell.

    Args:
        value: the norm, ``None`` where there was no gradient.
        low: the power of ten at which the shades begin.
        high: at which they end.

    Example:
        >>> [shade_of(value, -6, 0) for value in (1e-6, 0.9, 0.0, None, float("nan"), float("inf"))]
        ['h0', 'h9', 'zero', 'none', 'odd', 'odd']
    """
    if value is None:
        return "none"
    if not math.isfinite(value):
        return "odd"
    if value == 0:
        return "zero"
    return f"h{min(SHADES - 1, max(0, int(SHADES * (math.log10(value) - low) / (high - low))))}"


def norm_text(value: float | None) -> str:
    """A norm in words: no gradient and exactly zero are told apart.

    Args:
        value: the norm.
    """
    return "no gradient" if value is None else "exactly 0" if value == 0 else number_text(value)


def _steps(steps: Sequence[int], width: float, bottom: float) -> list[str]:
    parts, free = [], 0.0
    for column, step in enumerate(steps):
        x = _NAMES + (column + 0.5) * width
        if x >= free:
            parts.append(f'<text class="mid" x="{x:.1f}" y="{bottom + 14}">{step}</text>')
            free = x + _STEP_ROOM
    middle = _NAMES + len(steps) * width / 2
    return [
        *parts,
        f'<text class="mid" x="{max(middle, _NAMES + 60):.1f}" y="{bottom + 30}">step, those sampled</text>',
    ]


def _legend(low: int, high: int, y: float) -> list[str]:
    size = 18
    parts = [
        f'<rect class="h{shade}" x="{_NAMES + shade * size}" y="{y}" width="{size}" height="12"/>'
        for shade in range(SHADES)
    ]
    ends = ((0, low), (SHADES // 2, (low + high) / 2), (SHADES, high))
    for place, power in ends:
        label = f"1e{power:g}" if power == int(power) else ""
        parts.append(f'<text class="mid" x="{_NAMES + place * size}" y="{y + 26}">{label}</text>')
    for index, (kind, name) in enumerate((("zero", "exactly zero"), ("none", "no gradient"), ("odd", "not finite"))):
        x = _NAMES + SHADES * size + 40 + index * 130
        parts.append(f'<rect class="{kind}" x="{x}" y="{y}" width="{size}" height="12"/>')
        parts.append(f'<text x="{x + size + 6}" y="{y + 10}">{name}</text>')
    return [*parts, f'<text class="end" x="{_NAMES - 8}" y="{y + 10}">norm of the gradient</text>']
