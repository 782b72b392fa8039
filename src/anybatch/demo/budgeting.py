"""How the demonstration runs its logical batch within its simulated budget."""

from dataclasses import replace

import torch
from torch import Tensor

from anybatch.batch.batches import Splittable
from anybatch.demo.comparison import Ways, peak_bytes
from anybatch.demo.training import TrainingSettings, make_optimizer, rate_factor
from anybatch.demo.transformer import ByteTransformer, next_byte_loss
from anybatch.loss.accumulate import Settings
from anybatch.planning.devices import target_of
from anybatch.planning.entrance import plan
from anybatch.planning.planner import Planner
from anybatch.planning.subjects import Subject
from anybatch.records.plans import Plan, PlanRow

# AdamW keeps two numbers for each weight; an update needs them beside what forward and backward take.
_OPTIMIZER_NUMBERS = 2
_PART = 4


def whole_bytes(model: ByteTransformer, batch: dict[str, Tensor]) -> int:
    """Measures the peak memory of an update with the whole batch at once, AdamW's state included, in bytes."""
    samples = len(batch["x"])
    return peak_bytes(Ways(PlanRow(samples, 1)).whole, model, batch) + _OPTIMIZER_NUMBERS * sum(
        parameter.nbytes for parameter in model.parameters()
    )


def plan_update(
    model: ByteTransformer, batch: dict[str, Tensor], settings: TrainingSettings, memory_bytes: int | None = None
) -> Plan:
    """Plans the updates of a training, by default within a quarter of what the whole batch needs.

    Raises:
        DoesNotFit: nothing fits in ``memory_bytes``.
    """
    if memory_bytes is None:
        memory_bytes = whole_bytes(model, batch) // _PART
    optimizer = make_optimizer(model, settings)
    # The training's scheduler writes into the optimizer's groups, and a plan holds for groups such as it was made for.
    torch.optim.lr_scheduler.LambdaLR(optimizer, rate_factor)
    if settings.updates is None:
        return plan(model, next_byte_loss, batch, optimizer, memory=memory_bytes, clip_norm=settings.clip_norm)
    cpu = torch.device("cpu")
    subject = Subject(
        model, next_byte_loss, Settings(cpu), Splittable([batch]), [optimizer], clip_norm=settings.clip_norm
    )
    return Planner(subject, replace(target_of(cpu, cpu), is_present=False)).plan(memory_bytes)
