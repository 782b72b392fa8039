"""The layout of a batch: which dimension of each leaf holds the samples."""

from dataclasses import dataclass
from typing import NamedTuple

from anybatch.records.reading import Plain


class LeafLayout(NamedTuple):
    """A leaf of a batch."""

    label: str  # its path, such as ``batch['x']``
    dim: int | None  # the dimension of its samples; ``None`` if every micro-batch gets the whole leaf
    kind: str  # the name of its class
    shape: tuple[int, ...] = ()  # the shape of a tensor, or the length of a list; empty for anything else


@dataclass(frozen=True, slots=True)
class BatchLayout(Plain):
    """How a batch is split: inferred, or given by ``layout=`` and ``broadcast=``.

    Example:
        >>> x, t = LeafLayout("batch['x']", 0, "Tensor", (22, 4)), LeafLayout("batch['t']", None, "int")
        >>> print(BatchLayout(22, (x, t)))
        22 samples
          batch['x']  Tensor [22, 4]  22 samples in dimension 0
          batch['t']  int             whole to every micro-batch
    """

    samples: int | None  # the number of samples of the logical batch; ``None`` if it can't be split
    leaves: tuple[LeafLayout, ...]  # the leaves of the batch; of a window, those of its first batch
    batches: int = 1  # the number of batches in the window; 1 for a single batch
    note: str = ""  # why the batch can't be split, or that its samples are raw; empty otherwise

    def __str__(self) -> str:
        first = "not cut" if self.samples is None else f"{self.samples} samples"
        if self.batches > 1:
            first += f" in {self.batches} batches; the first one"
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
        return f"{leaf.shape[0]} samples, one per item"
    return f"{leaf.shape[leaf.dim]} samples in dimension {leaf.dim}" if leaf.shape else "samples of its own"
