"""What a plan says in words."""

from collections.abc import Sequence

from anybatch.errors import DoesNotFit
from anybatch.planning.profiling import Peak
from anybatch.records.plans import ModuleShare, PlanRow
from anybatch.units import format_bytes


def binding_of(peak: Peak, update_peak: int, row: PlanRow, floor_size: float | None) -> str:
    """Says what the peak is made by, and what would lower it.

    Args:
        peak: of the chosen way.
        update_peak: the most bytes alive in the update.
        row: the chosen way.
        floor_size: the largest micro-batch at which the update is the peak, ``None`` if there is none.
    """
    largest = max(peak.by_category, key=lambda name: peak.by_category[name], default="")
    share = f"{format_bytes(peak.by_category.get(largest, 0))} of them {largest}"
    floor = f"{format_bytes(update_peak)}, below which only an optimizer with less state helps"
    if peak.stage == "update":
        return f"Peak: {peak.operation} in the optimizer's step, {format_bytes(peak.total)}, {share}: {floor}."
    where = {"loss": "the loss"}.get(peak.stage, f"the {peak.stage} of {peak.module}")
    hint = ""
    if peak.stage == "loss" and row.loss_chunks > 1:
        hint = f" The loss is in {row.loss_chunks} chunks already."
    if floor_size is not None:
        hint += (
            f" A smaller micro-batch saves nothing below {floor_size:g}: the optimizer's step is the peak then, with"
        )
    else:
        hint += " The optimizer's step needs"
    return f"Peak: {peak.operation} in {where}, {format_bytes(peak.total)}, {share}.{hint} {floor}."


def does_not_fit(
    smallest: PlanRow,
    budget: int,
    usable: int,
    update_peak: int,
    at_peak: dict[str, int],
    shares: Sequence[ModuleShare],
) -> DoesNotFit:
    """The error for a budget that nothing fits in.

    Args:
        smallest: the way with the least memory.
        budget: bytes.
        usable: bytes of it that a plan may take.
        update_peak: the most bytes alive in the update.
        at_peak: what the smallest way holds at its peak by category.
        shares: what the blocks hold.
    """
    holders = sorted(shares, key=lambda share: -(share.parameter_bytes + share.activation_bytes))[:5]
    names = [share.name for share in holders]
    held = ", ".join(
        f"{share.name} ({format_bytes(share.parameter_bytes)} parameters, {format_bytes(share.activation_bytes)} kept)"
        for share in holders
    )
    parts = ", ".join(
        f"{name} {format_bytes(count)}" for name, count in sorted(at_peak.items(), key=lambda i: -i[1]) if count
    )
    if update_peak > usable:
        remedy = (
            "The optimizer's step alone takes this; use an optimizer with less state (SGD, Adafactor), fused=True or "
            "lower precision, or train fewer parameters with anybatch.freeze"
        )
    else:
        remedy = (
            "Use shorter or smaller samples, a smaller model, or autocast=torch.bfloat16; blocks= names more to trade"
        )
    kept = f" ({format_bytes(budget - usable)} of it is kept free)" if usable < budget else ""
    if not held:
        held = "none were found, since there are none or they run more than once in a loss"
    return DoesNotFit(
        f"nothing fits into {format_bytes(budget)}{kept}: the smallest way ({smallest.levers or 'nothing traded'}, "
        f"micro-batches of {smallest.micro_batch_size:g}) needs {format_bytes(smallest.peak_bytes)}. At its peak: "
        f"{parts}. The blocks that hold most: {held}. {remedy}",
        needed=smallest.peak_bytes,
        budget=budget,
        modules=names,
    )
