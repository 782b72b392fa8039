"""The loss of a large output layer in chunks of rows, so that all logits never exist at once."""

from collections.abc import Callable, Iterable
from typing import Any

import torch

from anybatch.errors import BatchError
from anybatch.memory.lazylogits import LazyLogits, Product
from anybatch.memory.places import Handle, Layered, places_of
from anybatch.tensors.graph import is_transformed


def chunk_loss(model: torch.nn.Module, head: str, chunks: int) -> "ChunkedLoss":
    """Computes the cross-entropy of an output layer for a chunk of rows at a time, with unchanged user code.

    While this is on, the layer's result is computed only when somebody looks at its numbers. Where it goes into
    ``F.cross_entropy`` with classes as the target, through nothing but changes of shape, order and precision and
    selections of rows, the logits of one chunk are there at a time, and their gradient is computed with them. Every
    other use gets the ordinary logits. Gradients of low precision are added up in float32.

    Returns:
        A handle that removes the optimization and counts its uses.

    Raises:
        BatchError: the head is no plain ``torch.nn.Linear``, or ``chunks`` is below 1; nothing is changed.

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
    optimization = _Head(linear, chunks)
    return ChunkedLoss([place.put_on(optimization)], optimization)


def is_linear(module: torch.nn.Module) -> bool:
    """Whether a module computes ``F.linear`` and nothing else."""
    own = module.forward
    while isinstance(own, Layered):
        own = own.__wrapped__
    if getattr(own, "__func__", None) is not torch.nn.Linear.forward:
        return False
    return isinstance(module, torch.nn.Linear) and type(module).forward is torch.nn.Linear.forward


class ChunkedLoss(Handle):
    """The handle of ``chunk_loss``, which removes it.

    Args:
        undo: what takes it off.
        optimization: counts.
    """

    def __init__(self, undo: Iterable[Callable[[], None]], optimization: "_Head") -> None:
        super().__init__(undo)
        self._optimization = optimization

    @property
    def taken(self) -> int:
        """How many calls of the cross-entropy were computed in chunks."""
        return self._optimization.taken

    @property
    def computed(self) -> int:
        """How many times all logits were computed after all, since something else looked at them."""
        return self._optimization.computed


class _Head:
    """The layer around the head."""

    def __init__(self, linear: Any, chunks: int) -> None:
        self.chunks = chunks
        self.taken = self.computed = 0
        self._linear = linear

    def __call__(self, inner: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        hidden: Any = args[0] if args else kwargs.get("input")
        weight, bias = self._linear.weight, self._linear.bias
        if isinstance(hidden, LazyLogits):
            hidden = hidden.materialised()
        dtype = _dtype(hidden, weight, bias)
        if dtype is None or hidden.shape[-1] != weight.shape[-1]:
            return inner(*args, **kwargs)
        return LazyLogits.of(Product(hidden, weight, bias, dtype, self))


def _is_plain(tensor: torch.Tensor) -> bool:
    is_made_of_others = hasattr(tensor, "__tensor_flatten__")  # such as a part of a tensor that lies on several devices
    return (
        tensor.is_floating_point()
        and tensor.layout is torch.strided
        and not (is_made_of_others or tensor.is_inference())
    )


def _dtype(hidden: Any, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.dtype | None:
    """In which dtype the layer computes; ``None`` for what is left to the layer itself."""
    tensors = [hidden, weight] if bias is None else [hidden, weight, bias]
    if torch.compiler.is_compiling() or torch.is_inference_mode_enabled() or is_transformed():
        return None
    if not all(isinstance(t, torch.Tensor) and _is_plain(t) for t in tensors):
        return None
    dtypes = {t.dtype for t in tensors}
    kind = hidden.device.type
    if torch.is_autocast_enabled(kind) and torch.float64 not in dtypes:
        return torch.get_autocast_dtype(kind)
    return hidden.dtype if len(dtypes) == 1 and hidden.dim() > 0 else None
