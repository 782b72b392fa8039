"""The precision in which gradients are accumulated, and the bits of a tensor."""

from collections.abc import Iterable
from operator import attrgetter
from typing import Any, Literal

import torch

from anybatch.accelerators import is_accelerator

LOW_PRECISION = (torch.bfloat16, torch.float16)
ACCUMULATED_AFTER = 8

AccumulatePolicy = Literal["auto", "fp32", "native"]

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# Numbers that are looked at in one go, each of which takes 16 bytes: together less than half of what the tensor takes.
_AT_ONCE, _SHARE, _FEW = 2**18, 16, 256


def needs_float32(parameters: Iterable[torch.Tensor], micro_batches: int, policy: AccumulatePolicy) -> bool:
    """Whether gradients are to be accumulated in float32.

    The sum of N bfloat16 gradients in bfloat16 has a relative error of about 2^-10 sqrt(N) if they are independent, and
    up to N 2^-11 if they agree; for up to 8 of them this is about one more rounding.

    Args:
        policy: ``"auto"`` for nine micro-batches or more, ``"fp32"`` for two or more, ``"native"`` never.
    """
    if policy == "native" or micro_batches < 2 or (policy == "auto" and micro_batches <= ACCUMULATED_AFTER):
        return False
    return not set(map(attrgetter("dtype"), parameters)).isdisjoint(LOW_PRECISION)


def infinities_found(scaler: Any, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """What ``GradScaler.unscale_`` found in the gradients of an optimizer."""
    return list(scaler._found_inf_per_device(optimizer).values())


def forget_unscaling(scaler: Any) -> None:
    """Resets a ``GradScaler``, perhaps only partly initialized, to before ``unscale_``, at the same scale."""
    if scaler._growth_tracker is None:
        scaler._scale = None
    else:
        scaler.update(scaler.get_scale())


class GradientSums:
    """Accumulates gradients beside ``.grad``: low-precision ones in float32, and sparse ones coalesced.

    Autograd concatenates sparse gradients, so that their sum would grow with the indices of all micro-batches.

    Args:
        parameters: their ``.grad`` is moved here after each micro-batch; dense gradients of full precision stay.
        in_float32: whether low-precision gradients are accumulated in float32, and rounded once at the end.

    Example:
        >>> table = torch.nn.Embedding(5, 1, sparse=True)
        >>> sums = GradientSums([table.weight], in_float32=False)
        >>> for row in (3, 1, 3):
        ...     table(torch.tensor([row])).sum().backward()
        ...     _ = sums.take_()
        >>> sums.give_()
        >>> table.weight.grad.indices(), table.weight.grad.values()
        (tensor([[1, 3]]), tensor([[1.],
                [2.]]))
    """

    def __init__(self, parameters: Iterable[torch.Tensor], *, in_float32: bool) -> None:
        self._parameters = self._open = list(parameters)
        self._in_float32 = in_float32
        self._sums: dict[int, torch.Tensor] = {}
        self.bytes = 0  # size of the dense buffers

    def take_(self) -> bool:
        """Moves gradients from the parameters to the sums; returns whether there are sums, or may be some later."""
        sums, gradients, left = [], [], []
        for parameter in self._open:
            gradient = parameter.grad
            is_low = self._in_float32 and parameter.dtype in LOW_PRECISION
            is_sparse = gradient is not None and gradient.layout is torch.sparse_coo
            if is_low or is_sparse or gradient is None:
                left.append(parameter)
            if gradient is None or not (is_low or is_sparse):
                continue
            parameter.grad = None
            known = self._sums.get(id(parameter))
            if known is None or is_sparse or known.layout is not torch.strided:
                self._add(parameter, gradient.float() if is_low else gradient)
            else:
                sums.append(known)
                gradients.append(gradient)
            del gradient  # frees it before the next one is converted
        if sums:
            torch._foreach_add_(sums, gradients)
        self._open = left
        return bool(left or self._sums)

    def _add(self, parameter: torch.Tensor, gradient: torch.Tensor) -> None:
        known = self._sums.pop(id(parameter), None)
        if known is not None:  # torch adds a sparse tensor to a dense one only with the dense one first
            gradient = known + gradient if gradient.layout is not torch.strided else gradient + known
        elif gradient.layout is torch.strided:
            self.bytes += gradient.nbytes
        self._sums[id(parameter)] = gradient.coalesce() if gradient.layout is torch.sparse_coo else gradient

    def absorb_(self, parameter: torch.Tensor, other: "GradientSums", copy: torch.Tensor, factor: float) -> None:
        """Moves the sum for a copy of a parameter, on any device, to this one."""
        found = other._sums.pop(id(copy), None)
        if found is not None:
            moved = found.to(parameter.device, non_blocking=is_accelerator(parameter.device))
            self._add(parameter, moved if factor == 1 else moved * factor)

    def give_(self, scale: float | None = None) -> None:
        """Moves the sums, times ``scale``, to ``.grad``, in the dtype of each parameter or its ``grad_dtype``."""
        for parameter in self._parameters:
            found = self._sums.pop(id(parameter), None)
            if found is not None:
                scaled = found if scale is None else found.mul_(scale)
                wanted = getattr(parameter, "grad_dtype", None) if parameter.is_leaf else None  # of newer torch
                parameter.grad = scaled.to(wanted or parameter.dtype)


def add_gradient_(parameter: torch.Tensor, gradient: torch.Tensor) -> None:
    """Adds to ``parameter.grad``, as autograd does."""
    before = parameter.grad
    if before is None:
        parameter.grad = gradient
    elif before.layout == gradient.layout or before.layout is torch.strided:
        before.add_(gradient)
    else:
        parameter.grad = gradient + before


def in_precision(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    """A tensor in another precision; ``dtype`` is that of the parts of a complex tensor, and integers stay."""
    if dtype is None or not (tensor.is_floating_point() or tensor.is_complex()):
        return tensor
    return tensor.to(dtype.to_complex() if tensor.is_complex() else dtype)


def sum_of_bits(tensor: torch.Tensor) -> torch.Tensor:
    """The bits of a dense tensor added up, each number with another odd weight, so that their order shows too."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    bits = tensor.contiguous().view(_INTEGERS[tensor.element_size()]).reshape(-1)
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    size = min(_AT_ONCE, max(_FEW, bits.numel() // _SHARE))
    for start in range(0, bits.numel(), size):
        part = bits[start : start + size]
        odd = torch.arange(2 * start + 1, 2 * (start + part.numel()), 2, device=bits.device)
        total += (part * odd).sum()  # integers wrap around, in whatever order they are added
    return total
