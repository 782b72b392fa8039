"""A model for plans over ranks, and what a rank really holds in a step."""

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

WIDTH, BLOCKS, ROWS = 129, 4, 64  # a width that no number of ranks divides


class Deep(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = torch.nn.Linear(16, WIDTH)
        self.blocks = torch.nn.ModuleList(
            torch.nn.Sequential(torch.nn.Linear(WIDTH, 4 * WIDTH), torch.nn.Tanh(), torch.nn.Linear(4 * WIDTH, WIDTH))
            for _ in range(BLOCKS)
        )
        self.head = torch.nn.Linear(WIDTH, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = x + block(x)
        found: torch.Tensor = self.head(x)
        return found


def loss_fn(model: Any, x: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(x).square().mean()
    return loss


def local(tensor: Any) -> torch.Tensor:
    """What lies here."""
    found: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    return found


class Peak(TorchDispatchMode):
    """The bytes of all storages that are alive, which FSDP2 resizes, after each operation.

    Args:
        tensors: that are alive already.
    """

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._refs: dict[int, Any] = {}
        self.bytes = 0
        for tensor in tensors:
            self._see(local(tensor))

    def _see(self, tensor: torch.Tensor) -> None:
        from torch.multiprocessing.reductions import StorageWeakRef

        storage = tensor.untyped_storage()
        self._refs.setdefault(storage._cdata, StorageWeakRef(storage))

    def _count(self) -> int:
        total = 0
        for key, ref in list(self._refs.items()):
            storage = torch.UntypedStorage._new_with_weak_ptr(ref.cdata)
            if storage is None:
                del self._refs[key]
            else:
                total += storage.nbytes()
        return total

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(type(leaf).__name__ == "DTensor" for leaf in tree_leaves((args, kwargs))):
            return NotImplemented
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves((args, kwargs, out)):
            if isinstance(leaf, torch.Tensor):
                self._see(leaf)
        self.bytes = max(self.bytes, self._count())
        return out
