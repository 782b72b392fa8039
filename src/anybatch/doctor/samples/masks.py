"""Which positions the padding mask of an attention hides: the padding, or what it should attend to."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from anybatch.doctor.values import tensors_in

_LEAST = 2  # positions of padding at the end of a sequence


class PaddingLook:
    """Compares the padding mask of the first attention of a forward with the padding of what the model is given."""

    def __init__(self) -> None:
        self._given: list[torch.Tensor] = []
        self.result: tuple[float, float] | None = None
        """The share of the positions with content that are hidden, and that of the padding."""

    @contextmanager
    def attached(self, root: torch.nn.Module) -> Iterator[None]:
        """Looks at one forward."""
        self.result = None
        attention = next((one for one in root.modules() if isinstance(one, torch.nn.MultiheadAttention)), None)
        handles = []
        if attention is not None:
            handles.append(root.register_forward_pre_hook(self._at_root, with_kwargs=True))
            if attention is not root:
                handles.append(attention.register_forward_pre_hook(self._at_attention, with_kwargs=True))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            self._given = []

    def _at_root(self, module: torch.nn.Module, args: Any, kwargs: Any) -> None:
        self._given = [one for one in tensors_in((args, kwargs)) if one.dim() in (2, 3)]
        if isinstance(module, torch.nn.MultiheadAttention):
            self._at_attention(module, args, kwargs)

    def _at_attention(self, module: torch.nn.Module, args: Any, kwargs: Any) -> None:
        mask = kwargs.get("key_padding_mask", args[3] if len(args) > 3 else None)
        if self.result is not None or type(mask) is not torch.Tensor or mask.dim() != 2:
            return
        try:
            with torch.no_grad():
                self.result = _shares(mask, self._given)
        except Exception:  # noqa: BLE001 - of a transform, say, or on different devices; the user's run goes on
            return


def _shares(mask: torch.Tensor, given: list[torch.Tensor]) -> tuple[float, float] | None:
    hidden = mask if mask.dtype is torch.bool else mask.isneginf()
    for tensor in given:
        if tensor.shape[:2] != mask.shape or tensor.dtype is torch.bool or tensor is mask:
            continue
        padding = _padding(tensor)
        if padding is not None and bool(padding.any()) and not bool(padding.all()):
            content, rest = hidden[~padding].double().mean(), hidden[padding].double().mean()
            return float(content), float(rest)
    return None


def _padding(tensor: torch.Tensor) -> torch.Tensor | None:
    """The end of each sequence that holds nothing but one token, or zeros; ``None`` where few sequences have one."""
    if tensor.dim() == 3:
        same = (tensor == 0).all(-1)
    elif tensor.is_floating_point() or tensor.is_complex() or bool((tensor <= 1).all()):  # no tokens, or a mask itself
        return None
    else:
        ends = tensor[:, -1][tensor[:, -1] == tensor[:, -2]] if tensor.shape[1] > 1 else tensor[:0, 0]
        if not ends.numel():
            return None
        same = tensor == ends.mode().values
    padding = same.flip(1).cumprod(1).flip(1).bool()
    return padding if bool((padding.sum(1) >= _LEAST).any()) else None
