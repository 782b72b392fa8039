"""Ranks with sharded parameters (FSDP2, ``fully_shard``), through its public switches and module hooks.

Where FSDP2 keeps parameters gathered from a forward to its backward, all are gathered before the first micro-batch,
and gradients are summed after the last one as those of plain ranks are: nothing is communicated between. Where it
releases them, each rank runs as many micro-batches as any other, those that it lacks count nothing, and the ranks tell
each other before whatever FSDP2 communicates. If one of them is about to do something else, all begin again with
everything gathered.
"""

import contextlib
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from anybatch.batch.trees import leaves, map_leaves
from anybatch.errors import AnyBatchError, BatchError
from anybatch.loss.reducing import Stage
from anybatch.loss.sums import Sums
from anybatch.loss.weights import Weights
from anybatch.parallel.buckets import buckets_of, ready_to_sum
from anybatch.parallel.messages import Messages, as_flags, as_text
from anybatch.parallel.ranks import Ranks, compact, is_fully_sharded
from anybatch.tensors.dispatch import without_modes
from anybatch.tensors.modules import modules_of
from anybatch.tensors.precision import ACCUMULATED_AFTER, LOW_PRECISION
from anybatch.tensors.shards import is_sharded, local_of
from anybatch.torch_private import end_of_pass, keeps_gathered, switches_of, when_backward_ends

_PAIRS: "weakref.WeakKeyDictionary[torch.nn.Module, list[tuple[torch.Tensor, torch.Tensor]]]"
_PAIRS = weakref.WeakKeyDictionary()
"""Parameters of each unit in parts and whole, which FSDP2 makes once."""


class _Unit(NamedTuple):
    """A unit that FSDP2 gathers and reduces together: its module, and each parameter sharded and whole."""

    module: Any
    pairs: list[tuple[torch.Tensor, torch.Tensor]]

    @property
    def bytes(self) -> int:
        """What arrives when it is gathered."""
        return sum(whole.nbytes for _, whole in self.pairs)


class ShardedRanks(Ranks):
    """The ranks of a process group, each with a shard of each parameter."""

    is_sharded = True

    def __init__(self, model: torch.nn.Module, group: Any, device: torch.device) -> None:
        super().__init__(model, group, device)
        self._whole: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._low: dict[int, torch.Tensor] = {}  # gradients of whole parameters in low precision, in float32
        self._open: list[int] = []  # units whose gradients this backward has still to reduce
        found: list[Any] = [module for module in modules_of(model) if is_fully_sharded(module)]
        inner = {id(one) for module in found for one in modules_of(module) if one is not module}
        self._roots = [module for module in found if id(module) not in inner]
        self._units = [_Unit(module, _PAIRS.setdefault(module, [])) for module in found]
        self._release()
        _check(model, group)
        self._messages = Messages(_on_host(group), device)
        self._reached: set[int] = set()
        self._switches: ExitStack | None = None
        self._function: Callable[[], None] | None = None
        self._more = 0
        self._must_gather = False
        self.counts_nothing = False

    @property
    def is_gathered(self) -> bool:
        """Whether everything is gathered during a step."""
        return self._kind == "whole" or self._must_gather or self._messages.units_differ

    @property
    def keeps_step(self) -> bool:  # type: ignore[override]
        """Whether ranks communicate within forwards and backwards; see ``Reducer``."""
        return not self.is_gathered

    @contextlib.contextmanager
    def call(self, verb: str, parameters: Sequence[torch.Tensor], **options: Any) -> Iterator[None]:
        """A context for one logical batch; see ``Reducer``. What the user set of FSDP2 is as before afterwards."""
        with super().call(verb, parameters, **options):
            stays = all(keeps_gathered(unit.module, is_root=unit.module in self._roots) for unit in self._units)
            self._kind = "whole" if stays else "sharded"
            try:
                yield
            finally:
                self._rest()
                if self._switches is not None:
                    self._switches.close()
                    self._switches = None

    def weights(self, local: Weights, rows: int, *, can_pad: bool = False) -> Weights:
        """Weighs the micro-batches by the counts of all ranks; see ``Ranks``."""
        self._must_gather = False
        weights = super().weights(local, rows, can_pad=can_pad)
        function, self._function, self._is_wanted = self._function, None, False
        if function is not None and any(one["proves"] for one in self._heard):
            function()  # which runs logical batches of its own
            return self.weights(local, rows, can_pad=can_pad)
        parts = [one["parts"] for one in self._heard]
        self._more = max(parts) - len(local.parts)
        self._must_gather = len(set(parts)) > 1 and not all(one["can_pad"] for one in self._heard)
        low = next((p for p in self._parameters if is_sharded(p) and p.dtype in LOW_PRECISION), None)
        if self.keeps_step and low is not None and max(parts) > ACCUMULATED_AFTER:
            self._messages.is_open = False
            raise BatchError(
                f"parameters of {low.dtype} are sharded over ranks, and a rank has {max(parts)} micro-batches, "
                f"whose reduced gradients would be added up in {low.dtype}; use fully_shard with parameters of "
                "float32 and mp_policy=MixedPrecisionPolicy(param_dtype=...), or "
                "model.set_reshard_after_forward(False)"
            )
        return weights

    def when_begun(self, function: Callable[[], None], *, is_wanted: bool) -> None:
        """Has something done by all ranks together, once they have begun a logical batch; see ``Reducer``."""
        self._function, self._is_wanted = function, is_wanted

    def stand_ins(self, own: Callable[[], Any]) -> list[Any]:
        """Micro-batches that count nothing, with which this rank runs as many as the one that has most.

        A rank without samples gets one from another.
        """
        if not self.keeps_step or len({one["parts"] for one in self._heard}) == 1:
            return []
        lacking = any(not one["parts"] for one in self._heard)
        mine = own() if self._more or lacking else None
        if lacking:
            first = next(rank for rank, one in enumerate(self._heard) if one["parts"])
            sends = self._messages.rank == first
            found = self._messages.gather_objects(map_leaves(compact, mine) if sends else None)
            mine = found[first] if mine is None else mine
        return [mine] * self._more

    @contextlib.contextmanager
    def apart(self, modules: Iterable[torch.nn.Module]) -> Iterator[None]:
        """Takes the communication within modules in hand."""
        self._rest()
        self._reached = set()
        self._switch()
        with super().apart(modules), ExitStack() as stack:
            if self.is_gathered:
                self._gather(stack)
            else:
                self._meet()
                for number in range(len(self._units)):
                    self._watch(number, stack)
            yield

    def _switch(self) -> None:
        """Has FSDP2 sum, at once or never; what the user had set is known from the first time in a call."""
        if self._switches is None:
            self._switches = ExitStack()
            for unit in self._units:
                self._switches.callback(switches_of(unit.module))
        for root in self._roots:
            root.set_is_last_backward(True)
            root.set_requires_gradient_sync(not self.is_gathered)
            root.set_reshard_after_backward(not self.is_gathered)
        if self.is_gathered:
            if self._kind != "whole":
                self._call_all("set_reshard_after_forward", False, recurse=False)
        else:
            self._call_all("set_gradient_divide_factor", 1.0)
            self._call_all("set_force_sum_reduction_for_comms", True)

    def _call_all(self, name: str, value: Any, **options: Any) -> None:
        for unit in self._units:
            if not hasattr(unit.module, name):
                raise self._refused(
                    f"fully_shard of this torch ({torch.__version__}) has no {name}, without which parameters that "
                    "are resharded after each forward pass can't be trained here; apply fully_shard with "
                    "reshard_after_forward=False, or update torch"
                )
            getattr(unit.module, name)(value, **options)

    def _gather(self, stack: ExitStack) -> None:
        """Gathers everything, so that nothing has to be communicated until gradients are summed."""
        before = [parameter for root in self._roots for parameter in root.parameters()]
        for unit in self._units:
            self._reach_others(unit.module.unshard)
        after = [parameter for root in self._roots for parameter in root.parameters()]
        self._whole = {id(part): (part, whole) for part, whole in zip(before, after, strict=True) if is_sharded(part)}
        for part, whole in self._whole.values():
            if whole.requires_grad and whole.dtype is not part.dtype:  # FSDP2 would put it where only it finds it
                stack.callback(whole.register_post_accumulate_grad_hook(partial(self._take, id(part))).remove)

    def _take(self, number: int, whole: torch.Tensor) -> None:
        gradient, whole.grad = whole.grad, None
        if number in self._low:
            self._low[number].add_(gradient)  # type: ignore[arg-type]
        elif gradient is not None:
            self._low[number] = gradient.float()

    def _meet(self) -> None:
        """Gets to know whole parameters, unit by unit."""
        self._whole = {id(part): (part, whole) for unit in self._units for part, whole in unit.pairs}
        if all(id(part) in self._whole for root in self._roots for part in root.parameters() if is_sharded(part)):
            return
        self._whole = {}
        for unit in self._units:
            unit.pairs.clear()
            before = list(unit.module.parameters())
            self._reach_others(unit.module.unshard)
            pairs = zip(before, list(unit.module.parameters()), strict=True)
            unit.pairs.extend((part, whole) for part, whole in pairs if is_sharded(part) and not is_sharded(whole))
            unit.module.reshard()
            self._whole.update({id(part): (part, whole) for part, whole in unit.pairs})

    def _reach_others(self, communicate: Callable[[], None]) -> None:
        try:
            communicate()
        except RuntimeError as error:
            if isinstance(error, torch.OutOfMemoryError):
                raise
            raise self._messages.lost(error) from error

    def _watch(self, number: int, stack: ExitStack) -> None:
        """Has the ranks tell each other before a unit is gathered in a forward or a backward, and before it reduces."""
        unit = self._units[number]

        def before_forward(*_: Any) -> None:
            self._try(unit.bytes)
            self._agree("forward", number)

        def with_inputs(_: Any, args: Any, kwargs: Any) -> None:
            for tensor in _with_graph((args, kwargs)):  # as FSDP2 has wrapped them to reduce when they get a gradient
                tensor.register_hook(lambda _: self._reduces(number))

        def after_forward(_: Any, args: Any, output: Any) -> None:
            for tensor in _with_graph(output):
                tensor.register_hook(lambda _: self._goes_back(number))

        module = unit.module
        stack.callback(module.register_forward_pre_hook(_eager(before_forward), prepend=True).remove)
        stack.callback(module.register_forward_pre_hook(_eager(with_inputs), with_kwargs=True).remove)
        stack.callback(module.register_forward_hook(_eager(after_forward), prepend=True).remove)

    def _try(self, size: int) -> None:
        """Memory for a collective that runs out does so before other ranks begin to wait."""
        with without_modes():
            torch.empty(size, dtype=torch.uint8, device=self.device)

    def _goes_back(self, number: int) -> None:
        if not self._open:
            when_backward_ends(lambda _: self._ends())  # before FSDP2 asks for the same
        if number not in self._open:
            self._open.append(number)
        self._try(max(unit.bytes for unit in self._units))  # FSDP2 gathers the next one, too
        self._agree("backward", number)

    def _reduces(self, number: int) -> None:
        self._open = [one for one in self._open if one != number] or [-1]  # not empty as long as the backward goes on
        self._fill("reduce", [number])

    def _ends(self) -> None:
        waiting, self._open = [number for number in self._open if number >= 0], []
        self._fill("end", waiting)

    def _fill(self, deed: str, numbers: list[int]) -> None:
        """Has all ranks reduce gradients of the same parameters, of zeros where a rank has none."""
        pairs = [pair for number in numbers for pair in self._units[number].pairs]
        if self.counts_nothing:
            for _, whole in pairs:
                if whole.grad is not None:
                    whole.grad.zero_()  # whatever it is: 0 times NaN is NaN
        heard = self._agree(deed, *numbers, gradients=as_text(whole.grad is not None for _, whole in pairs))
        anywhere = [any(flags) for flags in zip(*[as_flags(one["gradients"]) for one in heard], strict=True)]
        for (part, whole), is_there in zip(pairs, anywhere, strict=True):
            if is_there:
                self._reached.add(id(part))
                if whole.grad is None:
                    whole.grad = torch.zeros_like(whole)

    def _agree(self, deed: str, *numbers: int, **more: Any) -> list[dict[str, Any]]:
        """Waits until all ranks are about to do the same."""
        return self._messages.round(Stage.INSIDE, {"does": [deed, *numbers], **more})

    def _rest(self) -> None:
        """Ends what forwards and backwards have begun, also after an exception, and releases all units."""
        for root in self._roots:
            end_of_pass(root)
        self._release()

    def _release(self) -> None:
        for unit in self._units:
            unit.module.reshard()
        for _, whole in self._whole.values():
            whole.grad = None
        self._low, self.counts_nothing = {}, False
        self._open = []

    def known_leaves(self, parameters: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """What a forward has in the place of parameters; see ``Reducer``."""
        return [self._whole.get(id(p), (p, p))[1] for p in parameters]

    def _has_gradient(self, parameters: Sequence[torch.Tensor]) -> list[bool]:
        whole = zip(parameters, self.known_leaves(parameters), strict=True)
        if not self.keeps_step:
            return [id(p) in self._low or leaf.grad is not None for p, leaf in whole]
        return [id(p) in self._reached if is_sharded(p) else p.grad is not None for p in parameters]

    def _ready_to_sum(self, parameters: Sequence[torch.Tensor], sums: Sums) -> Callable[[list[bool], float], None]:
        sum_plain = ready_to_sum([p for p in parameters if not is_sharded(p)], self.group, self._messages.lost)
        parts = [] if self.keeps_step else [p for p in parameters if is_sharded(p)]
        whole = {id(p): self._whole_gradient(p) for p in parts}
        largest = max((bucket.numel * bucket.dtype.itemsize for bucket in buckets_of([*whole.values()])), default=0)
        self._try(2 * largest)

        def sum_(reached: list[bool], scale: float) -> None:
            known = {id(p): is_reached for p, is_reached in zip(parameters, reached, strict=True)}
            sum_plain([known[id(p)] for p in parameters if not is_sharded(p)], 1.0)
            self._release()
            self._scatter([(p, whole.pop(id(p))) for p in parts if known[id(p)]])
            for p in parameters:
                p.grad = p.grad if known[id(p)] else None
            gradients = [local_of(p.grad) for p in parameters if p.grad is not None]
            if scale != 1.0 and gradients:
                torch._foreach_mul_(gradients, scale)

        return sum_

    def _whole_gradient(self, parameter: torch.Tensor) -> torch.Tensor:
        whole = self._whole[id(parameter)][1]
        gradient, whole.grad = self._low.pop(id(parameter), whole.grad), None
        return torch.zeros_like(whole) if gradient is None else gradient

    def _scatter(self, pairs: Sequence[tuple[Any, torch.Tensor]]) -> None:
        """Reduce-scatters whole gradients: each rank keeps its shard of the sum."""
        from torch.distributed.tensor import DTensor

        reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor  # the older name
        owner = {id(gradient): parameter for parameter, gradient in pairs}
        for bucket in buckets_of([gradient for _, gradient in pairs]):
            owners = [owner[id(gradient)] for gradient in bucket.gradients]
            dims = [p.placements[0].dim for p in owners]
            cut = [g.chunk(self._messages.size, dim) for g, dim in zip(bucket.gradients, dims, strict=True)]
            room = [chunks[0].numel() for chunks in cut]
            sent = torch.zeros(self._messages.size, sum(room), dtype=bucket.dtype, device=bucket.device)
            mine = sent.new_empty(sum(room))
            for rank, row in enumerate(sent):
                for chunks, into in zip(cut, row.split(room), strict=True):
                    if rank < len(chunks):
                        into[: chunks[rank].numel()].copy_(chunks[rank].reshape(-1))
            self._reach_others(partial(reduce_scatter, mine, sent.view(-1), group=self.group))
            for p, found in zip(owners, mine.split(room), strict=True):
                part = found[: local_of(p).numel()].view(local_of(p).shape).to(p.dtype, copy=True)
                p.grad = DTensor.from_local(
                    part, p.device_mesh, p.placements, run_check=False, shape=p.shape, stride=p.stride()
                )


def _eager(hook: Any) -> Any:
    """A hook that is not compiled with the module that it is on, as FSDP2's own are not."""
    return torch.compiler.disable(hook) if "torch._dynamo" in sys.modules else hook


def _with_graph(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in any container through which a backward will come."""
    if torch.is_grad_enabled():
        yield from (leaf for _, _, leaf in leaves(value) if isinstance(leaf, torch.Tensor) and leaf.requires_grad)


def _check(model: torch.nn.Module, group: Any) -> None:
    """Refuses parameters that are not sharded by ``fully_shard`` over the ranks of the group."""
    sharded: list[tuple[str, Any]] = [(name, p) for name, p in model.named_parameters() if is_sharded(p)]
    if not sharded:
        raise AnyBatchError("fully_shard was applied to modules without any parameter; leave it out there")
    for name, parameter in sharded:
        mesh = parameter.device_mesh
        if mesh.ndim > 1 or not parameter.placements[0].is_shard():
            raise AnyBatchError(
                f"{name} lies on a mesh of {mesh.ndim} dimensions as {parameter.placements}; expected fully_shard over "
                "all ranks of the group in one dimension, without replicas (HSDP) or tensor parallelism"
            )
        if dist.get_process_group_ranks(mesh.get_group()) != dist.get_process_group_ranks(group):
            raise AnyBatchError(
                f"{name} is sharded over different ranks than those of the group; expected a mesh of all ranks "
                "that share the gradient, or group= with the ranks of the mesh"
            )
        if local_of(parameter).device.type != mesh.device_type:
            raise AnyBatchError(
                f"{name} is sharded with CPUOffloadPolicy; expected shards on the {mesh.device_type}: leave "
                "offload_policy out"
            )


def _on_host(group: Any) -> Any:
    """A group of the same ranks with a backend on the host, if possible."""
    if "gloo" in str(dist.get_backend(group)) or not dist.is_gloo_available():
        return group
    return dist.new_group(dist.get_process_group_ranks(group), backend="gloo")
