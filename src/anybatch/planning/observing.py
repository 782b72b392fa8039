"""Keeps a step whose model lies in parts within a budget, by what its own steps were seen to take.

What FSDP2 does in a forward and a backward can't be traced on fake tensors: it communicates. So the first logical batch
runs in small micro-batches and its peak is measured: of two samples, or in 64 where the device refuses what is over the
budget, so that they are halved. What a step takes on top of what was there before is at most proportional to the
samples of a micro-batch, so no later step is predicted too low, and the size comes nearer to the largest one that fits
with each measured step.
"""

import contextlib
import logging
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from anybatch.accelerators import forget_peaks, is_accelerator, memory_of, reserving_at_most
from anybatch.batch.batches import Splittable
from anybatch.errors import BatchError, DoesNotFit
from anybatch.loss.coupling import Coupled
from anybatch.memory.meter import storages_of
from anybatch.parallel.devices import Devices
from anybatch.planning.devices import Target, budget_of, target_of, usable_bytes
from anybatch.planning.fingerprints import outgrown, shapes_of
from anybatch.planning.following import Follower
from anybatch.planning.microbatches import tensors_in
from anybatch.planning.subjects import Subject
from anybatch.records.plans import Plan, PlanRow
from anybatch.tensors.dispatch import Mode
from anybatch.tensors.dispatch import tensors_in as tensors_among
from anybatch.tensors.shards import is_sharded
from anybatch.units import format_bytes
from anybatch.update.transaction import OwnSizeLimit

logger = logging.getLogger(__name__)

FIRST = 2  # samples; other operations may run for one sample alone
_MOST_AT_FIRST = 64  # micro-batches of the first logical batch on a device that refuses what is over the budget
_FASTEST = 4.0  # times that micro-batches grow from one logical batch to the next
_UNCHANGED = 2  # measured steps without a change, after which nothing is measured any more


class Seen(NamedTuple):
    """What a step was seen to take."""

    samples: int  # of its largest micro-batch
    bytes: int  # at its peak, on top of what was there before
    micro_batches: int  # how many there were

    def needs(self, rows: int, gradients: int) -> int:
        """The bytes of a step whose micro-batches are as large as those that were seen."""
        is_first_split = self.micro_batches == 1 and rows > self.samples
        return max(1, self.bytes + (gradients if is_first_split else 0))

    def size(self, room: int, rows: int, gradients: int) -> int:
        """The samples of a micro-batch that fit, of which there may be more than the logical batch has.

        Args:
            room: bytes that a step may take.
            rows: samples of the logical batch.
            gradients: bytes that a second micro-batch finds there.

        Example:
            >>> Seen(samples=2, bytes=100, micro_batches=4).size(350, 8, 0)
            7
        """
        found = int(min(self.samples * room / self.needs(rows, gradients), self.samples * _FASTEST))
        return found if found >= 1 or self.samples == 1 else 1


class Observing(OwnSizeLimit):
    """What a step on a model in parts follows in the place of a plan; ``subject_of`` describes it for a batch.

    The size of micro-batches follows from what was seen, and is less when memory runs out.
    """

    def __init__(self, subject_of: Callable[[Splittable], Subject], *, memory: Any) -> None:
        super().__init__(None)
        self._subject_of = subject_of
        self._memory = memory
        self._budget = self._usable = self._rows = 0
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._seen: Seen | None = None
        self._unchanged = 0  # measured steps in a row
        self._most: int | None = None  # samples after memory ran out, until it was quiet for a while
        self._subject: Subject | None = None
        self.on_plan: Callable[[], None] | None = None  # no plan is made, whose operations may be others later
        self.plan: Plan | None = None  # the size of micro-batches in force, and what they took

    @property
    def may_grow(self) -> bool:
        """Whether sizes may still change from batch to batch."""
        return self._unchanged < _UNCHANGED

    def shrink(self, tried: float) -> None:
        """Halves the size after memory ran out, and measures again."""
        super().shrink(tried)
        self._most = int(self.value or 1)
        self._unchanged = 0

    def gather(self) -> None:
        """Measures anew, as other steps follow."""
        self._seen, self._unchanged, self.value = None, 0, FIRST

    def resolve(self, largest: float) -> None:
        """Notes a logical batch that went through; the next size follows from what was seen."""
        if self._most is not None:
            self._note_quiet(largest)

    def _grow(self, largest: float) -> None:
        """Has larger micro-batches tried again."""
        self._most, self._unchanged = None, 0

    def prepare(self, splittable: Splittable, clear: Callable[[], None]) -> None:
        """Chooses the size of the micro-batches of a logical batch.

        Raises:
            BatchError: samples are collated, of which each may take another number of bytes; or the loss is coupled.
            DoesNotFit: one sample alone took more than the budget.
        """
        if splittable.is_collated:
            raise BatchError(
                "memory= was given with collate=, and the model is sharded by fully_shard; memory per sample is "
                "measured there, and raw samples differ. Pass micro_batch_size= instead of memory="
            )
        self._subject = None
        if not splittable.rows:
            return
        if isinstance(self._subject_of(splittable).loss_fn, Coupled):
            raise BatchError(
                "memory= was given with Coupled, and the model is sharded by fully_shard; the memory of such a "
                "loss does not follow from the size of a micro-batch. Pass micro_batch_size= instead of memory="
            )
        clear()
        subject = self._subject = self._subject_of(splittable)
        target = target_of(None, subject.settings.device)
        if not self._budget:
            self._budget = budget_of(self._memory, target, subject.held_bytes)
        shapes = shapes_of(subject)
        if not self._shapes or (why := outgrown(self._shapes, shapes)):
            if self._shapes:
                logger.info("measuring again: %s", why)
                self._seen, self._unchanged = None, 0
            self._shapes = shapes
        self._usable = usable_bytes(self._budget, target, "measured") - subject.bytes_beside
        if splittable.rows > self._rows:
            self._rows, self._unchanged = splittable.rows, 0
        self._choose_size(subject, target)

    def _choose_size(self, subject: Subject, target: Target) -> None:
        held, splittable, seen = _before(subject), subject.splittable, self._seen
        gradients = sum(p.numel() * p.element_size() for p in subject.parameters if p.requires_grad)
        is_limited = is_accelerator(subject.settings.device)
        size = max(FIRST, -(-splittable.rows // _MOST_AT_FIRST)) if is_limited else FIRST
        if seen is not None:
            size = seen.size(self._usable - held, splittable.rows, gradients)
            if not size:
                raise self._does_not_fit(held + seen.needs(splittable.rows, gradients))
            size = size if self.may_grow else min(size, seen.samples)
        size = max(1, min(size, self._most or size, int(splittable.largest)))
        self.value = size
        parts, taken = len(splittable.plan(size)), 0 if seen is None else seen.bytes
        row = PlanRow(size, parts, peak_bytes=held + taken, confidence="measured")
        self.plan = Plan(row, budget=self._budget, samples=splittable.rows, device=target.name)

    def _does_not_fit(self, needed: int) -> DoesNotFit:
        beside = self._budget - self._usable
        return DoesNotFit(
            f"nothing fits into {format_bytes(self._budget)}, of which {format_bytes(beside)} is kept free: "
            f"micro-batches of one sample took {format_bytes(needed)} on this rank. Apply fully_shard to smaller "
            "units, recompute blocks with torch.utils.checkpoint, or use more ranks or shorter samples",
            needed=needed + beside, budget=self._budget,
        )  # fmt: skip

    @contextlib.contextmanager
    def confirmed(self, device: torch.device, devices: Devices | None = None) -> Iterator[None]:
        """Measures what a call takes, until the size has stopped changing."""
        if self._subject is None or not self.may_grow:
            yield
            return
        before = _before(self._subject)
        if is_accelerator(device):
            forget_peaks(device)
            with reserving_at_most(self._budget, device):
                yield
            peak = memory_of(device).peak_allocated
        else:
            batches = self._subject.splittable.batches
            with _Peak([*self._subject.tensors_held, *tensors_in(batches)]) as live:
                yield
            peak = live.most
        self._note(peak, before)

    def _note(self, peak: int, before: int) -> None:
        if self.plan is None or self._subject is None:
            return
        parts = self._subject.splittable.plan(self.value)
        samples = max(len(part.samples) for part in parts)
        self._unchanged = self._unchanged + 1 if self._seen is not None and self._seen.samples == samples else 0
        self._seen = Seen(samples, peak - before, len(parts))
        row = replace(self.plan.chosen, micro_batch_size=samples, micro_batches=len(parts), peak_bytes=peak)
        self.plan = replace(self.plan, chosen=row)
        logger.info(
            "micro-batches of %d samples took %s of %s", samples, format_bytes(peak), format_bytes(self._budget)
        )

    def applied(self, model: torch.nn.Module) -> contextlib.AbstractContextManager[None]:
        """Nothing but the size of micro-batches changes."""
        return contextlib.nullcontext()

    refusal = obstacle = None
    """No batch runs whole instead: each rank has a part of it anyway."""

    def keep_whole(self, refusal: Exception) -> None:
        """Leaves a refusal as it is."""

    def release(self) -> None:
        """Lets go of the logical batch."""
        self._subject = None

    def plan_state(self) -> dict[str, Any]:
        """What was seen, as plain values."""
        seen = None if self._seen is None else tuple(self._seen)
        growth = {"seen": seen, "quiet": self._unchanged, "most": self._most}
        return {"shapes": dict(self._shapes), "rows": self._rows, "growth": growth}

    def load_plan_state(self, state: Mapping[str, Any]) -> None:
        """Goes on with what ``plan_state`` gave, or measures anew if a plan was saved."""
        if "growth" not in state:
            return
        self._shapes, self._rows, growth = dict(state["shapes"]), state["rows"], state["growth"]
        self._seen = None if growth["seen"] is None else Seen(*growth["seen"])
        self._unchanged, self._most = growth["quiet"], growth["most"]


class _Peak(Mode):
    """The most bytes alive after any operation, where storages shrink and grow, as those of gathered parameters do."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._known: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self.most = 0
        self._look(tensors)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs the operation and looks at all storages."""
        result = func(*args, **(kwargs or {}))
        self._look(tensors_among([result]))
        return result

    def _look(self, made: list[torch.Tensor]) -> None:
        for new in (storage for one in made for storage in storages_of(one)):
            if new.device.type != "meta":
                self._known[new._cdata] = weakref.ref(new)
        alive = [storage for reference in self._known.values() if (storage := reference()) is not None]
        if len(self._known) > 2 * len(alive):
            self._known = {storage._cdata: weakref.ref(storage) for storage in alive}
        self.most = max(self.most, sum(storage.nbytes() for storage in alive))


def _before(subject: Subject) -> int:
    device = subject.settings.device
    return memory_of(device).allocated if is_accelerator(device) else subject.held_bytes


AnyFollower = Follower | Observing


def follower_for(
    model: torch.nn.Module, subject_of: Callable[[Splittable], Subject], *, memory: Any, plan: Plan | None
) -> AnyFollower:
    """What a step follows.

    Raises:
        BatchError: a plan for a model in parts.
    """
    if not any(is_sharded(parameter) for parameter in model.parameters()):
        return Follower(subject_of, memory=memory, plan=plan)
    if plan is not None:
        raise BatchError(
            "plan= was given, and the model is sharded by fully_shard; plans are made for whole models. Pass memory=, "
            "under which micro-batches grow as far as the budget allows; or micro_batch_size=, for which "
            "`anybatch plan train.py --ranks N --shard fsdp2` finds a value"
        )
    return Observing(subject_of, memory=memory)
