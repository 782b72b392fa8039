"""Sharded tensors: the ``DTensor``s of FSDP2 and tensor parallelism."""

from typing import Any

import torch


def is_sharded(tensor: Any) -> bool:
    """Whether a tensor is a ``DTensor``, without an import of ``torch.distributed``."""
    return type(tensor).__name__ == "DTensor"


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """The local shard of a ``DTensor``, in the same storage; a plain tensor itself."""
    part: torch.Tensor = tensor._local_tensor if is_sharded(tensor) else tensor  # type: ignore[attr-defined]
    return part
