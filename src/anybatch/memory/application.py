"""Applies all memory optimizations of a plan to a model, and removes them together."""

from collections.abc import Iterable
from contextlib import ExitStack

import torch

from anybatch.errors import BatchError
from anybatch.memory.checkpointing import recompute as recompute_blocks
from anybatch.memory.losschunks import Applied, chunk_loss
from anybatch.memory.offloading import HostPool
from anybatch.memory.offloading import offload as offload_blocks


def apply_optimizations(
    model: torch.nn.Module,
    *,
    recompute: Iterable[str] = (),
    offload: Iterable[str] = (),
    head: str = "",
    loss_chunks: int = 1,
    simulate_offload: bool = False,
    pool: HostPool | None = None,
) -> Applied:
    """Applies memory optimizations to a model.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Tanh(), torch.nn.Linear(3, 1000))
        >>> with apply_optimizations(model, recompute=["0:2"], head="2", loss_chunks=4) as applied:
        ...     loss = torch.nn.functional.cross_entropy(model(torch.ones(32, 4)), torch.zeros(32, dtype=torch.long))
        ...     loss.backward()
        >>> applied.taken
        1
    """
    recompute, offload = (one if isinstance(one, str) else tuple(one) for one in (recompute, offload))
    if isinstance(loss_chunks, bool) or not isinstance(loss_chunks, int) or loss_chunks < 1:
        raise BatchError(f"loss_chunks is {loss_chunks!r}; expected a whole number from 1 on")
    if loss_chunks > 1 and not head:
        raise BatchError(f"loss_chunks is {loss_chunks}, and no head is named; expected the name of the output layer")
    with ExitStack() as stack:
        applied = stack.enter_context(chunk_loss(model, head, loss_chunks) if loss_chunks > 1 else Applied())
        if recompute:
            applied.callback(recompute_blocks(model, recompute).remove)
        if offload:
            applied.callback(offload_blocks(model, offload, pool=pool, simulate=simulate_offload).remove)
        stack.pop_all()
        return applied
