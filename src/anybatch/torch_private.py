"""Private names of torch, looked up where a missing one can be borne: each says what is lost without it.

None of them is needed to import anybatch. Where nothing takes the place of a name, using it raises an error that says
which name this torch lacks.
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
    """A name of torch, or what takes its place.

    Args:
        otherwise: what takes its place; ``None`` if using it has to fail.
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
"""How many modes that see every operation are on; in each step it is asked often, so it is torch's own."""
function_modes: Callable[[], list[Any]] = _named(
    "overrides._get_current_function_mode_stack", "no step is written down for the questions after a run", list
)
"""The modes that see every call of a function of torch, the innermost last."""
number_of_function_modes: Callable[[], int] = _named(
    "_C._len_torch_function_stack", "a mode that sees calls of functions sees those of anybatch, too", lambda: 0
)
"""How many modes that see every call of a function of torch are on, a default device among them."""
is_jit_tracing: Callable[[], bool] = _named(
    "_C._is_tracing", "what torch.jit.trace writes down is taken for a step", lambda: False
)
"""Whether ``torch.jit.trace`` is writing down every operation of this thread, as an export to ONNX has it do."""
without_torch_function: Callable[[], AbstractContextManager[Any]] = _named(
    "_C.DisableTorchFunctionSubclass", "classes of tensors see the operations of anybatch, too", nullcontext
)
"""A block in which ``__torch_function__`` of classes of tensors is not asked."""
function_state: Callable[[], Any] = _named(
    "_C._get_torch_function_state", "a mode that sees calls of functions sees those of anybatch, too", lambda: None
)
"""Who is asked about calls of functions of torch in this thread: modes and classes, modes alone, or nobody."""
set_function_state: Callable[[Any], None] = _named(
    "_C._set_torch_function_state", "a mode that sees calls of functions sees those of anybatch, too", lambda _: None
)
"""Has others be asked; modes stay where they are on their stack."""
NOBODY_IS_ASKED: Any = _named(
    "_C._TorchFunctionState.ALL_DISABLED", "a mode that sees calls of functions sees those of anybatch, too"
)
unwrapped: Callable[[torch.Tensor], torch.Tensor] = _named(
    "_C._functorch.get_unwrapped", "tensors within transforms of torch.func are not counted", lambda tensor: tensor
)
"""The tensor that one of a transform of ``torch.func`` stands for, or that one stands for in turn."""
stands_in: Callable[[torch.Tensor], bool] = _named(
    "_C._functorch.is_functorch_wrapped_tensor",
    "tensors within transforms of torch.func are taken for plain ones",
    lambda _: False,
)
"""Whether a tensor is one of a transform of ``torch.func``, which stands for another and has no numbers of its own."""
refuse_pointers: Callable[[torch.Tensor], None] = _named(
    "_C._set_throw_on_mutable_data_ptr",
    "a kernel that reads numbers while a step is traced is not noticed",
    lambda _: None,
)
"""Has whoever asks where the numbers of a tensor begin get an error, since it has none."""
warn_of_pointers: Callable[[torch.Tensor], None] = _named(
    "_C._set_warn_deprecated_on_mutable_data_ptr",
    "a kernel that reads numbers while a step is traced is not noticed",
    lambda _: None,
)
"""Has whoever asks where the numbers of a tensor begin get a warning."""
number_of_backward: Callable[[], int] = _named(
    "_C._current_graph_task_id", "a forward that runs again in a backward can't be told from another one"
)
"""Numbers the backward that is being run in this thread; later ones have higher numbers, -1 stands for none."""
in_transform: Callable[[], bool] = _named(
    "_C._are_functorch_transforms_active", "transforms of torch.func are not noticed", lambda: False
)
"""Whether ``torch.func.grad``, ``vmap`` or another transform is running in this thread."""


def has_compiled() -> bool:
    """Whether something was given to ``torch.compile`` in this process, which a mode would have compile otherwise."""
    backends = getattr(sys.modules.get("torch._dynamo.eval_frame"), "cached_backends", {})
    return any(backend is not None for backend in backends.values())


def hooks_on_saved_tensors() -> tuple[Callable[[Any], Any], Callable[[Any], Any]] | None:
    """The innermost hooks on saved tensors that are on in this thread, which alone are called.

    Returns:
        How they pack and unpack; ``None`` for none, and where torch shows them to nobody, as 2.6 does.
    """
    shown = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    found: tuple[Callable[[Any], Any], Callable[[Any], Any]] | None = shown(True) if shown is not None else None
    return found


def when_backward_ends(function: Callable[[bool], None]) -> None:
    """Calls a function when the backward that is being run has gone well; is called from within it, as by a hook."""
    engine = torch.autograd.Variable._execution_engine
    engine.queue_callback(lambda: function(torch._C._current_autograd_node() is not None))


def number_of_node() -> int:
    """Numbers the node of a graph that a backward is running in this thread; -1 stands for none."""
    node = torch._C._current_autograd_node()
    return -1 if node is None else int(node._sequence_nr())


def hooks_on_all_modules() -> list[dict[Any, Any]]:
    """The hooks that torch calls for every module, such as those of a tracker; each dictionary is torch's own."""
    names = ("forward_pre_hooks", "forward_hooks", "backward_pre_hooks", "backward_hooks")
    found = (getattr(torch.nn.modules.module, f"_global_{name}", None) for name in names)
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
    """Whether ``fully_shard`` leaves parameters gathered after a forward, for which it has a switch, but no answer."""
    state = _state_of(unit)
    if state is None or (is_root and getattr(state, "_auto_reshard_after_forward", state._is_root is None)):
        return state is not None
    return all(getattr(group, "post_forward_mesh_info", unit) is None for group in _groups_of(state))


def switches_of(unit: Any) -> Callable[[], None]:
    """Notes what the user has set of a unit of ``fully_shard``, which its public switches don't tell."""
    state = _state_of(unit)
    owners = [] if state is None else [*_groups_of(state), state, getattr(state, "_state_ctx", None)]
    names = (*_OF_GROUPS, "_auto_reshard_after_forward", "is_last_backward")
    before = [(owner, name, getattr(owner, name)) for owner in owners for name in names if hasattr(owner, name)]

    is_new = state is not None and state._is_root is None

    def put_back() -> None:
        for owner, name, value in before:
            setattr(owner, name, value)
        # The first forward of all has the root stay gathered, if nobody has said anything else.
        if is_new and state._is_root and getattr(state, "_auto_reshard_after_forward", True):
            for group in _groups_of(state):
                group.post_forward_mesh_info = None

    return put_back


def end_of_pass(root: Any) -> None:
    """Ends what a forward or a backward of ``fully_shard`` has begun and did not end, as after an exception.

    torch has this since 2.13; before, it is done here by names that are the same from 2.6 on. Without either a step
    that failed can't be tried again.
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
