"""Notices writes into tensors that were there before, and takes them back."""

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from anybatch.tensors.dispatch import NUMBERLESS, Mode, tensors_in, written_by


class Overwritten(Mode):
    """Keeps what tensors held that are written to within its block and were there before it.

    It sees writes in place, also those through ``.data``, a view or ``torch.no_grad``, before they happen, and copies
    what is written to once. Another tensor that is put in the place of ``.data`` is no write.

    Args:
        except_for: tensors that someone else puts back.
        run: runs an operation in the place of torch, as ``__torch_dispatch__`` of another mode would.

    Example:
        >>> weight, made = torch.ones(2), None
        >>> with Overwritten() as overwritten:
        ...     _ = weight.mul_(0.9), torch.zeros(2).add_(1)
        >>> overwritten.restore()
        >>> weight, overwritten.bytes
        (tensor([1., 1.]), 8)
    """

    def __init__(self, except_for: Iterable[torch.Tensor] = (), run: Callable[..., Any] | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._run = run
        self.bytes = 0  # of the copies
        self._made = {key for tensor in except_for if (key := memory_of(tensor)) is not None}
        self._kept: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Runs an operation; copies first what it is about to write to."""
        kwargs = kwargs or {}
        for tensor in written_by(func, args, kwargs):
            self._keep(tensor)
        result = func(*args, **kwargs) if self._run is None else self._run(func, types, args, kwargs)
        if _makes(func):  # a view of what was there before is no tensor of this block
            self._made.update(key for one in tensors_in([result]) if (key := memory_of(one)) is not None)
        return result

    def _keep(self, tensor: torch.Tensor) -> None:
        key = memory_of(tensor)
        if key is None or key in self._made or key in self._kept:
            return
        whole = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
        self._kept[key] = whole, whole.clone()
        self.bytes += whole.nbytes

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor was written to."""
        return memory_of(tensor) in self._kept

    def restore(self) -> None:
        """Puts back what was written to, bitwise, and lets go of it; memory that was resized since is left alone."""
        for whole, before in self._kept.values():
            if whole.untyped_storage().nbytes() == before.nbytes:
                whole.copy_(before)
        self._kept.clear()


_ALIASES = ("_unsafe_view.default", "lift.default")  # give what they are given, which their schemas do not say


@functools.cache
def _makes(func: Any) -> bool:
    """Whether what an operation gives is new."""
    returns = func._schema.returns
    return bool(returns) and all(one.alias_info is None for one in returns) and func.__name__ not in _ALIASES


def memory_of(tensor: torch.Tensor) -> int | None:
    """What the memory of a tensor is known by; ``None`` for one without numbers, or with several memories."""
    if tensor.layout is not torch.strided or tensor.is_meta or type(tensor).__name__ in NUMBERLESS or tensor.is_nested:
        return None
    return int(tensor.untyped_storage()._cdata)
