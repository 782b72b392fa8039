"""The result of a linear layer that is not computed until somebody looks at it."""

import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.nn.functional as F

from anybatch.batch.trees import map_leaves
from anybatch.errors import AnyBatchError
from anybatch.memory.chunks import refuse_second_derivative
from anybatch.memory.replay import Autocast


class Optimization(Protocol):
    """What knows how the loss is to be computed, and is notified of it."""

    chunks: int
    taken: int
    computed: int


class Product:
    """What a linear layer was called with.

    Args:
        hidden: of shape ``[..., features]``.
        weight: of shape ``[classes, features]``.
        bias: of shape ``[classes]``, or ``None``.
        dtype: of the result.
        optimization: is told when the product is computed after all.
    """

    def __init__(
        self,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        dtype: torch.dtype,
        optimization: Optimization,
    ) -> None:
        self.hidden, self.weight, self.bias = hidden, weight, bias
        self.dtype = dtype
        self.autocast = Autocast({"cpu", hidden.device.type})
        self.with_gradient = torch.is_grad_enabled() and any(
            t is not None and t.requires_grad for t in (hidden, weight, bias)
        )
        self._versions = self._now()
        self.optimization = optimization
        self.is_taken = False
        self._result: torch.Tensor | None = None
        self._views: list[weakref.ref[LazyLogits]] = []

    def _now(self) -> list[int]:
        return [t._version for t in (self.hidden, self.weight, self.bias) if t is not None]

    @property
    def is_computed(self) -> bool:
        """Whether somebody has looked at the result."""
        return self._result is not None

    def check(self) -> None:
        """Refuses what would be another result than at the time of the call."""
        if self._now() != self._versions:
            raise AnyBatchError(
                "the logits of a head with chunk_loss were used for the first time after the head's weight or input "
                "had changed, so that they can't be computed as they were; expected that they are used before. Use "
                "them before the update, or leave chunk_loss out"
            )

    def result(self) -> torch.Tensor:
        """The result, as the layer itself would have given it; computed once."""
        if self._result is None:
            self.check()
            with torch.set_grad_enabled(self.with_gradient), self.autocast.again():
                self._result = F.linear(self.hidden, self.weight, self.bias)
            self.optimization.computed += 1
        return self._result

    def add_view(self, view: "LazyLogits") -> None:
        """Notes what was made from the result."""
        self._views.append(weakref.ref(view))

    def fix_views(self) -> None:
        """Computes everything that was made from the result, before it is written to."""
        for ref in self._views:
            view = ref()
            if view is not None:
                view.materialised()


class LazyLogits(torch.Tensor):
    """Stands for the result of a linear layer, in another shape, order or precision perhaps.

    Its shape, dtype and device are there. Anything else computes the result and goes on with that, but for operations
    that only move or select rows, and for what the memory optimization does with it.
    """

    product: Product
    rows: torch.Tensor
    """The layer's input, moved and selected like the result; the features are last."""
    class_dim: int
    """Where the classes lie among the dimensions."""
    casts: tuple[torch.dtype, ...]
    is_dense: bool
    _made_by: tuple[Any, ...] | None
    _real: torch.Tensor | None

    @staticmethod
    def of(product: Product) -> "LazyLogits":
        """The result itself."""
        return _made(product, product.hidden, product.hidden.dim() - 1, (), True, None)

    def derived(
        self,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        rows: torch.Tensor | None = None,
        class_dim: int | None = None,
        cast: torch.dtype | None = None,
        is_dense: bool = False,
    ) -> "LazyLogits":
        """What an operation makes of this, as far as it is known without the numbers.

        Args:
            func: the operation.
            args: all of its arguments, this one included.
            kwargs: of the operation.
            rows: the rows as it leaves them; ``None`` for these.
            class_dim: where it leaves the classes; ``None`` for where they are.
            cast: the dtype that it gives; ``None`` for this one.
            is_dense: whether its result is contiguous.
        """
        casts = self.casts if cast is None else (*self.casts, cast)
        dim = self.class_dim if class_dim is None else class_dim
        made_by = (self, func, args[1:], kwargs, torch.is_grad_enabled())
        return _made(self.product, self.rows if rows is None else rows, dim, casts, is_dense, made_by)

    @property
    def lead(self) -> torch.Size:
        """The shape without the classes."""
        return self.rows.shape[:-1]

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
        from anybatch.memory import lazyoperations  # which make these tensors

        if func in lazyoperations.METADATA:
            return super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]
        return lazyoperations.run(func, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Computes the numbers for what did not come through Python, such as a tensor saved for the backward."""
        return func(*detached(args), **detached(kwargs or {}))


def _made(
    product: Product,
    rows: torch.Tensor,
    class_dim: int,
    casts: tuple[torch.dtype, ...],
    is_dense: bool,
    made_by: tuple[Any, ...] | None,
) -> LazyLogits:
    dtype = casts[-1] if casts else product.dtype
    shape = [*rows.shape[:-1]]
    shape.insert(class_dim, product.weight.shape[0])

    def make() -> LazyLogits:
        lazy: LazyLogits = torch.Tensor._make_wrapper_subclass(LazyLogits, shape, dtype=dtype, device=rows.device)
        lazy.product, lazy.rows, lazy.class_dim = product, rows, class_dim
        lazy.casts, lazy.is_dense = casts, is_dense
        lazy._made_by, lazy._real = made_by, None
        return lazy

    lazy = make()
    if product.with_gradient and torch.is_grad_enabled():
        lazy = _StandIn.apply(make, class_dim, casts, product, rows, product.weight, product.bias)  # type: ignore[no-untyped-call]
    product.add_view(lazy)
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
        leaves: list[Any]
        product.check()
        leaves = [None if t is None else t.detach().requires_grad_(t.requires_grad) for t in inputs]
        with torch.enable_grad(), product.autocast.again():
            logits = F.linear(*leaves).movedim(-1, class_dim)
            for dtype in casts:
                logits = logits.to(dtype)
        wanted = [leaf for leaf in leaves if leaf is not None and leaf.requires_grad]
        found = dict(zip(map(id, wanted), torch.autograd.grad(logits, wanted, gradient), strict=True))
        return None, None, None, None, *(found.get(id(leaf)) for leaf in leaves)


def numbers(node: Any) -> Any:
    """The same containers with real tensors in them."""
    return map_leaves(lambda leaf: leaf.materialised() if isinstance(leaf, LazyLogits) else leaf, node)


def detached(node: Any) -> Any:
    """The same containers with real tensors in them, without gradient."""
    return map_leaves(lambda leaf: leaf.materialised().detach() if isinstance(leaf, LazyLogits) else leaf, node)
