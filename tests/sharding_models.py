"""Models in parts over several processes, and the same models whole."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from anybatch.tensors.shards import is_sharded, local_of
from ranks_running import everywhere, hashed

Wrap = Callable[[torch.nn.Module], torch.nn.Module]

runs_on_cpu = pytest.mark.skipif(
    not hasattr(torch.cpu.Stream, "record_event"), reason="fully_shard of torch 2.6 does not run on the CPU"
)


def sharded(*, reshards: bool, units: Iterable[str] = ("first", "last"), **options: Any) -> Wrap:
    """Applies ``fully_shard`` to some children, and to the whole.

    Returns:
        A function that does so.
    """

    def wrap(model: torch.nn.Module) -> torch.nn.Module:
        mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
        for name in units:
            fully_shard(model.get_submodule(name), mesh=mesh, reshard_after_forward=reshards, **options)
        fully_shard(model, mesh=mesh, reshard_after_forward=reshards, **options)
        return model

    return wrap


def full(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """The whole of a tensor that may lie in parts, without a graph; all processes call it.

    Not by ``full_tensor``: over gloo it runs the collective ALLGATHER_COALESCED. The two worker threads of torch's
    ProcessGroupGloo write the name of the last collective to one string without a lock, and a name of more than 15
    characters lies on the heap, so that both threads may free it.
    """
    return torch.cat(everywhere(local_of(tensor.detach()))) if is_sharded(tensor) else tensor  # type: ignore[union-attr]


def whole_weights(model: torch.nn.Module) -> list[torch.Tensor | None]:
    """The whole parameters."""
    return [None if (found := full(p)) is None else found.detach() for p in model.parameters()]


def parts(model: torch.nn.Module) -> str:
    """A text for all bits that lie on this process."""
    return hashed(getattr(p, "_local_tensor", p) for p in model.parameters())


def gradients_of_whole(model: torch.nn.Module) -> list[torch.Tensor | None]:
    """The whole gradients, copied."""
    return [None if p.grad is None else full(p.grad.detach().clone()) for p in model.parameters()]
