"""Sharded tensors: the ``DTensor``s of FSDP2 and tensor parallelism."""

from collections.abc import Sequence
from typing import Any

import torch


def is_sharded(tensor: Any) -> bool:
    """Whether a tensor is a ``DTensor``, without an import of ``torch.distributed``.

    Example:
        >>> is_sharded(torch.zeros(2))
        False
    """
    return type(tensor).__name__ == "DTensor"


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """The local shard of a ``DTensor``, in the same storage; a plain tensor itself.

    Example:
        >>> plain = torch.zeros(2)
        >>> local_of(plain) is plain
        True
    """
    part: torch.Tensor = tensor._local_tensor if is_sharded(tensor) else tensor  # type: ignore[attr-defined]
    return part


def joined_norm(tensors: Sequence[torch.Tensor], norm: torch.Tensor) -> torch.Tensor:
    """The Euclidean norm of sharded tensors; a collective call.

    Args:
        tensors: ``DTensor``s of one mesh.
        norm: the norm of the local shards, a 0-dim tensor.
    """
    import torch.distributed as dist

    mesh: Any = tensors[0].device_mesh  # type: ignore[attr-defined]
    square = norm.square()
    dist.all_reduce(square, group=mesh.get_group())
    return square.sqrt()
