"""Ranks that have a part of each parameter, by FSDP2."""

import contextlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist

from anybatch.errors import AnyBatchError, BatchError
from anybatch.gradient.reducing import Joint
from anybatch.gradient.sums import Sums
from anybatch.gradient.weights import Weights
from anybatch.parallel.buckets import ready_to_sum
from anybatch.parallel.keeping import Keeping
from anybatch.parallel.messages import Messages
from anybatch.parallel.ranks import INSIDE, Ranks
from anybatch.parallel.sharding import Shards, scale_
from anybatch.tensors.precision import ACCUMULATED_AFTER, LOW_PRECISION
from anybatch.tensors.shards import is_sharded

_NOTHING = ("", 0)


class ShardedRanks(Ranks):
    """The ranks of a process group, each with a part of the parameters.

    Where every unit may stay gathered from its forward to its backward, all are gathered before the first micro-batch
    and reduced after the last, and nothing is communicated between. Otherwise units are gathered and reduced within
    each forward and backward; each time the ranks first tell each other what they are about to do. A rank that is
    about to do something else, or has no micro-batch left, takes part in what most of them do; one that failed says so
    in its place.

    Args:
        model: with its wrappers.
        group: the process group.
        device: where the model lies.
        shards: what FSDP2 has in it.
    """

    is_sharded = True

    def __init__(self, model: torch.nn.Module, group: Any, device: torch.device, shards: Shards) -> None:
        super().__init__(model, group, device)
        self._shards = shards
        if dist.get_process_group_ranks(group) != dist.get_process_group_ranks(shards.process_group):
            raise AnyBatchError(
                "fully_shard was applied over other ranks than those of the group; expected a mesh of all ranks that "
                "take the gradient together, or group= with the ranks of the mesh"
            )
        self._messages = Messages(_on_host(group), device)
        self._reached: set[int] = set()
        self._own_sums = 0
        self.keeping = Keeping(shards.whole_bytes)
        self.follow_model()

    @property
    def keeps_step(self) -> bool:
        """Whether ranks communicate within forwards and backwards; see ``Reducer``."""
        return not (self._stays_whole or self.keeping.is_kept)

    @property
    def own_sums(self) -> Callable[[], int] | None:
        """Says how often gradients of this rank were summed within its own backwards; see ``Reducer``."""
        return (lambda: self._own_sums) if self.keeps_step else None

    def follow_model(self) -> None:
        """Follows ``set_reshard_after_forward``, which may be called between two steps."""
        self._shards.follow_model()
        self._stays_whole = self._shards.stays_whole
        self._kind = "whole" if self._stays_whole else "sharded"
        self.keeping.is_free = self._shards.can_sum and not self._stays_whole
        self.keeping.begin()
        if not (self._stays_whole or self._shards.can_sum):
            raise AnyBatchError(
                "this version of torch can't sum in the reductions of fully_shard (set_force_sum_reduction_for_comms); "
                "call model.set_reshard_after_forward(False), which keeps parameters gathered during a step, or update "
                "torch"
            )

    @contextlib.contextmanager
    def call(self, verb: str, parameters: Sequence[torch.Tensor], **options: Any) -> Iterator[None]:
        """A context for one logical batch; see ``Reducer``."""
        with super().call(verb, parameters, **options):
            try:
                yield
            finally:
                self._forget()

    def _forget(self) -> None:
        for unit in self._shards.units:
            unit.forget_gradients()

    def weights(self, local: Weights, rows: int) -> Weights:
        """Weighs the micro-batches by the counts of all ranks; see ``Ranks``."""
        if not self.keeps_step:
            self._shards.try_memory()
        weights = super().weights(local, rows)
        low = next((p for p in self._parameters if is_sharded(p) and p.dtype in LOW_PRECISION), None)
        if self.keeps_step and low is not None and self._passes > ACCUMULATED_AFTER:
            self._messages.is_open = False
            raise BatchError(
                f"parameters of {low.dtype} lie on several ranks, and a rank has {self._passes} micro-batches, whose "
                f"reduced gradients would be added up in {low.dtype}; use fully_shard with parameters of float32 and "
                "mp_policy=MixedPrecisionPolicy(param_dtype=...), or model.set_reshard_after_forward(False)"
            )
        return weights

    def apart(self, modules: Iterable[torch.nn.Module], *, differentiate: bool = True) -> AbstractContextManager[None]:
        """Takes the communication within modules in hand.

        Args:
            modules: that the loss runs through.
            differentiate: whether gradients are taken.
        """
        return self._in_step(modules, differentiate) if self.keeps_step else self._gathered(modules, differentiate)

    @contextlib.contextmanager
    def _gathered(self, modules: Iterable[torch.nn.Module], differentiate: bool) -> Iterator[None]:
        """All units are gathered, so that nothing has to be communicated."""
        shards = self._shards
        self._forget()
        with super().apart(modules), shards.taken_over(reduces=False, stays_whole=True):
            try:
                for unit in shards.units:
                    self._reach_others(unit.gather)
                yield
            except BaseException:
                self._forget()
                raise
            finally:
                shards.rest()

    @contextlib.contextmanager
    def _in_step(self, modules: Iterable[torch.nn.Module], differentiate: bool) -> Iterator[None]:
        """Units are gathered and reduced when they are used, on all ranks together."""
        shards = self._shards
        self._forget()
        self._reached = set()
        with super().apart(modules), shards.taken_over(reduces=True):
            try:
                self._reach_others(shards.meet)
                with shards.watched(lambda number: self._agree_on(("gather", number)), self._reduces):
                    yield
                self._follow()
            finally:
                shards.rest()

    def _reach_others(self, communicate: Callable[[], None]) -> None:
        try:
            communicate()
        except RuntimeError as error:
            if isinstance(error, torch.OutOfMemoryError):
                raise
            raise self._messages.lost(error) from error

    def _reduces(self, number: int, reached: Sequence[torch.Tensor]) -> None:
        self._reached.update(id(parameter) for parameter in reached)
        self._own_sums += bool(reached)
        self._agree_on(("reduce", number))

    def _agree_on(self, mine: tuple[str, int]) -> None:
        """Returns when all ranks are about to do this, of which those that wanted something else only take part."""
        while (chosen := self._chosen(mine)) != mine:
            self._serve(chosen)

    def _follow(self) -> None:
        """Takes part in what the others do, until all are through."""
        while (chosen := self._chosen(_NOTHING)) != _NOTHING:
            self._serve(chosen)

    def _chosen(self, mine: tuple[str, int]) -> tuple[str, int]:
        """What most ranks are about to do; of as many the first rank's."""
        heard = [tuple(one["does"]) for one in self._messages.round(INSIDE, {"does": mine})]
        wanted = Counter(one for one in heard if one != _NOTHING)
        if not wanted:
            return _NOTHING
        (deed, number), _ = wanted.most_common(1)[0]
        return deed, number

    def _serve(self, chosen: tuple[str, int]) -> None:
        unit = self._shards.units[chosen[1]]
        self._reach_others(unit.serve_gather if chosen[0] == "gather" else unit.serve_reduce)

    def in_forward(self, parameters: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """The parameters that get the gradients of a pass; see ``Reducer``."""
        return parameters if self.keeps_step else self._shards.whole(parameters)

    def known_leaves(self, parameters: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """What a forward has in the place of parameters; see ``Reducer``."""
        return self._shards.whole(parameters)

    def totals(self, local: Any) -> dict[str, float]:
        """Adds up counts that were known only at the end; see ``Ranks``."""
        if self.keeps_step:
            self._follow()
        return super().totals(local)

    def gathered(self, outputs: Any, gets: Sequence[torch.Tensor | None], batch: Any) -> Joint:
        """The outputs of all ranks, which have all encoded their samples; see ``Ranks``."""
        if self.keeps_step:
            self._follow()
        return super().gathered(outputs, gets, batch)

    def given_back(self, leaves: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """The gradients of gathered outputs, of which all ranks have computed their blocks; see ``Ranks``."""
        if self.keeps_step:
            self._follow()
        return super().given_back(leaves)

    def bytes_beside(self, modules: Sequence[torch.nn.Module], parameters: Sequence[torch.Tensor]) -> int:
        """The bytes that it takes to take part in what others do, at any time; see ``Reducer``."""
        return max(unit.served_bytes for unit in self._shards.units) if self.keeps_step else 0

    def _has_gradient(self, parameters: Sequence[torch.Tensor]) -> list[bool]:
        return [self._has_one(p) if self._shards.has(p) else p.grad is not None for p in parameters]

    def _has_one(self, parameter: torch.Tensor) -> bool:
        return id(parameter) in self._reached if self.keeps_step else self._shards.has_gradient(parameter)

    def _ready_to_sum(self, parameters: Sequence[torch.Tensor], sums: Sums) -> Callable[[list[bool], float], None]:
        plain = [p for p in parameters if not self._shards.has(p)]
        if not self.keeps_step and sums.closing_scale is not None:
            for unit in self._shards.units:
                unit.scale_accumulated_(sums.closing_scale)
        sum_plain = ready_to_sum(plain, self.group, self._messages.lost)

        def sum_(reached: list[bool], scale: float) -> None:
            known = {id(p): is_reached for p, is_reached in zip(parameters, reached, strict=True)}
            scale = scale if self.keeps_step else 1.0
            scale_([p.grad for p in plain if p.grad is not None], scale)
            sum_plain([known[id(p)] for p in plain], scale)
            if not self.keeps_step:
                self._reduce(known)
            for p in parameters:
                if self._shards.has(p) and not known[id(p)]:
                    p.grad = None
            mine = [p.grad for p in parameters if self._shards.has(p) and p.grad is not None]
            scale_(mine, scale * self._shards.factor)

        return sum_

    def _reduce(self, reached: dict[int, bool]) -> None:
        """Sums what the last pass left, unit by unit."""
        with self._shards.taken_over(reduces=True):
            for unit in self._shards.units:
                wanted = [reached.get(id(p), False) for p in unit.parameters]
                if any(wanted):
                    unit.fill_(wanted)
                    self._reach_others(unit.reduce)
            self._shards.rest()


def _on_host(group: Any) -> Any:
    """A group of the same ranks whose messages don't wait for a device, if there can be one."""
    if "gloo" in str(dist.get_backend(group)) or not dist.is_gloo_available():
        return group
    return dist.new_group(dist.get_process_group_ranks(group), backend="gloo")
