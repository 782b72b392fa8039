"""What gradients are added up in, and in which precision."""

from collections.abc import Iterable
from typing import Any, Literal

import torch

LOW_PRECISION = (torch.bfloat16, torch.float16)
ACCUMULATED_AFTER = 8

AccumulatePolicy = Literal["auto", "fp32", "native"]


def needs_float32(parameters: Iterable[torch.Tensor], micro_batches: int, policy: AccumulatePolicy) -> bool:
    """Whether gradients are to be accumulated in float32.

    A sum of N bfloat16 gradients in bfloat16 is off by about 2^-10 sqrt(N) where they are noise and up to N 2^-11 where
    they agree; up to 8 addends cost about one more rounding.

    Args:
        policy: ``"auto"`` from the ninth micro-batch on, ``"fp32"`` always, ``"native"`` never.

    Returns:
        True if a parameter is of low precision and the policy asks for it.

    Example:
        >>> weight = torch.nn.Parameter(torch.zeros(1, dtype=torch.bfloat16))
        >>> needs_float32([weight], 8, "auto"), needs_float32([weight], 9, "auto")
        (False, True)
    """
    if policy == "native" or micro_batches < 2 or (policy == "auto" and micro_batches <= ACCUMULATED_AFTER):
        return False
    return not {parameter.dtype for parameter in parameters}.isdisjoint(LOW_PRECISION)


def infinities_found(scaler: Any, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """What ``GradScaler.unscale_`` found in the gradients of an optimizer.

    Returns:
        For each device with gradients a tensor without dimensions, 1.0 if one is infinite or NaN there.
    """
    return list(scaler._found_inf_per_device(optimizer).values())


def forget_unscaling(scaler: Any) -> None:
    """Lets a ``GradScaler`` begin an update anew, at the same scale.

    Args:
        scaler: may have unscaled gradients, or have been made ready only in part.
    """
    if scaler._growth_tracker is None:
        scaler._scale = None
    else:
        scaler.update(scaler.get_scale())


class GradientSums:
    """What gradients are added up in beside ``.grad``: float32 for low precision, each row once for sparse ones.

    Autograd would append each sparse gradient to the one before, so that the sum grows with the indices of all
    micro-batches however small the table is.

    Args:
        parameters: whose ``.grad`` is taken over after each micro-batch; dense ones of full precision are left alone.
        in_float32: whether what is of low precision is added up in float32, and rounded once at the end.

    Attributes:
        bytes: what the float32 buffers take.

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
        self.bytes = 0

    def take_(self) -> bool:
        """Takes the gradients off the parameters, as far as they are added up here; says if any may be from now on."""
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
            del gradient  # before the next one is added
        if sums:
            torch._foreach_add_(sums, gradients)
        self._open = left
        return bool(left or self._sums)

    def _add(self, parameter: torch.Tensor, gradient: torch.Tensor) -> None:
        known = self._sums.pop(id(parameter), None)
        if known is not None:  # of a dense and a sparse one the dense one has to come first
            gradient = known + gradient if gradient.layout is not torch.strided else gradient + known
        elif gradient.layout is torch.strided:
            self.bytes += gradient.nbytes
        self._sums[id(parameter)] = gradient.coalesce() if gradient.layout is torch.sparse_coo else gradient

    def absorb_(self, parameter: torch.Tensor, other: "GradientSums", copy: torch.Tensor, factor: float) -> None:
        """Adds what was summed elsewhere for a copy of a parameter, on any device, and takes it off there."""
        found = other._sums.pop(id(copy), None)
        if found is not None:
            moved = found.to(parameter.device, non_blocking=True)
            self._add(parameter, moved if factor == 1 else moved * factor)

    def give_(self, scale: float | None = None) -> None:
        """Puts the sums, multiplied by the scale, on the parameters as gradients in the precision of these."""
        for parameter in self._parameters:
            found = self._sums.pop(id(parameter), None)
            if found is not None:
                scaled = found if scale is None else found.mul_(scale)
                parameter.grad = scaled.to(_dtype_of_gradient(parameter))


def _dtype_of_gradient(parameter: torch.Tensor) -> torch.dtype:
    """The parameter's own, unless its ``grad_dtype`` says otherwise, which newer versions of torch have."""
    wanted: torch.dtype | None = getattr(parameter, "grad_dtype", None) if parameter.is_leaf else None
    return wanted or parameter.dtype


def add_gradient_(parameter: torch.Tensor, gradient: torch.Tensor) -> None:
    """Adds to the gradient of a parameter, as autograd does.

    Example:
        >>> weight = torch.nn.Parameter(torch.zeros(2))
        >>> add_gradient_(weight, torch.ones(2))
        >>> add_gradient_(weight, torch.ones(2))
        >>> weight.grad
        tensor([2., 2.])
    """
    before = parameter.grad
    if before is None:
        parameter.grad = gradient
    elif before.layout == gradient.layout or before.layout is torch.strided:
        before.add_(gradient)
    else:
        parameter.grad = gradient + before


def in_precision(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    """A tensor in another precision; complex numbers have parts of it, and integers stay.

    Example:
        >>> in_precision(torch.ones(1, dtype=torch.complex64), torch.float64).dtype
        torch.complex128
    """
    if dtype is None or not (tensor.is_floating_point() or tensor.is_complex()):
        return tensor
    return tensor.to(dtype.to_complex() if tensor.is_complex() else dtype)
