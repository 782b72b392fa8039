"""Whether a loss is by its operations a sum of what each sample gives, so that no other outputs make it another one."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from anybatch.checking.standins import argument
from anybatch.tensors.dispatch import Mode

_ELEMENTWISE = {
    "abs", "bitwise_and", "bitwise_not", "bitwise_or", "binary_cross_entropy", "binary_cross_entropy_with_logits",
    "clamp", "clamp_max", "clamp_min", "eq", "exp", "expm1", "ge", "gelu", "gt", "hardtanh", "huber_loss", "isfinite",
    "le", "leaky_relu", "log", "log1p", "log_sigmoid_forward", "logical_and", "logical_not", "logical_or", "lt",
    "masked_fill", "maximum", "minimum", "mse_loss", "ne", "pow", "reciprocal", "relu", "rsqrt", "sigmoid", "silu",
    "smooth_l1_loss", "softplus", "sqrt", "tanh", "where", "xlogy",
}  # fmt: skip
_LINEAR = {"_to_copy", "add", "alias", "clone", "detach", "div", "lift_fresh", "mul", "neg", "rsub", "sub"}
_ALONG = {
    "_log_softmax", "_softmax", "all", "amax", "amin", "any", "argmax", "argmin", "gather", "linalg_vector_norm",
    "logsumexp", "max", "mean", "min", "select", "slice", "std", "sum", "var",
}  # fmt: skip
_VIEWS = {"_unsafe_view", "expand", "permute", "reshape", "squeeze", "t", "transpose", "unsqueeze", "view"}
_OF_LABELS = {"nll_loss_forward", "nll_loss2d_forward"}
_LEAVING = {"numpy", "tolist", "__array__", "__dlpack__", "data_ptr", "untyped_storage", "storage"}


class _Leaving(TorchFunctionMode):
    """Notes where numbers leave torch, so that what is done with them is not seen."""

    def __init__(self) -> None:
        super().__init__()
        self.is_met = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.is_met = self.is_met or getattr(func, "__name__", "") in _LEAVING
        return func(*args, **(kwargs or {}))


class RowWise(Mode):
    """Sees the operations of a loss whose samples lie in dimension 0."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.is_so = True
        self.labels: list[tuple[torch.Tensor, int]] = []  # of means over those that are not ignored, with that number

    @contextlib.contextmanager
    def seeing(self) -> Iterator[None]:
        """Sees what runs in the block."""
        with self, _Leaving() as leaving:
            yield
        self.is_so = self.is_so and not leaving.is_met

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Runs the operation."""
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        self.is_so = self.is_so and _keeps_rows_apart(func, args, kwargs, result)
        if func.overloadpacket.__name__ in _OF_LABELS and argument(func, args, kwargs, "reduction") == 1:
            self.labels.append((args[1], argument(func, args, kwargs, "ignore_index", -100)))
        return result


def _keeps_rows_apart(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> bool:
    name, given = func.overloadpacket.__name__.rstrip("_"), [one for one in args if isinstance(one, torch.Tensor)]
    if not given:
        return False
    first, dims = given[0], {one.dim() for one in given}
    if name in _LINEAR and (len(given) == 1 or (dims == {0} and name not in ("mul", "div"))):
        return True
    if name in _LINEAR or name in _ELEMENTWISE:  # what all samples give together is a number, and not of a sample
        return len(dims) == 1 and 0 not in dims and len({one.shape[0] for one in given}) == 1
    if name in _OF_LABELS or name == "multi_margin_loss":
        return True
    if name in _ALONG:
        along = argument(func, args, kwargs, "dim")
        if name in ("mean", "sum") and result.dim() == 0:
            return True
        along = [along] if isinstance(along, int) else along or [0]
        is_all = name == "slice" and result.shape == first.shape
        return is_all or (first.dim() > 1 and all(dim % first.dim() for dim in along))
    # The samples stay where they are: further apart than what each has.
    is_view = name in _VIEWS and first.dim() > 0 and result.dim() > 0
    return is_view and result.shape[0] >= first.shape[0] and result.stride(0) == max(result.stride())
