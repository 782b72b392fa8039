"""What operations do with lazy logits: most compute them, some only move or select rows."""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from anybatch.errors import AnyBatchError
from anybatch.memory.chunks import Task, chunked_cross_entropy
from anybatch.memory.lazylogits import LazyLogits, numbers
from anybatch.memory.replay import Autocast
from anybatch.tensors.graph import in_backward

Handler = Callable[..., Any]

_T = torch.Tensor
_ATTRIBUTES = ("shape", "dtype", "device", "ndim", "layout", "requires_grad", "is_leaf", "grad_fn", "itemsize",
               "nbytes", "is_cuda", "is_cpu", "is_meta", "is_mps", "is_xpu", "is_sparse", "is_quantized", "is_nested",
               "_version", "_base")  # fmt: skip
_METHODS = ("size", "dim", "ndimension", "numel", "nelement", "element_size", "is_floating_point", "is_complex",
            "__len__", "__hash__", "get_device")  # fmt: skip
METADATA = {
    *(getattr(_T, name).__get__ for name in _ATTRIBUTES if hasattr(_T, name)),
    *(getattr(_T, name) for name in _METHODS),
    torch.is_floating_point,
    torch.is_complex,
    torch.numel,
}
"""What is known without the numbers."""


def run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Runs an operation that has lazy logits among its arguments.

    Args:
        func: the operation.
        args: its arguments.
        kwargs: its keyword arguments.

    Returns:
        What it gives.
    """
    if func is torch.autograd.grad:
        _refuse_lost_gradient(args, kwargs)
    if func is F.cross_entropy:
        done = _cross_entropy(*args, **kwargs)
        if done is not None:
            return done
    move = _MOVES.get(func)
    if move is not None and _stays_lazy(args, kwargs):
        done = move(func, args, kwargs)
        if done is not None:
            return done
    if _writes(func, kwargs):
        for lazy in (arg for arg in args if isinstance(arg, LazyLogits)):
            lazy.product.fix_views()
    return func(*numbers(args), **numbers(kwargs))


def _refuse_lost_gradient(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    inputs = args[1] if len(args) > 1 else kwargs.get("inputs")
    for one in inputs if isinstance(inputs, (tuple, list)) else (inputs,):
        if isinstance(one, LazyLogits) and one.product.is_taken:
            raise AnyBatchError(
                "the gradient of logits was asked for after their loss had been computed in chunks, which never has "
                "the logits as a whole; expected that only parameters and inputs are asked for. Leave chunk_loss out"
            )


def _stays_lazy(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    if not isinstance(args[0] if args else None, LazyLogits):
        return False
    others = any(isinstance(other, LazyLogits) for other in (*args[1:], *kwargs.values()))
    lazy = args[0]
    # Without gradient what an operation makes is cut off from the graph, which rows alone would not say.
    return not others and not lazy.product.is_computed and torch.is_grad_enabled() >= lazy.product.with_gradient


def _writes(func: Any, kwargs: dict[str, Any]) -> bool:
    name = getattr(func, "__name__", "")
    is_in_place = name.endswith("_") and not name.endswith("__")
    return is_in_place or name.startswith("__i") or name in ("__setitem__", "__set__") or "out" in kwargs


def _cross_entropy(
    input: Any,
    target: Any,
    weight: Any = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> torch.Tensor | None:
    """The loss in chunks; ``None`` for a use of it that has to be computed in the ordinary way."""
    if not isinstance(input, LazyLogits) or isinstance(target, LazyLogits) or isinstance(weight, LazyLogits):
        return None
    product = input.product
    is_known = size_average is None and reduce is None and reduction in ("mean", "sum", "none")
    if not is_known or product.is_computed or input.class_dim != min(1, input.dim() - 1):
        return None
    if not isinstance(target, torch.Tensor) or target.dtype != torch.long or target.shape != input.lead:
        return None
    if target.device != input.device or (weight is not None and weight.requires_grad):
        return None
    product.check()
    task = Task(
        target=target, class_weights=weight, ignore_index=ignore_index, reduction=reduction,
        label_smoothing=label_smoothing, chunks=product.optimization.chunks, dtype=product.dtype, casts=input.casts,
        autocast=Autocast({"cpu", input.device.type}),
    )  # fmt: skip
    rows = input.rows.reshape(-1, input.rows.shape[-1])
    with torch.set_grad_enabled(torch.is_grad_enabled() and product.with_gradient):
        loss = chunked_cross_entropy(task, rows, product.weight, product.bias)
    product.is_taken = True
    product.optimization.taken += not in_backward()  # a block that is recomputed takes its loss again
    return loss


def _dim(lazy: LazyLogits, dim: int) -> int:
    return dim + lazy.dim() if dim < 0 else dim


def _reshape(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> LazyLogits | None:
    rest = args[1:]
    if kwargs and set(kwargs) != {"shape"}:
        return None
    shape = list(rest or [kwargs.get("shape")])
    if len(shape) == 1 and isinstance(shape[0], (tuple, list)):
        shape = list(shape[0])
    if not shape or not all(isinstance(size, int) for size in shape):
        return None
    return _to_shape(func, args, kwargs, list(shape), needs_dense=func is _T.view)


def _flatten(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> LazyLogits | None:
    lazy = args[0]
    start = _dim(lazy, args[1] if len(args) > 1 else kwargs.get("start_dim", 0))
    end = _dim(lazy, args[2] if len(args) > 2 else kwargs.get("end_dim", -1))
    if not 0 <= start <= end < lazy.dim():
        return None
    shape = list(lazy.shape)
    return _to_shape(func, args, kwargs, [*shape[:start], math.prod(shape[start : end + 1]), *shape[end + 1 :]])


def _to_shape(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], shape: list[int], *, needs_dense: bool = False
) -> LazyLogits | None:
    """Another shape with the classes last, which puts the rows in another shape."""
    lazy: LazyLogits = args[0]
    classes = lazy.product.weight.shape[0]
    if lazy.class_dim != lazy.dim() - 1 or (needs_dense and not lazy.is_dense):
        return None
    if shape.count(-1) == 1:
        known = math.prod(size for size in shape if size != -1)
        if known == 0:
            return None
        shape[shape.index(-1)] = lazy.numel() // known
    if shape[-1] != classes or math.prod(shape[:-1]) != math.prod(lazy.lead) or min(shape) < 0:
        return None
    rows = lazy.rows.reshape(*shape[:-1], lazy.rows.shape[-1])
    return lazy.derived(func, args, kwargs, rows=rows, class_dim=rows.dim() - 1, is_dense=True)


def _transpose(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> LazyLogits | None:
    lazy, *dims = args
    if kwargs or len(dims) != 2:
        return None
    order = list(range(lazy.dim()))
    one, other = (_dim(lazy, dim) for dim in dims)
    order[one], order[other] = order[other], order[one]
    return _in_order(func, args, kwargs, order)


def _permute(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> LazyLogits | None:
    lazy, *dims = args
    if len(dims) == 1 and isinstance(dims[0], (tuple, list)):
        dims = list(dims[0])
    if kwargs:
        return None
    return _in_order(func, args, kwargs, [_dim(lazy, dim) for dim in dims])


def _movedim(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> LazyLogits | None:
    if kwargs or len(args) != 3 or not all(isinstance(dim, int) for dim in args[1:]):
        return None
    source, target = (_dim(args[0], dim) for dim in args[1:])
    order = [dim for dim in range(args[0].dim()) if dim != source]
    order.insert(target, source)
    return _in_order(func, args, kwargs, order)


def _in_order(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], order: list[int]) -> LazyLogits | None:
    lazy: LazyLogits = args[0]
    if sorted(order) != list(range(lazy.dim())):
        return None
    at = lazy.class_dim
    of_rows = [dim - (dim > at) for dim in order if dim != at]
    rows = lazy.rows.permute(*of_rows, lazy.rows.dim() - 1)
    is_dense = lazy.is_dense and order == list(range(lazy.dim()))
    return lazy.derived(func, args, kwargs, rows=rows, class_dim=order.index(at), is_dense=is_dense)


def _item(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> LazyLogits | None:
    lazy: LazyLogits = args[0]
    index: Any = args[1]
    index = index if isinstance(index, tuple) else (index,)
    if lazy.class_dim != lazy.dim() - 1 or not _selects_rows(index, lazy.dim()):
        return None
    # A tensor of positions may change before the numbers are asked for.
    kept = tuple(entry.clone() if isinstance(entry, torch.Tensor) else entry for entry in index)
    is_dense = len(index) == 1 and isinstance(index[0], torch.Tensor)
    rows = lazy.rows[index]
    return lazy.derived(func, (lazy, kept), kwargs, rows=rows, class_dim=rows.dim() - 1, is_dense=is_dense)


def _selects_rows(index: tuple[Any, ...], dims: int) -> bool:
    """Whether an index leaves the last dimension whole, and last."""
    taken = [_dims_taken(entry) for entry in index]
    if any(count is None for count in taken) or sum(entry is Ellipsis for entry in index) > 1:
        return False
    total = sum(count for count in taken if count is not None)
    if Ellipsis in [entry if entry is Ellipsis else None for entry in index]:
        at = next(i for i, entry in enumerate(index) if entry is Ellipsis)
        reaches_last = at < len(index) - 1
    else:
        reaches_last = total >= dims
    if total > dims:
        return False
    if not reaches_last:
        return total < dims
    last = index[-1]
    return isinstance(last, slice) and last == slice(None)


def _dims_taken(entry: Any) -> int | None:
    if entry is None or entry is Ellipsis:
        return 0
    if isinstance(entry, torch.Tensor):
        return entry.dim() if entry.dtype in (torch.bool, torch.uint8) else 1
    if isinstance(entry, bool) or not isinstance(entry, (int, slice)):
        return None
    return 1


def _contiguous(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> LazyLogits | None:
    lazy: LazyLogits = args[0]
    if len(args) > 1 or kwargs:
        return None
    return lazy if lazy.is_dense else lazy.derived(func, args, kwargs, is_dense=True)


def _cast(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> LazyLogits | None:
    lazy: LazyLogits = args[0]
    dtype = _PRECISIONS.get(func)
    if dtype is None:
        given = [*args[1:], *kwargs.values()]
        if len(given) != 1 or set(kwargs) - {"dtype"} or not isinstance(given[0], torch.dtype):
            return None
        dtype = given[0]
    elif len(args) > 1 or kwargs:
        return None
    if not dtype.is_floating_point:
        return None
    return lazy if dtype == lazy.dtype else lazy.derived(func, args, kwargs, cast=dtype, is_dense=lazy.is_dense)


_PRECISIONS = {_T.float: torch.float32, _T.double: torch.float64, _T.half: torch.float16, _T.bfloat16: torch.bfloat16}
_MOVES: dict[Any, Handler] = {
    _T.view: _reshape,
    _T.reshape: _reshape,
    torch.reshape: _reshape,
    _T.flatten: _flatten,
    torch.flatten: _flatten,
    _T.transpose: _transpose,
    torch.transpose: _transpose,
    _T.swapaxes: _transpose,
    _T.permute: _permute,
    torch.permute: _permute,
    _T.movedim: _movedim,
    torch.movedim: _movedim,
    _T.__getitem__: _item,
    _T.contiguous: _contiguous,
    _T.to: _cast,
    _T.type: _cast,
    **dict.fromkeys(_PRECISIONS, _cast),
}
