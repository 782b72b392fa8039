"""A plan for several ranks, made on one process, without a process group."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from anybatch.errors import BatchError, DoesNotFit
from anybatch.gradient.accumulate import Settings
from anybatch.gradient.losses import LossFunction
from anybatch.options import inputs_of, optimizers_of
from anybatch.planning.devices import budget_of, target_of
from anybatch.planning.entrance import held_bytes, plan
from anybatch.planning.shares import shares_of
from anybatch.planning.subjects import Subject
from anybatch.records.rankplans import GATHERED, SHARDS, WORK, RankPlan, Shard
from anybatch.tensors.batches import Splittable
from anybatch.tensors.modules import device_of
from anybatch.tensors.windowing import Window
from anybatch.units import format_bytes


def plan_over_ranks(
    model: torch.nn.Module,
    loss_fn: LossFunction,
    batch: Any,
    optimizer: Any = None,
    *,
    ranks: int,
    shard: Shard = "ddp",
    memory: int | float | str,
    device: torch.device | str | None = None,
    **options: Any,
) -> RankPlan:
    """Plans a step of several ranks, each with a batch like this one.

    The step of one rank is planned as ``anybatch.plan`` does, with as much more or less memory as the rank has less or
    more of the model.

    Args:
        model: whole, not sharded.
        loss_fn: see ``anybatch.backward``.
        batch: of one rank.
        optimizer: see ``anybatch.plan``.
        ranks: how many there will be.
        shard: how the model will lie on them.
        memory: the budget of each rank.
        device: see ``anybatch.plan``.
        **options: see ``anybatch.plan``.

    Returns:
        What each rank does, holds and sends.

    Raises:
        DoesNotFit: nothing does on a rank.
        BatchError: an argument is none that can be meant.
    """
    if isinstance(ranks, bool) or not isinstance(ranks, int) or ranks < 1:
        raise BatchError(f"ranks={ranks!r}; expected a whole number of at least 1")
    if shard not in SHARDS:
        raise BatchError(f"shard={shard!r}; expected one of {', '.join(SHARDS)}")
    subject = _subject(model, loss_fn, batch, optimizer, device, options)
    target = target_of(device, device_of(model))
    budget = budget_of(memory, target, held_bytes(subject))
    shares = shares_of(subject, ranks, shard)
    held = sum(shares.held.values())
    spared = shares.whole - held
    alone = held - shares.held[GATHERED] + shares.alone
    try:
        made = plan(model, loss_fn, batch, optimizer, memory=max(budget + spared, 1), device=device, **options)
    except DoesNotFit as error:
        needed = None if error.needed is None else max(error.needed - spared, alone)
        raise _too_large(ranks, shard, needed, budget, error.modules, shares.held) from None
    if alone > budget:
        raise _too_large(ranks, shard, alone, budget, (), {**shares.held, GATHERED: shares.alone})
    work = max(made.peak_bytes - shares.whole, 0)
    at_peak = {**shares.held, WORK: work} if held + work >= alone else {**shares.held, GATHERED: shares.alone, WORK: 0}
    return RankPlan(ranks, shard, made, budget, at_peak, shares.units, shares.traffic(made.micro_batches))


def _too_large(
    ranks: int, shard: str, needed: int | None, budget: int, modules: Sequence[str], held: Mapping[str, int]
) -> DoesNotFit:
    least = "" if needed is None else f" The smallest way needs {format_bytes(needed)}."
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


def _subject(model: Any, loss_fn: Any, batch: Any, optimizer: Any, device: Any, options: dict[str, Any]) -> Subject:
    home = device_of(model)
    target = target_of(device, home)
    splittable = Splittable(
        batch.batches if isinstance(batch, Window) else [batch],
        **{name: options[name] for name in ("broadcast", "collate", "cost") if name in options},
    )
    settings = Settings(home, options.get("autocast"), None, inputs_of(options.get("inputs")))
    blocks: Sequence[str] = options.get("blocks", ())
    return Subject(
        model, loss_fn, settings, splittable, [] if optimizer is None else optimizers_of(optimizer),
        blocks=tuple(blocks), device_type=target.device_type, is_present=target.is_present,
    )  # fmt: skip
