"""A plan over several ranks: what each of them holds and sends in a step."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from anybatch.errors import PlanMismatch
from anybatch.records.plans import Plan
from anybatch.records.reading import Malformed, Plain

Shard = Literal["ddp", "fsdp2", "fsdp2-kept"]
SHARDS: tuple[Shard, ...] = ("ddp", "fsdp2", "fsdp2-kept")
VERSION = 1
_KIND = "anybatch plan over ranks"

PARAMETERS = "parameters"
GRADIENTS = "gradients"
OPTIMIZER = "optimizer state"
GATHERED = "gathered parameters and buffers"
WORK = "activations, batch and the rest"


@dataclass(frozen=True, slots=True)
class UnitShare:
    """A unit of FSDP2: parameters that are gathered and reduced together."""

    name: str  # the qualified name of the module; empty for parameters that are in no block
    whole_bytes: int  # the bytes of its parameters
    rank_bytes: int  # the bytes of the shard of rank 0, which is the largest


@dataclass(frozen=True, slots=True)
class Traffic:
    """One kind of collective in a step."""

    name: str  # the name of the collective
    count: int  # the number of calls per rank
    payload_bytes: int  # the bytes of the full tensors that are gathered or summed, over all calls
    # the bytes that a rank sends with ring algorithms: (N - 1) / N of the payload for all-gather and reduce-scatter,
    # twice that for all-reduce
    sent_bytes: int


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
    units: tuple[UnitShare, ...] = ()  # the units that are gathered and reduced together; empty with ``"ddp"``
    traffic: tuple[Traffic, ...] = ()  # the collectives of one step, over all its micro-batches

    @property
    def peak_bytes(self) -> int:
        """The bytes of all live tensors of a rank at its peak; an upper bound."""
        return sum(self.at_peak.values())

    @property
    def samples(self) -> int:
        """The samples of a step over all ranks."""
        return self.ranks * self.plan.samples

    @property
    def sent_bytes(self) -> int:
        """The bytes that a rank sends in a step."""
        return sum(one.sent_bytes for one in self.traffic)

    def to_dict(self) -> dict[str, Any]:
        """The fields as plain values for JSON, with the version of the format, its ``kind``, sizes and sums."""
        sizes = {name: getattr(self.plan, name) for name in ("micro_batch_size", "micro_batches")}
        sums = {name: getattr(self, name) for name in ("samples", "peak_bytes", "sent_bytes")}
        return {"version": VERSION, "kind": _KIND, **Plain.to_dict(self), **sizes, **sums}

    @classmethod
    def from_dict(cls, values: Any) -> "RankPlan":
        """Reads what ``to_dict`` gave.

        Raises:
            PlanMismatch: the values are not a plan over ranks, are damaged, or have another version.
        """
        if not isinstance(values, Mapping) or values.get("kind") != _KIND or values.get("version") != VERSION:
            found = values.get("version") if isinstance(values, Mapping) else None
            raise PlanMismatch(
                f"got a plan over ranks of version {found!r}; expected {VERSION}. Plan again: anybatch plan --ranks N"
            )
        try:
            return super(RankPlan, cls).from_dict(values)
        except Malformed as error:
            raise PlanMismatch(f"the plan over ranks is damaged: {error}. Plan again: anybatch plan") from error
