"""Keeps a step whose model lies in parts within a budget, by what its own steps were seen to take.

What FSDP2 does in a forward and a backward can't be traced on fake tensors: it communicates. So the first logical batch
runs in micro-batches of two samples and its peak is measured; from then on micro-batches grow as far as the last peak
allows. Once their size has settled, steps are timed; where everything gathered fits too, that is tried, and the faster
way is taken.
"""

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch

from anybatch.errors import BatchError, DoesNotFit
from anybatch.gradient.coupling import Coupled
from anybatch.parallel.devices import Devices
from anybatch.planning.devices import Target, allocator_within, budget_of, target_of, usable_bytes
from anybatch.planning.fingerprints import outgrown, shapes_of
from anybatch.planning.following import Follower
from anybatch.planning.growing import Seen
from anybatch.planning.microbatches import tensors_in
from anybatch.planning.subjects import Subject
from anybatch.planning.ways import Ways
from anybatch.records.plans import Plan, PlanRow
from anybatch.tensors.batches import Splittable
from anybatch.tensors.meter import LiveBytes, storages_of
from anybatch.tensors.optimizers import state_tensors
from anybatch.tensors.shards import is_sharded
from anybatch.units import format_bytes
from anybatch.update.transaction import OwnSizeLimit
from anybatch.update.weakmethods import Owner

logger = logging.getLogger(__name__)


class ObservedLimit(OwnSizeLimit):
    """The size of micro-batches as it follows from what was seen, and less of it when memory runs out.

    Args:
        follower: is told of it.
    """

    def __init__(self, follower: "Observing") -> None:
        super().__init__(None)
        self._owner = Owner(follower)

    @property
    def _follower(self) -> "Observing":
        return self._owner()

    def shrink(self, tried: float) -> None:
        """Goes on in parts after memory ran out with everything gathered; otherwise halves the size.

        Args:
            tried: the largest micro-batch of the attempt.
        """
        if not self.relieve():
            super().shrink(tried)
            self._follower.ran_out(int(self.value or 1))

    def relieve(self) -> bool:
        """Goes on in parts, where everything was gathered."""
        return self._follower.goes_on_in_parts()

    def settle(self, largest: float) -> None:
        """Nothing: the next size follows from what was seen.

        Args:
            largest: what the whole batch would have been as one micro-batch.
        """


class Observing:
    """What a step on a model in parts follows in the place of a plan.

    Args:
        subject_of: describes the step for a logical batch.
        memory: the budget as the user gave it.

    Attributes:
        plan: the size of the micro-batches that is in force, and what they took; ``None`` before the first batch.
        limit: the size of micro-batches.
    """

    def __init__(self, subject_of: Callable[[Splittable], Subject], *, memory: Any) -> None:
        self._subject_of = subject_of
        self._memory = memory
        self._budget = 0
        self._usable = 0
        self._rows = 0
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._ways = Ways()
        self._subject: Subject | None = None
        self.plan: Plan | None = None
        self.limit = ObservedLimit(self)

    @property
    def may_grow(self) -> bool:
        """Whether sizes may still change from batch to batch."""
        return self._ways.growth.may_go_on

    def prepare(self, splittable: Splittable, clear: Callable[[], None]) -> None:
        """Chooses the size of the micro-batches of a logical batch.

        Args:
            splittable: the batch.
            clear: takes gradients off, since they would count as there before.

        Raises:
            BatchError: samples are collated, of which each may take another number of bytes; or the loss is coupled.
            DoesNotFit: one sample alone took more than the budget.
        """
        if splittable.is_collated:
            raise BatchError(
                "memory= was given with collate=, and the model is sharded by fully_shard; what a sample takes is "
                "measured there, and samples of raw data differ. Pass micro_batch_size= instead of memory="
            )
        self._subject = None
        if not splittable.rows:
            return
        if isinstance(self._subject_of(splittable).loss_fn, Coupled):
            raise BatchError(
                "memory= was given with Coupled, and the model is sharded by fully_shard; what such a loss takes does "
                "not follow from the size of a micro-batch. Pass micro_batch_size= instead of memory="
            )
        clear()
        subject = self._subject = self._subject_of(splittable)
        target = target_of(None, subject.settings.device)
        if not self._budget:
            self._budget = budget_of(self._memory, target, _held(subject))
        shapes = shapes_of(subject)
        if not self._shapes or (why := outgrown(self._shapes, shapes)):
            if self._shapes:
                logger.info("measuring again: %s", why)
                self._ways.begin_again()
            self._shapes = shapes
        held, usable = _before(subject), usable_bytes(self._budget, target, "measured")
        gradients = _whole_gradients(subject)
        self._ways.choose(subject.settings.reducer.keeping, usable - held, splittable.rows, gradients)
        self._usable = usable - subject.bytes_beside
        if splittable.rows > self._rows:
            self._rows = splittable.rows
            self._ways.growth.measure_again()
        self._ways.growth.count()
        self._choose_size(subject, target, held)

    def _choose_size(self, subject: Subject, target: Target, held: int) -> None:
        growth, splittable, gradients = self._ways.growth, subject.splittable, _whole_gradients(subject)
        size = growth.size(self._usable - held, splittable.rows, gradients)
        if not size:
            raise self._does_not_fit(held + growth.needs(splittable.rows, gradients))
        size = max(1, min(size, int(splittable.largest)))
        self.limit.value = size
        parts = len(splittable.plan(size))
        seen = 0 if growth.seen is None else growth.seen.bytes
        row = PlanRow(size, parts, peak_bytes=held + seen, confidence="measured")
        self.plan = Plan(row, budget=self._budget, samples=splittable.rows, device=target.name)

    def _does_not_fit(self, needed: int) -> DoesNotFit:
        beside = self._budget - self._usable
        return DoesNotFit(
            f"nothing fits into {format_bytes(self._budget)}, of which {format_bytes(beside)} are kept free: "
            f"micro-batches of one sample took {format_bytes(needed)} on this rank. Apply fully_shard to smaller "
            "units, recompute blocks with torch.utils.checkpoint, or use more ranks or shorter samples",
            needed=needed + beside, budget=self._budget,
        )  # fmt: skip

    @contextlib.contextmanager
    def confirmed(self, device: torch.device, devices: Devices | None = None) -> Iterator[None]:
        """Measures what a call takes until the size settles, and then its time until the way is chosen.

        Args:
            device: where the model lies.
            devices: never given.
        """
        if self._subject is None or not self.may_grow:
            rows = 0 if self._subject is None else self._subject.splittable.rows
            with self._ways.timed(device, rows):
                yield
            return
        before, growth = _before(self._subject), self._ways.growth
        if device.type == "cuda":
            with allocator_within(self._budget, device):
                yield
            peak = torch.cuda.max_memory_allocated(device)
        else:
            batches = self._subject.splittable.batches
            with _Peak([*_tensors(self._subject), *tensors_in(batches)]) as live:
                yield
            peak = live.most
        if self._ways.went_as_chosen and growth is self._ways.growth:
            self._note(peak, before)

    def _note(self, peak: int, before: int) -> None:
        if self.plan is None or self._subject is None:
            return
        parts = self._subject.splittable.plan(self.limit.value)
        samples = max(len(part.samples) for part in parts)
        self._ways.growth.note(Seen(samples, peak - before, len(parts)))
        row = replace(self.plan.chosen, micro_batch_size=samples, micro_batches=len(parts), peak_bytes=peak)
        self.plan = replace(self.plan, chosen=row)
        logger.info(
            "micro-batches of %d samples took %s of %s", samples, format_bytes(peak), format_bytes(self._budget)
        )

    def ran_out(self, most: int) -> None:
        """Notes that memory ran out.

        Args:
            most: the samples that a micro-batch has from now on at most.
        """
        self._ways.growth.ran_out(most)

    def goes_on_in_parts(self) -> bool:
        """After memory ran out with everything gathered, takes the other way; says whether it was that."""
        size = self._ways.give_up_keeping()
        if size is not None:
            self.limit.value = size
        return size is not None

    def applied(self, model: torch.nn.Module) -> contextlib.AbstractContextManager[None]:
        """Nothing is traded but the size of micro-batches.

        Args:
            model: the model.
        """
        return contextlib.nullcontext()

    def release(self) -> None:
        """Lets go of the logical batch."""
        self._subject = None

    def state_dict(self) -> dict[str, Any]:
        """What was seen, as plain values."""
        return {"shapes": dict(self._shapes), "rows": self._rows, "ways": self._ways.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on with what ``state_dict`` gave, or measures anew if a plan was saved."""
        if "ways" in state:
            self._shapes, self._rows = dict(state["shapes"]), state["rows"]
            self._ways.load_state_dict(state["ways"])


class _Peak(LiveBytes):
    """The most bytes alive after any operation, where storages shrink and grow, as those of gathered parameters do.

    Args:
        tensors: that are alive before.
    """

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        super().__init__(tensors)
        self.most = self.live_bytes()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs the operation and looks at all storages."""
        result = super().__torch_dispatch__(func, types, args, kwargs)
        self.most = max(self.most, self.live_bytes())
        return result

    def live_bytes(self) -> int:
        """The bytes that are alive now."""
        storages = [reference() for _, reference in list(self._alive.values())]
        return sum(storage.nbytes() for storage in storages if storage is not None)


def _tensors(subject: Subject) -> list[torch.Tensor]:
    found = [*subject.parameters, *(b for root in subject.roots for b in root.buffers())]
    found += [p.grad for p in subject.parameters if p.grad is not None]
    return [*found, *(t for one in subject.optimizers for t in state_tensors(one))]


def _held(subject: Subject) -> int:
    """Bytes of what lies on this process: parts of parameters, gradients and optimizer state; buffers and the batch."""
    storages = {s._cdata: s.nbytes() for tensor in _tensors(subject) for s in storages_of(tensor)}
    return sum(storages.values()) + subject.batch_bytes


def _before(subject: Subject) -> int:
    device = subject.settings.device
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else _held(subject)


def _whole_gradients(subject: Subject) -> int:
    return sum(p.numel() * p.element_size() for p in subject.parameters if p.requires_grad)


AnyFollower = Follower | Observing


def follower_for(
    model: torch.nn.Module, subject_of: Callable[[Splittable], Subject], *, memory: Any, plan: Plan | None
) -> AnyFollower | None:
    """What a step follows.

    Args:
        model: whole, or in parts.
        subject_of: describes the step for a logical batch.
        memory: the budget as the user gave it, or ``None``.
        plan: a plan that was made before, or ``None``.

    Raises:
        BatchError: a plan for a model in parts.
    """
    if memory is None and plan is None:
        return None
    if not any(is_sharded(parameter) for parameter in model.parameters()):
        return Follower(subject_of, memory=memory, plan=plan)
    if plan is not None:
        raise BatchError(
            "plan= was given, and the model is sharded by fully_shard; plans are made for whole models. Pass memory=, "
            "under which micro-batches grow as far as the budget allows; or micro_batch_size=, for which "
            "`anybatch plan train.py --ranks N --shard fsdp2` finds a value"
        )
    return Observing(subject_of, memory=memory)
