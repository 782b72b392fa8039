"""Tensors of which each process has a part, as FSDP2 and tensor parallelism leave them."""

from collections.abc import Sequence
from typing import Any

import torch


def is_sharded(tensor: Any) -> bool:
    """Whether a tensor is a ``DTensor``; nothing is imported for the question.

    Example:
        >>> is_sharded(torch.zeros(2))
        False
    """
    return type(tensor).__name__ == "DTensor"


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """The part of a tensor that lies on this process, in the same storage; a plain tensor is its own part.

    Example:
        >>> plain = torch.zeros(2)
        >>> local_of(plain) is plain
        True
    """
    part: torch.Tensor = tensor._local_tensor if is_sharded(tensor) else tensor  # type: ignore[attr-defined]
    return part


def joined_norm(tensors: Sequence[torch.Tensor], norm: torch.Tensor) -> torch.Tensor:
    """The Euclidean norm of whole tensors from that of the parts on each process; all of them call it together."""
    import torch.distributed as dist

    mesh: Any = tensors[0].device_mesh  # type: ignore[attr-defined]
    square = norm.square()
    dist.all_reduce(square, group=mesh.get_group())
    return square.sqrt()
