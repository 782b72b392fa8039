"""The errors about batches whose samples can't be found, each with all remedies."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from anybatch.errors import BatchError


class Found(NamedTuple):
    """A leaf with rows, or a container whose items may be samples."""

    label: str  # such as batch['x']
    dotted: str  # its path
    rows: int
    node: Any = None


IN_A_ROW = (
    "If rows of several samples are concatenated, let the DataLoader return raw samples (collate_fn=list) and "
    "pass collate=, the function that joins them"
)
"""The remedy for flat pixels, nodes of graphs and packed sequences."""


def could_be_both(found: Sequence[Found], rows: int, own: int | None) -> BatchError:
    """The error about containers that may hold samples, or leaves with rows of their own."""
    first = found[0]
    kind = f"{first.label} is a {type(first.node).__name__}" if len(found) == 1 else "the batch"
    if len(found) > 1 or not first.dotted:
        what = f"{', '.join(one.label for one in found[:4])}: the batch could be {rows} samples or leaves of {own} rows"
    else:
        what = f"{kind} of {rows} items with {own} rows each, so it could be {rows} samples or {rows} leaves"
    items = ", ".join(f"{one.dotted!r}: 0" for one in found)
    inside = ", ".join(f"{(one.dotted + '.*').removeprefix('.')!r}: 0" for one in found)
    as_tuple = len(found) == 1 and isinstance(first.node, list)
    leaves_too = f"make it a tuple if the items are leaves, or pass layout={{{inside}}}"
    return BatchError(
        f"{what}; {leaves_too if as_tuple else f'if the items are leaves, pass layout={{{inside}}}'}. If they are "
        f"samples, pass layout={{{items}}}, or stack them; where their shapes differ, pass a list, or let the "
        "DataLoader return raw samples (collate_fn=list) and pass collate=",
        path=first.label,
    )


def mismatch(found: Sequence[Found], tuples: Sequence[Found] = ()) -> BatchError:
    """The error about leaves with different numbers of rows.

    Args:
        found: the leaves; first the one that differs, then those that most agree with.
        tuples: containers of these leaves that could hold samples instead.
    """
    odd, usual = found[0], found[1]
    others = tuple(one.dotted for one in found if one.rows == usual.rows and one.dotted)
    text = (
        f"{odd.label} has {odd.rows} rows, {usual.label} has {usual.rows}; every leaf needs the same number of rows "
        f"along dimension 0.{_turned(odd, usual)}{_turned(usual, odd)} If {odd.label} is not per "
        f"sample, pass broadcast=({odd.dotted!r},)"
    )
    if 0 < len(others) <= 3:
        text += f"; if {usual.label} is not, broadcast={others!r}"
    if tuples:
        paths = ", ".join(f"{one.dotted!r}: 0" for one in tuples)
        text += f". If the items of {' and '.join(one.label for one in tuples[:2])} are samples, pass them as a list, "
        text += f"or pass layout={{{paths}}}"
    return BatchError(f"{text}. {IN_A_ROW}", path=odd.label)


def _turned(one: Found, other: Found) -> str:
    """The hint that the samples of a leaf may be in a later dimension."""
    shape = tuple(getattr(one.node, "shape", ()))
    if not one.dotted or other.rows not in shape[1:]:
        return ""
    dim = shape.index(other.rows, 1)
    return f" If the samples of {one.label} are in dimension {dim}, pass layout={{{one.dotted!r}: {dim}}}."
