"""Sparse fake tensors that keep their entries, which those of torch lose when they are copied or added."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from anybatch.tensors.dispatch import TorchDispatchMode

_CLONE = torch.ops.aten.clone.default
_ADD = torch.ops.aten.add.Tensor
_ADD_ = torch.ops.aten.add_.Tensor


class SparseOnFakes(TorchDispatchMode):
    """Runs what autograd does with sparse gradients on fake tensors, within a mode that makes these.

    Example:
        >>> from torch._subclasses import FakeTensorMode
        >>> with FakeTensorMode(), SparseOnFakes():
        ...     rows, values = torch.zeros(1, 3).long(), torch.ones(3, 2)
        ...     gradient = torch.sparse_coo_tensor(rows, values, (9, 2), check_invariants=False)
        ...     (gradient.clone() + gradient)._values().shape
        torch.Size([6, 2])
    """

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Runs the operation.

        Raises:
            NotImplementedError: it loses entries, so that what comes after it can't be followed.
        """
        sparse = [one for one in args if isinstance(one, torch.Tensor) and one.layout is torch.sparse_coo]
        if not sparse or not _entries(sparse):
            return func(*args, **(kwargs or {}))
        if func is _CLONE:
            return _like(args[0], args[0]._indices().clone(), args[0]._values().clone())
        if func in (_ADD, _ADD_) and len(sparse) == 2 and not kwargs:
            indices = torch.cat([one._indices() for one in sparse], 1)
            added = _like(args[0], indices, torch.cat([one._values() for one in sparse]))
            if func is _ADD:
                return added
            args[0].data = added
            return args[0]
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.layout is torch.sparse_coo and _lost(func, result, sparse):
            raise NotImplementedError(f"{func} on sparse tensors without numbers")
        return result


def _entries(tensors: Sequence[torch.Tensor]) -> int:
    return sum(len(one._values()) for one in tensors)


def _lost(func: Any, result: torch.Tensor, sparse: Sequence[torch.Tensor]) -> bool:
    is_mutable = func._schema.is_mutable and len(sparse) > 1
    return is_mutable or _entries([result]) < max(len(one._values()) for one in sparse)


def _like(tensor: torch.Tensor, indices: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    return torch.sparse_coo_tensor(indices, values, tensor.shape, check_invariants=False)
