"""Float32 accumulation of low-precision gradients."""

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
        parameters: whose gradients are accumulated.
        micro_batches: how many gradients are added up.
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


class Float32Accumulator:
    """Adds up low-precision gradients in float32 buffers, which become the gradient at the end, rounded once.

    Args:
        parameters: whose ``.grad`` is taken over after each micro-batch; those of full precision are left alone.

    Attributes:
        bytes: what the buffers take.
    """

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        self._low = [parameter for parameter in parameters if parameter.dtype in LOW_PRECISION]
        self._sums: dict[int, torch.Tensor] = {}
        self.bytes = 0

    def take_(self) -> None:
        """Adds the gradients to the buffers and takes them off the parameters."""
        sums, gradients = [], []
        for parameter in self._low:
            gradient = parameter.grad
            if gradient is None:
                continue
            parameter.grad = None
            if id(parameter) in self._sums:
                sums.append(self._sums[id(parameter)])
                gradients.append(gradient)
            else:
                self._sums[id(parameter)] = buffer = gradient.float()
                self.bytes += buffer.numel() * buffer.element_size()
        if sums:
            torch._foreach_add_(sums, gradients)

    def absorb_(self, parameter: torch.Tensor, other: "Float32Accumulator", copy: torch.Tensor, factor: float) -> None:
        """Adds what was summed elsewhere for a copy of a parameter, and takes it off there."""
        buffer = other._sums.pop(id(copy), None)
        if buffer is None:
            return
        other.bytes -= buffer.nbytes
        moved = buffer.to(parameter.device, non_blocking=True)
        if id(parameter) in self._sums:
            self._sums[id(parameter)].add_(moved, alpha=factor)
        else:
            self._sums[id(parameter)] = moved if factor == 1 else moved * factor
            self.bytes += moved.nbytes

    def give_(self, scale: float | None = None) -> None:
        """Puts the sums on the parameters as their gradients, in the precision that these are to have."""
        for parameter in self._low:
            buffer = self._sums.pop(id(parameter), None)
            if buffer is not None:
                parameter.grad = (buffer if scale is None else buffer.mul_(scale)).to(_dtype_of_gradient(parameter))


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
