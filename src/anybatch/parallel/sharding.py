"""What FSDP2 (``fully_shard``) does within a model, and how to take it in hand.

Here and in ``shardunits`` is all that knows its insides; torch 2.6, 2.13 and 2.15 differ in some of them.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from anybatch.errors import AnyBatchError
from anybatch.parallel.shardunits import Unit
from anybatch.tensors.modules import modules_of
from anybatch.tensors.shards import is_sharded, local_of


def is_fully_sharded(module: torch.nn.Module) -> bool:
    """Whether ``fully_shard`` was applied to a module itself.

    Args:
        module: any.
    """
    return any(kind.__name__ == "FSDPModule" for kind in type(module).__mro__)


class Shards:
    """All units of a model.

    Args:
        model: to parts of which ``fully_shard`` was applied.

    Attributes:
        can_sum: whether this torch lets reduced gradients be sums, rather than means that are multiplied again.

    Raises:
        AnyBatchError: it is sharded in a way that is not supported.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._roots = _roots(model)
        for root in self._roots:
            root._get_fsdp_state()._lazy_init()
        sharded: list[Any] = [m for root in self._roots for m in modules_of(root) if is_fully_sharded(m)]
        self._states = list({id(state): state for state in (m._get_fsdp_state() for m in sharded)}.values())
        names = {id(module): name for name, module in model.named_modules()}
        self.units = [Unit(group, names.get(id(group.modules[0]), "")) for s in self._states for group in _groups(s)]
        self._unit_of: dict[int, tuple[Unit, int]] = {}
        self.follow_model()
        _check(model, self.units, self._unit_of)
        self.can_sum = all(hasattr(unit.group, "force_sum_reduction_for_comms") for unit in self.units)
        has_factor = hasattr(self.units[0].group, "gradient_divide_factor")
        self._divisor = "gradient_divide_factor" if has_factor else "reduce_scatter_reduce_op"  # until torch 2.6

    @property
    def process_group(self) -> Any:
        """The processes that have the parts."""
        return self.units[0].process_group

    @property
    def stays_whole(self) -> bool:
        """Whether the user lets every unit stay gathered from its forward to its backward."""
        return all(unit.gathers_in_forward_only for unit in self.units)

    def whole_bytes(self) -> int:
        """What whole parameters and gradients take, and buffers to gather and reduce the largest unit."""
        parameters = sum(unit.gathered_bytes[1] for unit in self.units)
        gradients = sum(max(unit.gathered_bytes[1], unit.reduced_bytes[0]) for unit in self.units)
        return parameters + gradients + 2 * max(unit.served_bytes for unit in self.units)

    @property
    def factor(self) -> float:
        """What reduced gradients are to be multiplied by to be sums."""
        return 1.0 if self.can_sum else float(dist.get_world_size(self.process_group))

    def follow_model(self) -> None:
        """Notes which parameters there are now, all of them in parts."""
        self.rest()
        self._unit_of = {id(p): (unit, i) for unit in self.units for i, p in enumerate(unit.parameters)}

    def has(self, parameter: torch.Tensor) -> bool:
        """Whether a parameter, as the optimizer has it, lies in parts."""
        return id(parameter) in self._unit_of

    def whole(self, parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """Parameters as the forward has them.

        Args:
            parameters: as the optimizer has them.
        """
        places = [(p, self._unit_of.get(id(p))) for p in parameters]
        return [p if place is None else place[0].whole[place[1]] for p, place in places]

    def has_gradient(self, parameter: torch.Tensor) -> bool:
        """Whether this process has a gradient of a parameter that is not reduced yet."""
        unit, index = self._unit_of[id(parameter)]
        return unit.has_gradient()[index]

    def meet(self) -> None:
        """Gathers every unit that was never gathered, so that its whole parameters exist."""
        for unit in self.units:
            if not all(hasattr(one, "_unsharded_param") for one in unit.group.fsdp_params):
                unit.gather()
                unit.release()

    def try_memory(self) -> None:
        """Takes the memory of all whole parameters for a moment, before other processes rely on it."""
        sizes = [unit.gathered_bytes for unit in self.units]
        taken = [torch.empty(kept, dtype=torch.uint8, device=self.units[0].group.device) for _, kept in sizes]
        taken.append(torch.empty(max(sent for sent, _ in sizes), dtype=torch.uint8, device=taken[0].device))

    @contextlib.contextmanager
    def taken_over(self, *, reduces: bool, stays_whole: bool = False) -> Iterator[None]:
        """A context in which gradients are summed rather than averaged.

        Args:
            reduces: whether each backward reduces.
            stays_whole: whether parameters stay gathered, whatever the user's switch says.
        """
        wanted: dict[str, Any] = {"reduce_grads": reduces, "reshard_after_backward": not stays_whole}
        if self.can_sum:
            wanted |= {"gradient_divide_factor": 1.0, "force_sum_reduction_for_comms": True}
        else:
            wanted[self._divisor] = None
        if stays_whole:
            wanted["post_forward_mesh_info"] = None  # as set_reshard_after_forward(False)
        before = [(unit.group, name, getattr(unit.group, name)) for unit in self.units for name in wanted]
        last = [(state._state_ctx, state._state_ctx.is_last_backward) for state in self._states]
        try:
            for unit in self.units:
                for name, value in wanted.items():
                    setattr(unit.group, name, value)
            for context, _ in last:
                context.is_last_backward = True
            yield
        finally:
            for group, name, value in before:
                setattr(group, name, value)
            for context, is_last in last:
                context.is_last_backward = is_last

    @contextlib.contextmanager
    def watched(
        self, gather: Callable[[int], None], reduce: Callable[[int, Sequence[torch.Tensor]], None]
    ) -> Iterator[None]:
        """A context in which every unit says what it is about to communicate.

        Args:
            gather: is called with the number of the unit before its parameters are gathered.
            reduce: the same before its gradients are reduced, and with the parameters that have one; then all that
                are trained have one, so that all processes reduce the same.
        """
        try:
            for number, unit in enumerate(self.units):
                _watch(unit, number, gather, reduce)
            yield
        finally:
            for unit in self.units:
                unit.group.__dict__.pop("unshard", None)
                unit.group.__dict__.pop("post_backward", None)

    def rest(self) -> None:
        """Ends whatever forwards and backwards have begun, also after an exception, and releases all units."""
        for state in self._states:
            state._training_state = type(state._training_state).IDLE
            getattr(state, "_modules_to_run_forward", set()).clear()
            context, comm = state._state_ctx, state._comm_ctx
            context.iter_forward_root = None
            context.post_backward_final_callback_queued = False
            context.manual_backward_finalization_active = None
            if hasattr(comm, "post_forward_order"):
                comm.post_forward_order.clear()
                comm.all_gather_state = None
        for unit in self.units:
            unit.rest()
        for state in self._states:
            comm = state._comm_ctx
            if hasattr(comm, "reduce_scatter_states"):
                comm.reduce_scatter_states.clear()
            elif hasattr(comm, "reduce_scatter_state"):
                comm.reduce_scatter_state = None


def _watch(
    unit: Unit,
    number: int,
    gather: Callable[[int], None],
    reduce: Callable[[int, Sequence[torch.Tensor]], None],
) -> None:
    group = unit.group
    unshard, post_backward = group.unshard, group.post_backward

    def watched_unshard(async_op: bool = False) -> None:
        if unit.would_gather():
            _try(group.device, unit.gathered_bytes[:1])  # what is copied out of it comes after the collective
            gather(number)
        unshard(async_op)

    def watched_post_backward(*unused: Any) -> None:
        if unit.would_reduce():
            reached = [p for p, has in zip(unit.parameters, unit.has_gradient(), strict=True) if has]
            unit.fill_()
            _try(group.device, [max(0, sum(unit.reduced_bytes) - unit.gathered_bytes[1])])  # which is released first
            reduce(number, reached)
        post_backward(*unused)

    group.unshard, group.post_backward = watched_unshard, watched_post_backward


def _try(device: torch.device, sizes: Iterable[int]) -> None:
    """Memory that runs out does so before the other processes begin to wait."""
    taken = [torch.empty(size, dtype=torch.uint8, device=device) for size in sizes]
    del taken


def _roots(model: torch.nn.Module) -> list[Any]:
    """The outermost modules that are sharded."""
    found: list[Any] = []
    inner: set[int] = set()
    for module in modules_of(model):  # parents come before their children
        if is_fully_sharded(module) and id(module) not in inner:
            found.append(module)
            inner.update(id(one) for one in modules_of(module))
    return found


def _groups(state: Any) -> list[Any]:
    """torch 2.6 has one group or none, later versions a list."""
    several = getattr(state, "_fsdp_param_groups", None)
    if several is not None:
        return list(several)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]


def _check(model: torch.nn.Module, units: Sequence[Unit], known: Any) -> None:
    if not units:
        raise AnyBatchError("fully_shard was applied to modules without any parameter; leave it out there")
    for unit in units:
        group = unit.group
        if getattr(group, "_is_hsdp", False) or group._use_post_forward_mesh:
            raise AnyBatchError(
                f"{unit.name} is sharded over a mesh of two dimensions, or with "
                "reshard_after_forward=<number>; expected fully_shard over all ranks of the group with "
                "reshard_after_forward=True or False"
            )
        if type(group.offload_policy).__name__ != "OffloadPolicy":
            raise AnyBatchError(
                f"{unit.name} is sharded with a {type(group.offload_policy).__name__}, which this version does not "
                "support; leave offload_policy out"
            )
        if any(one.is_dtensor for one in group.fsdp_params):
            raise AnyBatchError(
                f"{unit.name} was a DTensor before fully_shard, as with tensor parallelism; this version sums "
                "gradients over one dimension only"
            )
    groups = {tuple(dist.get_process_group_ranks(unit.process_group)) for unit in units}
    if len(groups) > 1:
        raise AnyBatchError("parts of the model are sharded over other ranks than others; expected one mesh for all")
    for name, parameter in model.named_parameters():
        if is_sharded(parameter) and id(parameter) not in known:
            raise AnyBatchError(f"{name} is a DTensor that fully_shard did not make; this version can't reduce it")


def scale_(gradients: Iterable[torch.Tensor], scale: float) -> None:
    """Multiplies the parts that lie on this process.

    Args:
        gradients: sharded or not, of any dtypes.
        scale: by what; nothing happens for 1.
    """
    parts = [local_of(gradient) for gradient in gradients]
    if scale != 1.0 and parts:
        torch._foreach_mul_(parts, scale)
