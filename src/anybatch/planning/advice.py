"""What a plan says in words, and what would make a step fit that does not: each way is planned before it is named."""

import contextlib
import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

import torch

from anybatch.errors import AnyBatchError, DoesNotFit
from anybatch.loss.losses import InPieces
from anybatch.planning.curve import Peak
from anybatch.planning.subjects import Behaviour, Subject
from anybatch.records.plans import ModuleShare, PlanRow
from anybatch.tensors.optimizers import state_tensors
from anybatch.units import format_bytes
from anybatch.update.batchnorm import coupling_modules
from anybatch.update.freezing import freeze
from anybatch.update.refusals import named

logger = logging.getLogger(__name__)

_LEAST = 1024  # bytes of a budget; what is less was meant in another unit
_COUNT = "the count= of the whole batch"
_IN_CHUNKS = "A loss in chunks of time, anybatch.OverTime(chunk_loss, state), has the activations of one chunk only. "
_SMALLER = "Shorter or smaller samples, a smaller model or autocast=torch.bfloat16 may help; none of these was tried"
_LIGHTER = "a count= that allocates fewer tensors, or counting in the loader,"


def binding_of(peak: Peak, hint: str, floor_size: float | None) -> str:
    """Says what the peak consists of, and what would lower it."""
    largest = max(peak.by_category, key=lambda name: peak.by_category[name], default="")
    share = f"{format_bytes(peak.by_category.get(largest, 0))} of them {largest}"
    what, helps = (
        "the optimizer's step",
        "an optimizer with less state" if peak.has_state else "training fewer parameters",
    )
    if peak.is_count:
        what, helps = _COUNT, _LIGHTER
    floor = f"{format_bytes(peak.floor)}, which only {helps} would lower"
    if peak.stage == "count":
        return f"Peak: {peak.operation}, {format_bytes(peak.total)}, {share}. Only {_LIGHTER} helps."
    if peak.stage == "update":
        return f"Peak: {peak.operation} in the optimizer's step, {format_bytes(peak.total)}, {share}: {floor}."
    where = f"the {peak.stage} of {peak.module}" if peak.module else f"the {peak.stage}"
    if floor_size is not None:
        hint += f" A smaller micro-batch saves nothing below {floor_size:g}: {what} is the peak then, with"
    else:
        hint += f" T{what[1:]} needs"
    return f"Peak: {peak.operation} in {where}, {format_bytes(peak.total)}, {share}.{hint} {floor}."


@dataclass(frozen=True)
class Room:
    """The room that there is."""

    budget: int  # bytes, without those beside the plan
    beside: int  # bytes that summing gradients over ranks and workspaces of libraries take
    usable: Callable[[int], int]  # gives the bytes of a budget that a plan may take

    def needed(self, peak: int) -> int:
        """The smallest budget that a peak fits in, with what is kept free and what is taken beside it."""
        share = self.usable(10**15) / 10**15
        found = math.ceil(peak / share)
        while self.usable(found) < peak:
            found += 1
        return found + self.beside

    def refusal(self, text: str, needed: int, modules: Sequence[str] = ()) -> DoesNotFit:
        """The error for a budget that nothing fits in."""
        whole = self.budget + self.beside
        unit = f' (a number without a unit is in bytes; did you mean "{whole}GiB"?)' if whole < _LEAST else ""
        return DoesNotFit(
            f"nothing fits into {format_bytes(whole)}{unit}{text}", needed=needed, budget=whole, modules=modules
        )


def does_not_fit(
    smallest: PlanRow, peak: Peak, room: Room, needed: int, shares: Sequence[ModuleShare],
    remedies: Callable[[Sequence[ModuleShare]], str],
) -> DoesNotFit:  # fmt: skip
    """The error where the way with the least memory is known; ``remedies`` is given the blocks that hold the most."""
    holders = sorted(shares, key=lambda share: -(share.parameter_bytes + share.activation_bytes))[:5]
    held = ", ".join(
        f"{share.name} ({format_bytes(share.parameter_bytes)} parameters, {format_bytes(share.activation_bytes)} kept)"
        for share in holders
    )
    if peak.floor > room.usable(room.budget) and peak.is_count:
        remedy = f"T{_COUNT[1:]} alone takes this; {_LIGHTER} helps"
    else:
        remedy = remedies(holders).lstrip()
    free, takes, reserves = room.budget - room.usable(room.budget), smallest.peak_bytes + room.beside, ""
    if smallest.reserved_bytes:
        reserved = format_bytes(smallest.reserved_bytes + room.beside)
        reserves = f" of tensors, for which the allocator reserves {reserved}"
    at_peak = {**peak.by_category, "buckets and workspaces of libraries": room.beside}
    listed = ", ".join(f"{name} {format_bytes(n)}" for name, n in sorted(at_peak.items(), key=lambda i: -i[1]) if n)
    return room.refusal(
        f"{f' ({format_bytes(free)} of it is kept free)' if free > 0 else ''}: the smallest configuration "
        f"({smallest.optimizations or 'no memory optimization'}, micro-batches of {smallest.micro_batch_size:g}) "
        "needs "
        f"{format_bytes(takes)}{reserves}{'' if needed == takes else f', so give at least {format_bytes(needed)}'}. "
        f"At its peak: {listed}. The blocks that hold most: "
        f"{held or 'none were found: there are none, or they run more than once per loss'}. {remedy}",
        needed, [share.name for share in holders],
    )  # fmt: skip


def stopped(reached: int, enough: int | None, room: Room, remedies: Callable[[int], str], hint: str = "") -> DoesNotFit:
    """The error where not even the smallest configuration runs for real.

    Its run had reached so many bytes when it was stopped; ``enough`` is the budget that it needs, ``None`` where that
    is not known. ``remedies`` is given the one or the other.
    """
    needed = enough or room.needed(reached)
    known = "" if enough else (
        " at least, possibly more; a plan for a larger budget says how much (plan.smallest_bytes)"
    )  # fmt: skip
    return room.refusal(
        ": the step can't be traced without running it, and the smallest micro-batch, with everything allowed "
        f"recomputed, was stopped before it exceeded that. It needs {format_bytes(needed)}{known}. "
        f"{hint}{' ' if hint else ''}{remedies(needed)}",
        needed,
    )


_PATIENCE = 15.0  # seconds after which no further way out is planned
_MOST_FROZEN = 2
_OF_A_WEIGHT = 4  # its gradient, two moments and a master copy are the most that freezing saves for each of its bytes


@dataclass(frozen=True)
class _Remedy:
    """A way out."""

    text: str  # what the user writes
    subject: Subject  # the step with it
    # what has to be done while it is planned
    during: Callable[[], AbstractContextManager[object]] = contextlib.nullcontext


def what_helps(
    subject: Subject,
    holders: Sequence[ModuleShare],
    needed: int,
    budget: int,
    activations: int,
    least: Callable[[Subject], int] | None,
) -> str:
    """Says why nothing is split, if nothing is, and what would help.

    ``activations`` are the bytes of them at the peak of the smallest configuration; ``least`` gives the smallest budget
    for a step, and is ``None`` where nothing is to be tried.
    """
    reasons = [text for text in (why_whole(subject),) if text]
    tried, late, begun = list[tuple[int, str]](), list[str](), time.monotonic()
    for way in _remedies(subject, holders, needed - budget, activations) if least is not None else ():
        if time.monotonic() - begun > _PATIENCE:
            late.append(way.text)
            continue
        try:
            with way.during():
                tried.append((least(way.subject), way.text))  # type: ignore[misc]
        except (AnyBatchError, RuntimeError, TypeError, ValueError) as error:  # it can't be done with this step
            logger.info("%s was not tried to the end (%s: %.100s)", way.text, type(error).__name__, error)
    fits = [f"{text} needs {format_bytes(size)}" for size, text in tried if size <= budget]
    helps = [f"{text} needs {format_bytes(size)}" for size, text in sorted(tried) if budget < size < needed]
    more = f". Not planned, for lack of time: {'; '.join(late)}" if late else ""
    if fits:
        return " ".join([*reasons, f"These were planned, and fit: {'; '.join(fits)}{more}"])
    also = f"; of what was planned, these need less, but none fits alone: {'; '.join(helps)}" if helps else ""
    smaller = "Smaller samples or a smaller model are needed"
    if subject.is_recurrent or least is None:
        smaller = f"{_IN_CHUNKS if _goes_in_chunks(subject) else ''}{_SMALLER}"
    return " ".join([*reasons, f"{smaller}{also}{more}"])


def why_whole(subject: Subject) -> str:
    """Why a batch is not split; empty if it may be."""
    modules = coupling_modules(*subject.roots)
    if subject.splittable.obstacle is not None:
        return f"The batch can't be split: {subject.splittable.obstacle}."
    if subject.splittable.rows == 1:
        return "The batch is one sample, which is not split."
    if subject.is_coupled:
        return "The batch is not split, since its step does not add up over samples."
    if subject.splits or not modules:
        return ""
    verb = "is" if len(modules) == 1 else "are"
    return (
        f"The batch is not split, since {named(modules)} {verb} in training mode and normalise"
        f"{'s' if len(modules) == 1 else ''} by all its samples."
    )


def _remedies(subject: Subject, holders: Sequence[ModuleShare], excess: int, activations: int) -> Iterator[_Remedy]:
    def other(**changes: object) -> Subject:
        return replace(subject, behaviour=Behaviour(), **changes)  # type: ignore[arg-type]

    if subject.batch_norm == "refuse" and not subject.splits and not subject.is_coupled:
        for policy in ("ghost", "frozen"):
            yield _Remedy(f'batch_norm="{policy}"', other(batch_norm=policy))
    # A half of the activations is the most that it saves in any configuration.
    if (
        activations > excess
        and subject.settings.autocast is None
        and any(p.dtype is torch.float32 for p in subject.parameters)
    ):
        settings = replace(subject.settings, autocast=torch.bfloat16)
        yield _Remedy("autocast=torch.bfloat16", other(settings=settings))
    if subject.optimizers and not all(map(_holds_nothing, subject.optimizers)):
        parameters = [p for one in subject.optimizers for group in one.param_groups for p in group["params"]]
        plain = torch.optim.SGD(parameters, lr=1e-3)
        yield _Remedy("torch.optim.SGD without momentum", other(optimizers=[plain]))
    names = {name for name, module in subject.model.named_modules() if name and any(True for _ in module.parameters())}
    known = [one for one in holders if one.name in names][:_MOST_FROZEN]
    # Of one of many equal blocks it is known without a plan that it holds less than what is missing.
    for name in [one.name for one in known if _OF_A_WEIGHT * one.parameter_bytes + one.activation_bytes > excess]:
        yield _Remedy(
            f'anybatch.freeze(model, "{name}")',
            other(),
            lambda name=name: _frozen(subject.model, name),  # type: ignore[misc]
        )


def _goes_in_chunks(subject: Subject) -> bool:
    """Whether the recurrent layers of a step take time chunk by chunk, each from the state of the one before."""
    layers = [one for one in subject.modules if isinstance(one, torch.nn.RNNBase)]
    is_one_way = all(one.batch_first and not one.bidirectional for one in layers)
    return bool(layers) and is_one_way and not isinstance(subject.loss_fn, InPieces)


def _holds_nothing(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer has no state, and will have none."""
    is_plain = type(optimizer) is torch.optim.SGD and not any(group["momentum"] for group in optimizer.param_groups)
    return is_plain and not state_tensors(optimizer)


@contextlib.contextmanager
def _frozen(model: torch.nn.Module, name: str) -> Iterator[None]:
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    handle = freeze(model, name)
    try:
        yield
    finally:
        handle.remove()
        for parameter, gradient in gradients:
            parameter.grad = gradient
