"""What was kept of plateaus, of states that were loaded into their own owner, and of the first NaN of a forward."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from anybatch.doctor.ask.keeping import Kept, Plateau
from anybatch.doctor.ask.trials import told
from anybatch.records.lossfacts import Probed
from anybatch.records.runs import Run

_RISES = re.compile(
    r"acc|f1|auc|dice|iou|jaccard|map\b|precision|recall|bleu|rouge|psnr|ssim|reward|return|score|success|r2|corr|hit|ndcg",
    re.IGNORECASE,
)
_FALLS = re.compile(r"loss|err|mse|mae|rmse|nll|perplex|ppl|wer|cer|fid|dist", re.IGNORECASE)


def about_plateaus(kept: Kept, run: Run) -> Iterator[Probed]:
    """Whether a ``ReduceLROnPlateau`` is given values that get better in the direction that it takes for worse."""
    for one in kept.plateaus.values():
        values = one.values
        if len(values) < 4:
            continue
        sign = 1 if one.mode == "min" else -1  # of what is worse to it
        first, last = values[0], sum(values[-3:]) / 3
        worse = sign * (last - first) > 0.05 * (max(map(abs, values)) or 1.0)
        name = _named(one)
        better = _RISES.search(name) if one.mode == "min" else _FALLS.search(name)
        other = _FALLS.search(name) if one.mode == "min" else _RISES.search(name)
        ranked = _share_of_worse(values, sign)
        bounded = all(0 <= value <= 1 for value in values) or all(0 <= value <= 100 for value in values)
        silent = not name or not (better or other)
        wrong = bool(better and not other and worse) or bool(silent and bounded and worse and ranked > 0.75)
        if one.mode == "max" and silent:
            wrong = False  # a value that falls may simply be one that gets worse
        fell = any(later < before for before, later in zip(one.rates, one.rates[1:], strict=False))
        seen: dict[str, Any] = {"mode": one.mode, "first": first, "last": last, "name": name, "values": len(values)}
        seen |= {"rate": one.rates[-1], "rate_first": one.rates[0]}
        yield told("plateau", one, answer="yes" if wrong and fell else "no", **seen)


def _share_of_worse(values: list[float], sign: int) -> float:
    """Of all pairs in order of time, the share in which the later value is worse."""
    pairs = [(a, b) for position, a in enumerate(values[:60]) for b in values[position + 1 : 60]]
    return sum(1 for a, b in pairs if sign * (b - a) > 0) / max(len(pairs), 1)


def _named(one: Plateau) -> str:
    """What the user's line gives to ``step``, as text."""
    try:
        tree = ast.parse(Path(one.file).read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError):
        return ""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        if node.func.attr == "step" and node.lineno <= one.line <= (node.end_lineno or node.lineno):
            given = [*node.args, *(word.value for word in node.keywords)]
            return ast.unparse(given[0]) if given else ""
    return ""


def about_own_states(kept: Kept, run: Run) -> Iterator[Probed]:
    """Whether a state was loaded that was never a copy, so that nothing was put back."""
    for one in kept.own[:1]:
        yield told("own state", one, cls=one.name, tensors=one.count, loads=len(kept.own))


def about_nan(kept: Kept, run: Run) -> Iterator[Probed]:
    """The first operation of a forward that gave NaN though it was given none."""
    if kept.nan is not None:
        yield told("first nan", kept.nan, op=kept.nan.name)
