"""A plan over several ranks: what each of them does and holds in a step."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from anybatch.records.plans import Plan
from anybatch.records.reading import Plain

Shard = Literal["ddp", "fsdp2", "fsdp2-kept"]
SHARDS: tuple[Shard, ...] = ("ddp", "fsdp2", "fsdp2-kept")


@dataclass(frozen=True, slots=True)
class RankPlan(Plain):
    """How each of several ranks runs its share of a logical batch within a budget.

    Example:
        >>> from anybatch.records.plans import PlanRow
        >>> made = RankPlan(2, "ddp", Plan(PlanRow(4, 2), samples=8), 2**30, {"parameters": 3, "gradients": 4})
        >>> made.peak_bytes, made.samples, RankPlan.from_dict(made.to_dict()) == made
        (7, 16, True)
    """

    ranks: int  # the number of ranks
    # ``"ddp"``: each rank has all parameters; ``"fsdp2"``: ``fully_shard`` of each block and of the model;
    # ``"fsdp2-kept"``: the same with ``reshard_after_forward=False``
    shard: Shard
    plan: Plan  # the plan of a single rank, which gives the micro-batches; its peak is that of the unsharded model
    budget: int  # the bytes that each rank may use
    # an upper bound of the bytes of rank 0 at the peak, by category
    at_peak: Mapping[str, int] = field(default_factory=dict)

    @property
    def peak_bytes(self) -> int:
        """The bytes of all live tensors of a rank at its peak; an upper bound."""
        return sum(self.at_peak.values())

    @property
    def samples(self) -> int:
        """The samples of a step over all ranks."""
        return self.ranks * self.plan.samples

    def to_dict(self) -> dict[str, Any]:
        """The fields as plain values for JSON, with their ``kind``, sizes and sums."""
        sizes = {name: getattr(self.plan, name) for name in ("micro_batch_size", "micro_batches")}
        sums = {name: getattr(self, name) for name in ("samples", "peak_bytes")}
        return {"version": 2, "kind": "anybatch plan over ranks", **Plain.to_dict(self), **sizes, **sums}
