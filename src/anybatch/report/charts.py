"""Charts as SVG text that goes into a page as it is; the same values give the same text."""

import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Okabe and Ito's colours, which people with any kind of colour vision can tell apart.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7")
_MUTED = "#5f6368"
_WIDTH = 7.2


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a chart.

    Args:
        name: in the legend.
        xs: positions, ascending.
        ys: values.
        is_marked: whether each value gets a dot.
    """

    name: str
    xs: Sequence[float]
    ys: Sequence[float]
    is_marked: bool = False


@dataclass(frozen=True, slots=True)
class Level:
    """A value that others are compared with, drawn across the chart.

    Args:
        name: written beside it.
        value: where.
    """

    name: str
    value: float


def line_chart(lines: Sequence[Line], *, x_label: str, y_label: str, level: Level | None = None) -> str:
    """Draws lines over a common axis.

    Args:
        lines: in the order of the legend.
        x_label: what is along the bottom, with its unit.
        y_label: what is up the side, with its unit.
        level: a value to compare with.

    Returns:
        The text of an ``svg`` element.

    Raises:
        ImportError: matplotlib is not installed.
    """

    def draw(axes: "Axes") -> None:
        for line, colour in zip(lines, _COLOURS, strict=False):
            style: dict[str, Any] = {"marker": "o", "markersize": 4} if line.is_marked else {"linewidth": 1.0}
            axes.plot(line.xs, line.ys, color=colour, label=line.name, **style)
        if level is not None:
            axes.axhline(level.value, color=_MUTED, linestyle="--", linewidth=1.0, label=level.name)
        axes.set_ylim(bottom=0)
        axes.set_xlabel(x_label)
        axes.set_ylabel(y_label)
        axes.legend(frameon=False)

    return _svg(draw, height=3.6, salt=f"{x_label} {y_label}")


def bar_chart(
    bars: Sequence[tuple[str, float]], *, label: str, level: Level | None = None, is_logarithmic: bool = False
) -> str:
    """Draws horizontal bars, the first one on top.

    Args:
        bars: names and values.
        label: what the values are, with their unit.
        level: a value to compare with.
        is_logarithmic: whether equal distances are equal factors; the values are then dots, for there is no zero.

    Returns:
        The text of an ``svg`` element.

    Raises:
        ImportError: matplotlib is not installed.
    """

    def draw(axes: "Axes") -> None:
        names, values = [name for name, _ in bars], [value for _, value in bars]
        if is_logarithmic:
            axes.set_xscale("log")
            axes.scatter(values, names, color=_COLOURS[0], s=36, zorder=3)
            axes.set_ylim(-0.6, len(bars) - 0.4)
        else:
            axes.barh(names, values, color=_COLOURS[0], height=0.55)
        if level is not None:
            axes.axvline(level.value, color=_COLOURS[1], linestyle="--", linewidth=1.2, label=level.name)
            axes.legend(frameon=False, loc="lower center", bbox_to_anchor=(0.5, 1.0))
        axes.invert_yaxis()
        axes.grid(axis="x", color="#e6e6e6", zorder=0)
        axes.set_axisbelow(True)
        axes.set_xlabel(label)

    return _svg(draw, height=0.95 + 0.42 * len(bars), salt=label)


@dataclass(frozen=True, slots=True)
class Dot:
    """One way to do something, with two things that it costs.

    Args:
        x: the first cost.
        y: the second.
        name: written beside it, empty for none.
    """

    x: float
    y: float
    name: str = ""


def frontier_chart(dots: Sequence[Dot], chosen: Dot, *, x_label: str, y_label: str, budget: Level | None = None) -> str:
    """Draws the least of one cost that can be had for another, and which way was chosen.

    Args:
        dots: the ways, the chosen one may be among them; a line goes along those that no other is better than.
        chosen: is drawn larger.
        x_label: the cost along the bottom, with its unit.
        y_label: the cost up the side, with its unit.
        budget: what the first cost may be at most, drawn as a vertical line.

    Returns:
        The text of an ``svg`` element.

    Raises:
        ImportError: matplotlib is not installed.
    """
    best = _best_of([*dots, chosen])

    def draw(axes: "Axes") -> None:
        # Between two ways the smaller one is the one that fits, so the line runs level and then down.
        axes.step([dot.x for dot in best], [dot.y for dot in best], where="post", color=_COLOURS[0], linewidth=1.2)
        axes.scatter([dot.x for dot in dots], [dot.y for dot in dots], color=_COLOURS[0], s=22, zorder=3)
        axes.scatter([chosen.x], [chosen.y], color=_COLOURS[1], s=80, zorder=4, label=chosen.name)
        if budget is not None:
            axes.axvline(budget.value, color=_MUTED, linestyle="--", linewidth=1.2, label=budget.name)
        axes.set_xlim(0, 1.08 * max(dot.x for dot in (*dots, chosen, Dot(budget.value if budget else 0.0, 0.0))))
        axes.set_ylim(0, 1.12 * max(dot.y for dot in (*dots, chosen)))
        axes.set_xlabel(x_label)
        axes.set_ylabel(y_label)
        axes.legend(frameon=False, loc="lower left")

    return _svg(draw, height=3.8, salt=f"{x_label} {y_label}")


def _best_of(dots: Sequence[Dot]) -> list[Dot]:
    """Those that no other is better than in both costs, the smallest first cost first."""
    best: list[Dot] = []
    for dot in sorted(dots, key=lambda dot: (dot.x, dot.y)):
        if not best or dot.y < best[-1].y:
            best.append(dot)
    return best


def _svg(draw: Any, *, height: float, salt: str) -> str:
    import matplotlib as mpl
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    # A salt for each chart: ids are then the same in every run and different among the charts of a page.
    style: Any = {"svg.hashsalt": salt, "svg.fonttype": "none", "font.family": "sans-serif", "font.size": 9.5}
    with mpl.rc_context(style):
        figure = Figure(figsize=(_WIDTH, height), layout="constrained")
        figure.patch.set_alpha(0.0)
        FigureCanvasSVG(figure)
        axes = figure.add_subplot()
        axes.spines[["top", "right"]].set_visible(False)
        draw(axes)
        text = io.StringIO()
        figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    svg = text.getvalue()
    return svg[svg.index("<svg") :]
