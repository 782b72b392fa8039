"""The loss of a large output layer in chunks of rows, so that all logits never exist at once.

The layer gives lazy logits, which are computed only when their elements are needed. Operations that only move or select
rows, or change the precision, stay lazy, and ``F.cross_entropy`` of what they give is computed in chunks. Any other
operation computes the ordinary logits first.
"""

import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from anybatch.batch.trees import map_leaves
from anybatch.errors import AnyBatchError, BatchError
from anybatch.memory.checkpointing import Autocast
from anybatch.memory.chunks import CrossEntropy, refuse_second_derivative
from anybatch.memory.offloading import is_plain
from anybatch.memory.places import Handle, Layered, places_of
from anybatch.tensors.dispatch import unseen
from anybatch.tensors.graph import in_backward, is_transformed


def chunk_loss(model: torch.nn.Module, head: str, chunks: int) -> "Applied":
    """Computes the cross-entropy of an output layer for a chunk of rows at a time, with unchanged user code.

    While this is on, the layer's result is computed only when somebody looks at its numbers. Where it goes into
    ``F.cross_entropy`` with classes as the target, through nothing but changes of shape, order and precision and
    selections of rows, the logits of one chunk are there at a time, and their gradient is computed with them. Every
    other use gets the ordinary logits. Gradients of low precision are added up in float32.

    Returns:
        A handle that removes the optimization and counts its uses.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 1000))
        >>> with chunk_loss(model, "1", 8) as handle:
        ...     loss = torch.nn.functional.cross_entropy(model(torch.ones(32, 4)), torch.zeros(32, dtype=torch.long))
        ...     loss.backward()
        >>> handle.taken, model[1].weight.grad.shape
        (1, torch.Size([1000, 3]))
    """
    if isinstance(chunks, bool) or not isinstance(chunks, int) or chunks < 1:
        raise BatchError(f"the loss is to be computed in {chunks!r} chunks; expected a whole number from 1 on")
    (place,) = places_of(model, [head])
    linear = place.module
    if place.span is not None or not is_linear(linear):
        raise BatchError(
            f"the head {head!r} is a {type(linear).__name__}; expected a torch.nn.Linear with its own forward, whose "
            "result goes into the cross-entropy"
        )
    layer = _Head(linear, chunks)
    applied = Applied([place.put_on(layer)])
    applied.head = layer
    return applied


def is_linear(module: torch.nn.Module) -> bool:
    """Whether a module computes ``F.linear`` and nothing else."""
    own = module.forward
    while isinstance(own, Layered):
        own = own.__wrapped__
    if getattr(own, "__func__", None) is not torch.nn.Linear.forward:
        return False
    return isinstance(module, torch.nn.Linear) and type(module).forward is torch.nn.Linear.forward


class Applied(Handle):
    """Takes memory optimizations off, and knows the uses of a loss in chunks, if there is one among them."""

    head: "_Head | None" = None

    @property
    def taken(self) -> int:
        """How many calls of the cross-entropy were computed in chunks."""
        return 0 if self.head is None else self.head.taken

    @property
    def computed(self) -> int:
        """How many times all logits were computed after all, since something else looked at them."""
        return 0 if self.head is None else self.head.computed


class _Head:
    """The layer around the head; it lies in the module, so that it has to pickle with it."""

    def __init__(self, linear: Any, chunks: int) -> None:
        self.chunks, self._linear = chunks, linear
        self.taken = self.computed = 0

    def __call__(self, inner: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        hidden: Any = args[0] if args else kwargs.get("input")
        weight, bias = self._linear.weight, self._linear.bias
        if isinstance(hidden, LazyLogits):
            hidden = hidden.materialised()
        dtype = _dtype(hidden, weight, bias)
        if dtype is None or hidden.shape[-1] != weight.shape[-1]:
            return inner(*args, **kwargs)
        return LazyLogits.of(Product(hidden, weight, bias, dtype, self))


def _dtype(hidden: Any, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.dtype | None:
    """In which dtype the layer computes; ``None`` for what is left to the layer itself."""
    tensors = [hidden, weight] if bias is None else [hidden, weight, bias]
    if torch.compiler.is_compiling() or torch.is_inference_mode_enabled() or is_transformed():
        return None
    if not all(isinstance(t, torch.Tensor) and t.is_floating_point() and is_plain(t) for t in tensors):
        return None
    dtypes = {t.dtype for t in tensors}
    kind = hidden.device.type
    if torch.is_autocast_enabled(kind) and torch.float64 not in dtypes:
        return torch.get_autocast_dtype(kind)
    return hidden.dtype if len(dtypes) == 1 and hidden.dim() > 0 else None


_T = torch.Tensor
_ATTRIBUTES = ("shape", "dtype", "device", "ndim", "layout", "requires_grad", "is_leaf", "grad_fn", "itemsize",
               "nbytes", "is_cuda", "is_cpu", "is_meta", "is_mps", "is_xpu", "is_sparse", "is_quantized", "is_nested",
               "_version", "_base")  # fmt: skip
_METHODS = ("size", "dim", "ndimension", "numel", "nelement", "element_size", "is_floating_point", "is_complex",
            "__len__", "__hash__", "get_device")  # fmt: skip
_METADATA = {
    *(getattr(_T, name).__get__ for name in _ATTRIBUTES if hasattr(_T, name)),
    *(getattr(_T, name) for name in _METHODS),
    torch.is_floating_point,
    torch.is_complex,
    torch.numel,
}
"""What is known without the numbers."""


class Product:
    """The arguments of a linear layer, hidden ``[..., features]`` and weight ``[classes, features]``."""

    def __init__(
        self, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype,
        head: "_Head",
    ) -> None:  # fmt: skip
        self.hidden, self.weight, self.bias, self.dtype = hidden, weight, bias, dtype
        self.autocast = Autocast({"cpu", hidden.device.type})
        self.with_gradient = torch.is_grad_enabled() and any(
            t is not None and t.requires_grad for t in (hidden, weight, bias)
        )
        self._versions = self._now()
        self.head = head
        self.is_taken = False
        self._result: torch.Tensor | None = None
        self.views: list[weakref.ref[LazyLogits]] = []

    def _now(self) -> list[int]:
        return [t._version for t in (self.hidden, self.weight, self.bias) if t is not None]

    @property
    def is_computed(self) -> bool:
        """Whether the result was computed."""
        return self._result is not None

    def check(self) -> None:
        """Refuses what would be another result than at the time of the call."""
        if self._now() != self._versions:
            raise AnyBatchError(
                "the logits of a head with chunk_loss were used for the first time after the head's weight or "
                "input had changed, so they can't be computed with the old values; expected them to be used "
                "before. Use them before the update, or leave chunk_loss out"
            )

    def result(self) -> torch.Tensor:
        """The result, as the layer itself would have given it; computed once."""
        if self._result is None:
            self.check()
            with torch.set_grad_enabled(self.with_gradient), self.autocast.again():
                self._result = F.linear(self.hidden, self.weight, self.bias)
            self.head.computed += 1
        return self._result


class LazyLogits(torch.Tensor):
    """A stand-in for the result of a linear layer, perhaps in another shape, order or precision."""

    product: Product  # what the layer was called with
    rows: torch.Tensor  # the layer's input, moved and selected like the result; the features are last
    twin: torch.Tensor  # a tensor on ``meta`` with the shape, the strides and the precision
    class_dim: int  # where the classes lie among the dimensions
    casts: tuple[torch.dtype, ...]  # the precisions that it went through
    _made_by: tuple[Any, ...] | None
    _real: torch.Tensor | None

    @staticmethod
    def of(product: Product) -> "LazyLogits":
        """The result itself."""
        shape = (*product.hidden.shape[:-1], len(product.weight))
        twin = _unseen(torch.empty, shape, dtype=product.dtype, device="meta")
        return _made(product, product.hidden, twin, len(shape) - 1, (), None)

    def materialised(self) -> torch.Tensor:
        """The numbers, computed by the operations that led here."""
        if self._real is None:
            if self._made_by is None:
                self._real = self.product.result()
            else:
                parent, func, args, kwargs, with_gradient = self._made_by
                real = parent.materialised()
                with torch.set_grad_enabled(with_gradient):
                    self._real = func(real, *args, **kwargs)
                self._made_by = None
        return self._real

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Decides for every operation whether it needs the numbers."""
        if func in _METADATA:
            return super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]
        return _run(func, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Computes the numbers for what did not come through Python, such as a tensor saved for the backward."""
        args, kwargs = _numbers([args, kwargs or {}], lambda lazy: lazy.materialised().detach())
        return func(*args, **kwargs)


@unseen
def _unseen(function: Any, *args: Any, **kwargs: Any) -> Any:
    """Calls a function of a twin, without memory accounting."""
    return function(*args, **kwargs)


def _numbers(node: Any, of: Callable[[LazyLogits], torch.Tensor] = LazyLogits.materialised) -> Any:
    """The same containers with real tensors in them."""
    return map_leaves(lambda leaf: of(leaf) if isinstance(leaf, LazyLogits) else leaf, node)


def _made(
    product: Product, rows: torch.Tensor, twin: torch.Tensor, class_dim: int, casts: tuple[torch.dtype, ...],
    made_by: tuple[Any, ...] | None,
) -> LazyLogits:  # fmt: skip
    def make() -> LazyLogits:
        lazy: LazyLogits = torch.Tensor._make_wrapper_subclass(
            LazyLogits, twin.shape, twin.stride(), dtype=twin.dtype, device=rows.device
        )
        lazy.product, lazy.rows, lazy.twin, lazy.class_dim = product, rows, twin, class_dim
        lazy.casts, lazy._made_by, lazy._real = casts, made_by, None
        return lazy

    lazy = make()
    if product.with_gradient and torch.is_grad_enabled():
        lazy = _StandIn.apply(make, class_dim, casts, product, rows, product.weight, product.bias)  # type: ignore[no-untyped-call]
    product.views.append(weakref.ref(lazy))
    return lazy


class _StandIn(torch.autograd.Function):
    """The place of lazy logits in the graph, for operations that never ask Python for the numbers."""

    @staticmethod
    def forward(ctx: Any, make: Callable[[], LazyLogits], *rest: Any) -> LazyLogits:
        ctx.rest = rest
        return make()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        refuse_second_derivative()
        class_dim, casts, product, *inputs = ctx.rest
        product.check()
        leaves: list[Any] = [None if t is None else t.detach().requires_grad_(t.requires_grad) for t in inputs]
        with torch.enable_grad(), product.autocast.again():
            logits = F.linear(*leaves).movedim(-1, class_dim)
            for dtype in casts:
                logits = logits.to(dtype)
        wanted = [leaf for leaf in leaves if leaf is not None and leaf.requires_grad]
        found = dict(zip(map(id, wanted), torch.autograd.grad(logits, wanted, gradient), strict=True))
        return None, None, None, None, *(found.get(id(leaf)) for leaf in leaves)


def _run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Runs an operation that has lazy logits among its arguments."""
    if func is torch.autograd.grad:
        _refuse_lost_gradient(args, kwargs)
    done = _cross_entropy(*args, **kwargs) if func is F.cross_entropy else _moved(func, args, kwargs)
    if done is not None:
        return done
    name = getattr(func, "__name__", "")
    is_in_place = name.startswith("__i") or (name.endswith("_") and not name.endswith("__"))
    if is_in_place or name in ("__setitem__", "__set__") or "out" in kwargs:
        for lazy in (arg for arg in args if isinstance(arg, LazyLogits)):
            for view in [found for ref in lazy.product.views if (found := ref()) is not None]:
                view.materialised()  # what was made from the result, before that is written to
    return func(*_numbers(args), **_numbers(kwargs))


def _refuse_lost_gradient(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    inputs = args[1] if len(args) > 1 else kwargs.get("inputs")
    for one in inputs if isinstance(inputs, (tuple, list)) else (inputs,):
        if isinstance(one, LazyLogits) and one.product.is_taken:
            raise AnyBatchError(
                "the gradient of logits was asked for after their loss had been computed in chunks, which never "
                "materialises the logits; expected gradients of parameters and inputs only. Leave chunk_loss out"
            )


def _cross_entropy(
    input: Any, target: Any, weight: Any = None, size_average: Any = None, ignore_index: int = -100, reduce: Any = None,
    reduction: str = "mean", label_smoothing: float = 0.0,
) -> torch.Tensor | None:  # fmt: skip
    """The loss in chunks; ``None`` if these arguments need the ordinary computation."""
    if not isinstance(input, LazyLogits) or isinstance(target, LazyLogits) or isinstance(weight, LazyLogits):
        return None
    product = input.product
    is_known = size_average is None and reduce is None and reduction in ("mean", "sum", "none")
    if not is_known or product.is_computed or input.class_dim != min(1, input.dim() - 1):
        return None
    if not isinstance(target, torch.Tensor) or target.dtype != torch.long or target.shape != input.rows.shape[:-1]:
        return None
    if target.device != input.device or (weight is not None and weight.requires_grad):
        return None
    product.check()
    chunked = CrossEntropy(
        target=target, class_weights=weight, ignore_index=ignore_index, reduction=reduction,
        label_smoothing=label_smoothing, chunks=product.head.chunks, dtype=product.dtype, casts=input.casts,
        autocast=Autocast({"cpu", input.device.type}),
    )  # fmt: skip
    rows = input.rows.reshape(-1, input.rows.shape[-1])
    with torch.set_grad_enabled(torch.is_grad_enabled() and product.with_gradient):
        loss = chunked(rows, product.weight, product.bias)
    product.is_taken = True
    product.head.taken += not in_backward()  # a block that is recomputed takes its loss again
    return loss


_Made = tuple[torch.Tensor, torch.Tensor, int, tuple[torch.dtype, ...]]
"""Rows, twin, where the classes lie, and the precisions."""


def _moved(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> LazyLogits | None:
    """What an operation makes of lazy logits, as far as that is known without the numbers; else ``None``.

    Shape and strides are what torch makes of the twin; it also refuses what can't be done.
    """
    lazy: Any = args[0] if args else None
    move = _MOVES.get(func)
    if move is None or not isinstance(lazy, LazyLogits) or lazy.product.is_computed:
        return None
    if any(isinstance(one, LazyLogits) for one in (*args[1:], *kwargs.values())):
        return None
    if torch.is_grad_enabled() < lazy.product.with_gradient:  # the result is cut off from the graph, unlike the rows
        return None
    # A tensor of positions may change before the numbers are asked for.
    rest = map_leaves(lambda leaf: leaf.clone() if isinstance(leaf, torch.Tensor) else leaf, args[1:])
    made = move(lazy, func, rest, kwargs)
    if made is None:
        return None
    if made[0] is lazy.rows and made[1].dtype == lazy.dtype and made[1].stride() == lazy.twin.stride():
        return lazy  # nothing has changed, and torch gives the tensor itself
    return _made(lazy.product, *made, (lazy, func, rest, kwargs, torch.is_grad_enabled()))


def _turned(lazy: LazyLogits, func: Any, rest: Any, kwargs: Any) -> _Made:
    """Dimensions in another order, which is read off a tensor whose sizes number them."""
    twin = _unseen(func, lazy.twin, *rest, **kwargs)
    numbered = _unseen(torch.empty, tuple(range(1, twin.dim() + 1)), device="meta")
    order = [size - 1 for size in _unseen(func, numbered, *rest, **kwargs).shape]
    at = lazy.class_dim
    rows = lazy.rows.permute(*(dim - (dim > at) for dim in order if dim != at), lazy.rows.dim() - 1)
    return rows, twin, order.index(at), lazy.casts


def _reshaped(lazy: LazyLogits, func: Any, rest: Any, kwargs: Any) -> _Made | None:
    """Another shape with the classes last, which puts the rows in another shape."""
    if any(isinstance(one, torch.dtype) for one in rest):
        return None
    twin = _unseen(func, lazy.twin, *rest, **kwargs)
    is_last = lazy.class_dim == lazy.twin.dim() - 1
    if not is_last or not twin.numel() or not twin.dim() or twin.shape[-1] != len(lazy.product.weight):
        return None
    return lazy.rows.reshape(*twin.shape[:-1], lazy.rows.shape[-1]), twin, twin.dim() - 1, lazy.casts


def _contiguous(lazy: LazyLogits, func: Any, rest: Any, kwargs: Any) -> _Made | None:
    return None if rest or kwargs else (lazy.rows, _unseen(func, lazy.twin), lazy.class_dim, lazy.casts)


def _selected(lazy: LazyLogits, func: Any, rest: Any, kwargs: Any) -> _Made | None:
    """Some of the rows."""
    index = rest[0] if isinstance(rest[0], tuple) else (rest[0],)
    if lazy.class_dim != lazy.twin.dim() - 1 or not _leaves_classes(index, lazy.twin.dim()):
        return None
    rows = lazy.rows[index]
    is_view = not any(isinstance(entry, torch.Tensor) for entry in index)
    shape = (*rows.shape[:-1], lazy.twin.shape[-1])
    twin = _unseen(func, lazy.twin, index) if is_view else _unseen(lazy.twin.new_empty, shape)
    return rows, twin, twin.dim() - 1, lazy.casts


def _leaves_classes(index: tuple[Any, ...], dims: int) -> bool:
    """Whether an index leaves the last dimension whole, and last."""
    taken = 0
    for entry in index:
        if isinstance(entry, torch.Tensor):
            taken += entry.dim() if entry.dtype in (torch.bool, torch.uint8) else 1
        elif isinstance(entry, (int, slice)) and not isinstance(entry, bool):
            taken += 1
        elif entry is not None and entry is not Ellipsis:
            return False
    if taken < dims and all(entry is not Ellipsis for entry in index[:-1]):
        return True
    return taken <= dims and isinstance(index[-1], slice) and index[-1] == slice(None)


def _cast(lazy: LazyLogits, func: Any, rest: Any, kwargs: Any) -> _Made | None:
    """Another precision."""
    given = [*rest, *kwargs.values()]
    if func in _PRECISIONS:
        given = [_PRECISIONS[func], *given]
    if len(given) != 1 or set(kwargs) - {"dtype"} or not isinstance(given[0], torch.dtype):
        return None
    if not given[0].is_floating_point:
        return None
    return lazy.rows, _unseen(lazy.twin.to, given[0]), lazy.class_dim, (*lazy.casts, given[0])


_PRECISIONS = {_T.float: torch.float32, _T.double: torch.float64, _T.half: torch.float16, _T.bfloat16: torch.bfloat16}
_MOVES: dict[Any, Callable[[LazyLogits, Any, Any, Any], _Made | None]] = {
    **dict.fromkeys((_T.transpose, torch.transpose, _T.swapaxes, _T.permute, torch.permute), _turned),
    **dict.fromkeys((_T.movedim, torch.movedim), _turned),
    **dict.fromkeys((_T.view, _T.reshape, torch.reshape, _T.flatten, torch.flatten), _reshaped),
    **dict.fromkeys((_T.to, _T.type, *_PRECISIONS), _cast),
    _T.contiguous: _contiguous,
    _T.__getitem__: _selected,
}
