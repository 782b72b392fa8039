"""A plan for several ranks, by arithmetic on shapes on one process, without a process group.

The step of one rank is planned as ``anybatch.plan`` does, with as much more or less memory as the rank has less or more
of the model.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from anybatch.errors import BatchError, DoesNotFit
from anybatch.loss.losses import LossFunction
from anybatch.parallel.buckets import Buffers
from anybatch.planning.blocks import blocks_of
from anybatch.planning.devices import budget_of
from anybatch.planning.entrance import plan, subject_of
from anybatch.planning.optimizer import trace_update
from anybatch.planning.subjects import Subject
from anybatch.records.memory import GRADIENTS, OPTIMIZER, PARAMETERS
from anybatch.records.plans import SHARDS, RankPlan, Shard
from anybatch.units import format_bytes

GATHERED = "gathered parameters and buffers"
WORK = "activations, batch and the rest"


def plan_over_ranks(
    model: torch.nn.Module, loss_fn: LossFunction, batch: Any, optimizer: Any = None, *, ranks: int,
    shard: Shard = "ddp", memory: int | float | str, device: torch.device | str | None = None, **options: Any,
) -> RankPlan:  # fmt: skip
    """Plans a step of several ranks, each with a batch like this one, and with a budget of its own.

    The model is whole, and ``shard`` says how it will lie on the ranks; everything else is as in ``anybatch.plan``,
    also what is raised.
    """
    if isinstance(ranks, bool) or not isinstance(ranks, int) or ranks < 1:
        raise BatchError(f"ranks={ranks!r}; expected a whole number of at least 1")
    if shard not in SHARDS:
        raise BatchError(f"shard={shard!r}; expected one of {', '.join(SHARDS)}")
    subject, target = subject_of(
        batch, device, model=model, loss_fn=loss_fn, optimizer=optimizer, memory=memory, **options
    )
    budget = budget_of(memory, target, subject.held_bytes)
    units = _units(subject) if shard != "ddp" else []
    trained = [p for p in subject.parameters if p.requires_grad]
    whole = _bytes(subject.parameters) + _bytes(trained) + _state_bytes(subject, {})
    is_kept = shard == "fsdp2-kept" or len(units) == 1
    held, alone = _shares(subject, units, ranks, is_kept=is_kept)
    spared, alone = whole - sum(held.values()), sum(held.values()) - held[GATHERED] + alone
    beside = alone - sum(held.values()) + held[GATHERED]
    try:
        made = plan(
            model, loss_fn, batch, optimizer, memory=max(budget + spared, 1), device=device, verify="off", **options
        )
    except DoesNotFit as error:
        needed = None if error.needed is None else max(error.needed - spared, alone)
        raise _too_large(ranks, shard, needed, budget, error.modules, held) from None
    if alone > budget:
        raise _too_large(ranks, shard, alone, budget, (), {**held, GATHERED: beside})
    work = max(made.peak_bytes - whole, 0)
    at_peak = {**held, WORK: work} if whole - spared + work >= alone else {**held, GATHERED: beside, WORK: 0}
    return RankPlan(ranks, shard, made, budget, at_peak)


def _units(subject: Subject) -> list[list[torch.Tensor]]:
    """What ``fully_shard`` makes where it is applied to each block and then to the whole; that one is first."""
    taken: set[int] = set()
    units: list[list[torch.Tensor]] = []
    for name in blocks_of(subject.model, subject.blocks):
        units.append([p for p in subject.model.get_submodule(name).parameters() if id(p) not in taken])
        taken.update(id(p) for p in units[-1])
    rest: list[torch.Tensor] = [p for p in subject.model.parameters() if id(p) not in taken]
    return [unit for unit in (rest, *units) if unit]


def _part(parameter: torch.Tensor, ranks: int) -> torch.Tensor:
    """The part that rank 0 has, on ``meta``: ``torch.chunk`` along the first dimension."""
    shape = list(parameter.shape)
    if shape:
        shape[0] = -(-shape[0] // ranks)
    return torch.empty(shape, dtype=parameter.dtype, device="meta", requires_grad=parameter.requires_grad)


def _bytes(tensors: Sequence[torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _state_bytes(subject: Subject, parts: Mapping[int, torch.Tensor]) -> int:
    trained = [position for position, parameter in enumerate(subject.parameters) if parameter.requires_grad]
    return trace_update(subject, trained, parts).state


def _shares(
    subject: Subject, units: Sequence[list[torch.Tensor]], ranks: int, *, is_kept: bool
) -> tuple[dict[str, int], int]:
    """What rank 0 holds, and what it holds in the place of what was gathered while there are no activations."""
    in_parts = {id(p): _part(p, ranks) for unit in units for p in unit}
    parts = [in_parts.get(id(p), p) for p in subject.parameters]
    trained = [p for p in subject.parameters if p.requires_grad]
    held = {PARAMETERS: _bytes(parts), GRADIENTS: _bytes([p for p in parts if p.requires_grad])}
    held |= {OPTIMIZER: _state_bytes(subject, in_parts), GATHERED: 0}
    buffers = Buffers.bytes_for([torch.empty_like(p, device="meta") for p in trained])
    if not units:
        return held, buffers if ranks > 1 else 0
    gathered = [ranks * _bytes([in_parts[id(p)] for p in unit]) for unit in units]
    gradients = [_bytes([p for p in unit if p.requires_grad]) for unit in units]
    if is_kept:  # units arrive one after the other, and gradients are summed in buffers
        held[GATHERED] = sum(gathered) + sum(gradients)
        return held, max(sum(gathered) + max(gathered), sum(gradients) + 2 * buffers)
    # The root stays gathered, a block is, the one before it arrives in a buffer of its own, and the gradients of the
    # block behind it are being reduced in another.
    most = max(zip(gathered[1:], gradients[1:], strict=True))
    held[GATHERED] = gathered[0] + gradients[0] + 2 * most[0] + most[1] + 2 * max(gathered)
    return held, 0


def _too_large(
    ranks: int, shard: str, needed: int | None, budget: int, modules: Sequence[str], held: Mapping[str, int]
) -> DoesNotFit:
    least = "" if needed is None else f" The smallest configuration needs {format_bytes(needed)}."
    parts = dict(held) if needed is None else {**held, WORK: max(0, needed - sum(held.values()))}
    shown = ", ".join(f"{name} {format_bytes(n)}" for name, n in sorted(parts.items(), key=lambda i: -i[1]) if n)
    others = [name for name in SHARDS if name != shard]
    return DoesNotFit(
        f"with {ranks} ranks and {shard}, nothing fits in {format_bytes(budget)} on each.{least} Of these: {shown}. "
        f"Take more ranks, or {' or '.join(others)}",
        needed=needed,
        budget=budget,
        modules=modules,
    )
