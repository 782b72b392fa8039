"""The autograd graph behind a tensor."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch.autograd import forward_ad


def leaves_of(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The leaves that a backward from a tensor would give a gradient to.

    Args:
        tensor: with a gradient function.

    Returns:
        The leaf tensors with ``requires_grad``, each once.

    Example:
        >>> weight = torch.ones(2, requires_grad=True)
        >>> [leaf is weight for leaf in leaves_of((weight * 3).sum() + weight.sum())]
        [True]
    """
    return [node.variable for node in _accumulators_behind([tensor])]


def _accumulators_behind(tensors: Iterable[torch.Tensor], known: Iterable[Any] = ()) -> list[Any]:
    """The nodes that would put a gradient on a leaf, each once and without those that are known."""
    found: list[Any] = []
    waiting: list[Any] = list(dict.fromkeys(tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None))
    seen = {*known, *waiting}
    accumulates: dict[type, bool] = {}
    for node in waiting:
        for following, _ in node.next_functions:
            if following is None or following in seen:
                continue
            seen.add(following)
            kind = type(following)
            if kind not in accumulates:  # asked of the type, since a node of the user's own may have any attribute
                accumulates[kind] = hasattr(kind, "variable")
            (found if accumulates[kind] else waiting).append(following)
    return found


number_of_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
"""How many modes that see every operation are on; in each step it is asked often, so it is torch's own."""
number_of_function_modes: Callable[[], int] = torch._C._len_torch_function_stack
"""How many modes that see every call of a function of torch are on, a default device among them."""


is_jit_tracing: Callable[[], bool] = torch._C._is_tracing
"""Whether ``torch.jit.trace`` is writing down every operation of this thread, as an export to ONNX has it do."""
without_torch_function: Callable[[], AbstractContextManager[Any]] = torch._C.DisableTorchFunctionSubclass
"""A block in which ``__torch_function__`` of classes of tensors is not asked."""
unwrapped: Callable[[torch.Tensor], torch.Tensor] = torch._C._functorch.get_unwrapped
"""The tensor that one of a transform of ``torch.func`` stands for, or that one stands for in turn."""
stands_in: Callable[[torch.Tensor], bool] = torch._C._functorch.is_functorch_wrapped_tensor
"""Whether a tensor is one of a transform of ``torch.func``, which stands for another and has no numbers of its own."""
refuse_pointers: Callable[[torch.Tensor], None] = torch._C._set_throw_on_mutable_data_ptr
"""Has whoever asks where the numbers of a tensor begin get an error, since it has none."""
warn_of_pointers: Callable[[torch.Tensor], None] = torch._C._set_warn_deprecated_on_mutable_data_ptr
"""Has whoever asks where the numbers of a tensor begin get a warning."""
without_dispatch: Callable[[], Any] = torch._C._DisableTorchDispatch
"""Makes an object; as long as it is there, neither modes nor classes of tensors see an operation of this thread."""
number_of_backward: Callable[[], int] = torch._C._current_graph_task_id
"""Numbers the backward that is being run in this thread; later ones have higher numbers, -1 stands for none."""
in_transform: Callable[[], bool] = torch._C._are_functorch_transforms_active
"""Whether ``torch.func.grad``, ``vmap`` or another transform is running in this thread."""


def is_transformed() -> bool:
    """Whether what runs now is differentiated in another way than by a backward through its graph.

    A transform of ``torch.func`` is running, or a level of forward-mode differentiation is open. Hooks on saved tensors
    and functions with nothing but a backward do not work there.
    """
    return in_transform() or forward_ad._current_level >= 0


def in_backward() -> bool:
    """Whether autograd is running a backward in this thread, as it is while a checkpoint recomputes its forward."""
    return number_of_backward() != -1


def hooks_on_saved_tensors() -> tuple[Callable[[Any], Any], Callable[[Any], Any]] | None:
    """The innermost hooks on saved tensors that are on in this thread, which alone are called.

    Returns:
        How they pack and unpack; ``None`` for none, and in torch 2.6, which shows them to nobody.
    """
    shown = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    found: tuple[Callable[[Any], Any], Callable[[Any], Any]] | None = shown(True) if shown is not None else None
    return found


def when_backward_ends(function: Callable[[bool], None]) -> None:
    """Calls a function when the backward that is being run has gone well; is called from within it, as by a hook.

    Args:
        function: takes whether that backward ran inside of another one, as a reentrant checkpoint has it.
    """
    engine = torch.autograd.Variable._execution_engine
    engine.queue_callback(lambda: function(torch._C._current_autograd_node() is not None))


_second_time: ContextVar[bool] = ContextVar("anybatch_second_time", default=False)


@contextmanager
def recomputing() -> Iterator[None]:
    """Tells what counts forwards that the ones in this block run for the second time."""
    token = _second_time.set(True)
    try:
        yield
    finally:
        _second_time.reset(token)


def is_recomputing() -> bool:
    """Whether a forward runs for the second time: in a backward, for a checkpoint, or in a second pass."""
    return _second_time.get() or in_backward()


class OutsideLeaves:
    """Leaves that get a gradient though nobody named them, such as a temperature that a loss function closes over.

    Their gradients are taken off when they are found, so that the new ones are alone until they are added.

    Args:
        known: the leaves that are cared for elsewhere.
    """

    def __init__(self, known: Iterable[torch.Tensor]) -> None:
        self._known = {id(leaf) for leaf in known}
        self._accumulators: set[Any] = set()  # held, so that the graph of the next micro-batch has the same ones
        self._found: list[tuple[torch.Tensor, torch.Tensor | None]] = []

    @property
    def found(self) -> list[tuple[torch.Tensor, torch.Tensor | None]]:
        """What was found, each with the gradient that it had."""
        return self._found

    def know(self, leaves: Iterable[torch.Tensor]) -> None:
        """Names more leaves that are cared for elsewhere."""
        self._known.update(id(leaf) for leaf in leaves)

    def look_behind(self, tensors: Iterable[torch.Tensor], *, ignoring: Iterable[torch.Tensor] = ()) -> None:
        """Finds the leaves behind some tensors and takes their gradients off.

        Args:
            tensors: are about to be differentiated.
            ignoring: leaves that live for a moment only.
        """
        ignored = {id(leaf) for leaf in ignoring}
        for node in _accumulators_behind(tensors, self._accumulators):
            leaf = node.variable
            if id(leaf) in ignored:
                continue
            self._accumulators.add(node)
            if id(leaf) not in self._known:
                self._known.add(id(leaf))
                self._found.append((leaf, leaf.grad))
                leaf.grad = None
