"""All private names of torch that anybatch uses, each with what is lost where this torch does not have it.

None is needed to import anybatch. A missing name has a fallback, or raises an error with its name when it is used.
"""

import functools
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from anybatch.errors import AnyBatchError

LOST: dict[str, str] = {}
"""What is lost without each name, by its path within torch."""


def _named(path: str, lost: str, otherwise: Callable[..., Any] | None = None) -> Any:
    """A private name of torch, or its fallback.

    Args:
        path: the name, as a path within ``torch``.
        lost: what does not work without it.
        otherwise: the fallback; ``None`` if using the name has to fail.
    """
    LOST[path] = lost
    try:
        return functools.reduce(getattr, path.split("."), torch)
    except AttributeError:
        return otherwise or functools.partial(_missing, path, lost)


def _missing(path: str, lost: str, *_: Any, **__: Any) -> Any:
    raise AnyBatchError(
        f"this torch ({torch.__version__}) has no torch.{path}, without which {lost}; expected torch 2.6 to 2.15. "
        "Use one of these, or an anybatch that knows this one"
    )


number_of_modes: Callable[[], int] = _named(
    "_C._len_torch_dispatch_stack", "a mode that sees operations sees those of anybatch, too", lambda: 0
)
"""The number of active ``TorchDispatchMode``s; called often in a step, so it is torch's own function."""
function_modes: Callable[[], list[Any]] = _named(
    "overrides._get_current_function_mode_stack", "no step is written down for the questions after a run", list
)
"""The active ``TorchFunctionMode``s, the innermost last."""
number_of_function_modes: Callable[[], int] = _named(
    "_C._len_torch_function_stack", "a mode that sees calls of functions sees those of anybatch, too", lambda: 0
)
"""The number of active ``TorchFunctionMode``s, that of a default device included."""
is_jit_tracing: Callable[[], bool] = _named(
    "_C._is_tracing", "what torch.jit.trace writes down is taken for a step", lambda: False
)
"""Whether ``torch.jit.trace`` records the operations of this thread, as an export to ONNX does."""
without_torch_function: Callable[[], AbstractContextManager[Any]] = _named(
    "_C.DisableTorchFunctionSubclass", "classes of tensors see the operations of anybatch, too", nullcontext
)
"""A block in which ``__torch_function__`` of tensor subclasses is not called."""
function_state: Callable[[], Any] = _named(
    "_C._get_torch_function_state", "a mode that sees calls of functions sees those of anybatch, too", lambda: None
)
"""What intercepts torch functions in this thread: modes and tensor subclasses, modes alone, or nothing."""
set_function_state: Callable[[Any], None] = _named(
    "_C._set_torch_function_state", "a mode that sees calls of functions sees those of anybatch, too", lambda _: None
)
"""Sets what intercepts torch functions; modes stay on their stack."""
NOBODY_IS_ASKED: Any = _named(
    "_C._TorchFunctionState.ALL_DISABLED", "a mode that sees calls of functions sees those of anybatch, too"
)
unwrapped: Callable[[torch.Tensor], torch.Tensor] = _named(
    "_C._functorch.get_unwrapped", "tensors within transforms of torch.func are not counted", lambda tensor: tensor
)
"""The tensor that a wrapper of a ``torch.func`` transform wraps; it may be a wrapper again."""
stands_in: Callable[[torch.Tensor], bool] = _named(
    "_C._functorch.is_functorch_wrapped_tensor",
    "tensors within transforms of torch.func are taken for plain ones",
    lambda _: False,
)
"""Whether a tensor is a wrapper of a ``torch.func`` transform, without elements of its own."""
number_of_backward: Callable[[], int] = _named(
    "_C._current_graph_task_id", "a forward that runs again in a backward can't be told from another one"
)
"""The number of the backward that runs in this thread, increasing; -1 if none runs."""
in_transform: Callable[[], bool] = _named(
    "_C._are_functorch_transforms_active", "transforms of torch.func are not noticed", lambda: False
)
"""Whether ``torch.func.grad``, ``vmap`` or another transform runs in this thread."""

clear_workspaces: Callable[[], None] = _named(
    "_C._cuda_clearCublasWorkspaces",
    "a budget leaves no room for the workspaces of cuBLAS that are there already",
    lambda: None,
)
"""Frees the workspaces of cuBLAS, which it makes anew with its next product."""


def has_compiled() -> bool:
    """Whether this process used ``torch.compile``; an active mode would make it compile again."""
    backends = getattr(sys.modules.get("torch._dynamo.eval_frame"), "cached_backends", {})
    return any(backend is not None for backend in backends.values())


def hooks_on_saved_tensors() -> tuple[Callable[[Any], Any], Callable[[Any], Any]] | None:
    """The innermost hooks on saved tensors of this thread, the only ones that torch calls.

    Returns:
        Their pack and unpack functions; ``None`` if there are none, and in torch 2.6, which does not expose them.
    """
    shown = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    found: tuple[Callable[[Any], Any], Callable[[Any], Any]] | None = shown(True) if shown is not None else None
    return found


def has_hooks_on_saved_tensors() -> bool:
    """Whether this thread has hooks on saved tensors; true in torch 2.6, which does not say."""
    return not hasattr(torch._C._autograd, "_top_saved_tensors_default_hooks") or hooks_on_saved_tensors() is not None


def when_backward_ends(function: Callable[[bool], None]) -> None:
    """Calls a function at the end of the current backward if it succeeds; to be called within it, as by a hook.

    Args:
        function: gets whether a node of an outer backward runs, as in a reentrant checkpoint.
    """
    engine = torch.autograd.Variable._execution_engine
    engine.queue_callback(lambda: function(torch._C._current_autograd_node() is not None))


def number_of_node() -> int:
    """Numbers the node of a graph that a backward is running in this thread; -1 stands for none."""
    node = torch._C._current_autograd_node()
    return -1 if node is None else int(node._sequence_nr())


def hooks_on_all_modules() -> list[dict[Any, Any]]:
    """The global hooks of modules and optimizers, as of a module tracker; the dictionaries are torch's own."""
    names = {
        "torch.nn.modules.module": ("forward_pre_hooks", "forward_hooks", "backward_pre_hooks", "backward_hooks"),
        "torch.optim.optimizer": ("optimizer_pre_hooks", "optimizer_post_hooks"),
    }
    found = [getattr(sys.modules[home], f"_global_{name}", None) for home, own in names.items() for name in own]
    return [hooks for hooks in found if hooks]


_OF_GROUPS = (
    "gradient_divide_factor",
    "force_sum_reduction_for_comms",
    "reduce_grads",
    "all_reduce_grads",
    "reshard_after_backward",
    "post_forward_mesh_info",
)


def keeps_gathered(unit: Any, *, is_root: bool) -> bool:
    """Whether ``fully_shard`` keeps parameters unsharded after the forward; its public API only sets this."""
    state = _state_of(unit)
    if state is None or (is_root and getattr(state, "_auto_reshard_after_forward", state._is_root is None)):
        return state is not None
    return all(getattr(group, "post_forward_mesh_info", unit) is None for group in _groups_of(state))


def switches_of(unit: Any) -> Callable[[], None]:
    """Saves the settings of a ``fully_shard`` unit, which the public API only sets; returns what restores them."""
    state = _state_of(unit)
    owners = [] if state is None else [*_groups_of(state), state, getattr(state, "_state_ctx", None)]
    names = (*_OF_GROUPS, "_auto_reshard_after_forward", "is_last_backward")
    before = [(owner, name, getattr(owner, name)) for owner in owners for name in names if hasattr(owner, name)]

    is_new = state is not None and state._is_root is None

    def put_back() -> None:
        for owner, name, value in before:
            setattr(owner, name, value)
        # The first forward makes the root stay unsharded, unless the user has set something else.
        if is_new and state._is_root and getattr(state, "_auto_reshard_after_forward", True):
            for group in _groups_of(state):
                group.post_forward_mesh_info = None

    return put_back


def end_of_pass(root: Any) -> None:
    """Resets ``fully_shard`` after a forward or backward that was interrupted by an exception.

    Without this a failed step can't be run again. torch has it since 2.13; for older versions it is done here by
    private names that are the same since 2.6.
    """
    state = _state_of(root)
    if state is None or state._is_root is None:  # nothing ran yet
        return
    if hasattr(root, "reset_iter_state"):
        root.reset_iter_state()
        return
    for one in state._state_ctx.all_states:
        one._training_state = type(one._training_state).IDLE
        for group in _groups_of(one):
            if group._all_gather_result is not None:
                group.wait_for_unshard()
            group.finalize_backward()
            group._post_forward_indices.clear()
            group._training_state = type(group._training_state).IDLE
            group._to_sharded()
    context, comm = state._state_ctx, state._comm_ctx
    context.iter_forward_root, context.post_backward_final_callback_queued = None, False
    comm.post_forward_order.clear()
    comm.all_gather_state = None
    if hasattr(comm, "reduce_scatter_state"):
        comm.reduce_scatter_state = None


def _state_of(unit: Any) -> Any:
    state = getattr(unit, "_get_fsdp_state", None)
    return None if state is None else state()


def _groups_of(state: Any) -> list[Any]:
    """torch 2.6 has one group or none, later versions a list."""
    several = getattr(state, "_fsdp_param_groups", None)
    if several is not None:
        return list(several)
    one = getattr(state, "_fsdp_param_group", None)
    return [] if one is None else [one]
