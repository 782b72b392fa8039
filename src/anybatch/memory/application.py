"""Applies all memory optimizations of a plan to a model, and removes them together."""

from collections.abc import Iterable

import torch

from anybatch.errors import BatchError
from anybatch.memory.checkpointing import recompute
from anybatch.memory.hostpool import HostPool
from anybatch.memory.losschunks import ChunkedLoss, chunk_loss
from anybatch.memory.offloading import offload
from anybatch.memory.places import Handle


def apply_optimizations(
    model: torch.nn.Module,
    *,
    recompute: Iterable[str] = (),
    offload: Iterable[str] = (),
    head: str = "",
    loss_chunks: int = 1,
    simulate_offload: bool = False,
    pool: HostPool | None = None,
) -> "Applied":
    """Applies memory optimizations to a model.

    Args:
        recompute: names of blocks that are recomputed, see ``recompute``.
        offload: names of blocks whose saved tensors go to the host, see ``offload``; of a block that is recomputed as
            well these are its arguments.
        head: name of the output layer, see ``chunk_loss``.
        loss_chunks: how many chunks; 1 leaves the loss as it is.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Tanh(), torch.nn.Linear(3, 1000))
        >>> with apply_optimizations(model, recompute=["0:2"], head="2", loss_chunks=4) as applied:
        ...     loss = torch.nn.functional.cross_entropy(model(torch.ones(32, 4)), torch.zeros(32, dtype=torch.long))
        ...     loss.backward()
        >>> applied.taken
        1
    """
    return _apply(model, _names(recompute), _names(offload), head, loss_chunks, simulate_offload, pool)


def _names(names: Iterable[str]) -> Iterable[str]:
    return names if isinstance(names, str) else tuple(names)  # a text is refused further on


def _apply(
    model: torch.nn.Module,
    recomputed: Iterable[str],
    offloaded: Iterable[str],
    head: str,
    loss_chunks: int,
    simulate: bool,
    pool: HostPool | None,
) -> "Applied":
    if isinstance(loss_chunks, bool) or not isinstance(loss_chunks, int) or loss_chunks < 1:
        raise BatchError(f"loss_chunks is {loss_chunks!r}; expected a whole number from 1 on")
    if loss_chunks > 1 and not head:
        raise BatchError(f"loss_chunks is {loss_chunks}, and no head is named; expected the name of the output layer")
    handles: list[Handle] = []
    try:
        if loss_chunks > 1:
            handles.append(chunk_loss(model, head, loss_chunks))
        if recomputed:
            handles.append(recompute(model, recomputed))
        if offloaded:
            handles.append(offload(model, offloaded, pool=pool, simulate=simulate))
    except BaseException:
        for handle in reversed(handles):
            handle.remove()
        raise
    return Applied(handles)


class Applied(Handle):
    """The handle of ``apply_optimizations``, which removes them.

    Args:
        handles: of the optimizations.
    """

    def __init__(self, handles: list[Handle]) -> None:
        super().__init__([handle.remove for handle in handles])
        self._losses = [handle for handle in handles if isinstance(handle, ChunkedLoss)]

    @property
    def taken(self) -> int:
        """Number of cross-entropy calls that were computed in chunks."""
        return sum(handle.taken for handle in self._losses)

    @property
    def computed(self) -> int:
        """Number of times that all logits were computed anyway."""
        return sum(handle.computed for handle in self._losses)
