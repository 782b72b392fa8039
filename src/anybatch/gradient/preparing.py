"""Batches that are computed from all steps before they are cut along time."""

from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence

from anybatch.gradient.timesteps import Steps
from anybatch.tensors.trees import map_leaves

Bounds = tuple[int, int]
"""The first step of a chunk and the one after its last."""


class Prepared:
    """A batch, of which some tensors may have a graph; they are cut, and what their chunks get goes up once.

    Args:
        batch: any nested container.
        is_cut: whether gradients are collected here.

    Attributes:
        whole: the batch with its graphs.
        batch: the batch without them.
        leaves: those of the chunk that was made last.
    """

    def __init__(self, batch: Any, *, is_cut: bool) -> None:
        self.whole = batch
        self._roots: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._sums: dict[int, torch.Tensor] = {}
        self._made: list[tuple[Any, torch.Tensor]] = []
        self.batch = map_leaves(self._without_graph, batch) if is_cut else batch

    @property
    def has_graph(self) -> bool:
        """Whether anything is to go up."""
        return bool(self._roots)

    @property
    def leaves(self) -> list[torch.Tensor]:
        """The leaves of the chunk that was made last."""
        return [made for _, made in self._made]

    def _without_graph(self, leaf: Any) -> Any:
        tensor = leaf.data if isinstance(leaf, PackedSequence) else leaf
        if not isinstance(tensor, torch.Tensor) or not tensor.requires_grad:
            return leaf
        alone = tensor.detach()
        stands = PackedSequence(alone, *leaf[1:]) if isinstance(leaf, PackedSequence) else alone
        self._roots[id(stands)] = tensor, alone
        return stands

    def chunk(self, steps: Steps, bounds: Bounds) -> Any:
        """A chunk with leaves that get the gradient of what was computed.

        Args:
            steps: of ``batch``.
            bounds: of the chunk.
        """
        self._made = []
        return steps.chunk(*bounds, self._stand_in if self._roots else None)

    def _stand_in(self, leaf: Any, part: torch.Tensor) -> torch.Tensor:
        if id(leaf) not in self._roots:
            return part
        made = part.detach().requires_grad_()
        self._made.append((leaf, made))
        return made

    def collect(self, steps: Steps, bounds: Bounds) -> None:
        """Keeps the gradients of the chunk that was made last.

        Args:
            steps: of ``batch``.
            bounds: of the chunk.
        """
        for leaf, made in self._made:
            if made.grad is None:
                continue
            key = id(leaf)
            if key not in self._sums:
                self._sums[key] = torch.zeros_like(self._roots[key][1])
            steps.part(leaf, self._sums[key], *bounds).add_(made.grad)
        self._made = []

    def gradients(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """What was computed, with the gradients of all chunks."""
        return [(self._roots[key][0], total) for key, total in self._sums.items()]
