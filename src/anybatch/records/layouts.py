"""Where the samples of a batch were found to lie, for people to look at."""

from dataclasses import dataclass
from typing import NamedTuple

from anybatch.records.plainvalues import Plain


class LeafLayout(NamedTuple):
    """A leaf of a batch.

    Args:
        label: where it lies, such as ``batch['x']``.
        dim: the dimension of its samples; ``None`` for what goes whole to every micro-batch.
        kind: its class.
        shape: its sizes, of a list its length; empty for anything else.
    """

    label: str
    dim: int | None
    kind: str
    shape: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class BatchLayout(Plain):
    """How a batch is cut: what was inferred, or said with ``layout=`` and ``broadcast=``.

    Args:
        samples: of the logical batch; ``None`` if it can't be cut.
        leaves: of the batch; of a window those of its first batch.
        batches: in the window; 1 for a batch alone.
        note: why it can't be cut, or that samples are raw; empty otherwise.

    Example:
        >>> x, t = LeafLayout("batch['x']", 0, "Tensor", (22, 4)), LeafLayout("batch['t']", None, "int")
        >>> print(BatchLayout(22, (x, t)))
        22 samples
          batch['x']  Tensor [22, 4]  22 samples in dimension 0
          batch['t']  int             whole to every micro-batch
    """

    samples: int | None
    leaves: tuple[LeafLayout, ...]
    batches: int = 1
    note: str = ""

    def __str__(self) -> str:
        first = "not cut" if self.samples is None else f"{self.samples} samples"
        if self.batches > 1:
            first += f" in {self.batches} batches, of which the first is"
        shown = [(leaf.label, _kind(leaf), _where(leaf)) for leaf in self.leaves]
        widths = [max((len(row[column]) for row in shown), default=0) for column in (0, 1)]
        rows = [f"  {label:{widths[0]}}  {kind:{widths[1]}}  {where}" for label, kind, where in shown]
        return "\n".join([f"{first}: {self.note}" if self.note else first, *rows])


def _kind(leaf: LeafLayout) -> str:
    return f"{leaf.kind} {list(leaf.shape)}" if leaf.shape else leaf.kind


def _where(leaf: LeafLayout) -> str:
    if leaf.dim is None:
        return "whole to every micro-batch"
    if leaf.kind in ("list", "tuple"):
        return f"{leaf.shape[0]} samples, an item each"
    return f"{leaf.shape[leaf.dim]} samples in dimension {leaf.dim}" if leaf.shape else "samples of its own"
