"""What each rank holds and sends when several of them take a step together."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from anybatch.errors import PlanMismatch
from anybatch.records.plainvalues import Plain
from anybatch.records.plans import Plan
from anybatch.records.reading import Malformed

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
    """What is gathered and reduced together."""

    name: str  # of the module; empty for what is in no block
    whole_bytes: int  # of its parameters
    rank_bytes: int  # of the part of rank 0, which has the largest


@dataclass(frozen=True, slots=True)
class Traffic:
    """One kind of collective in a step."""

    name: str  # of the collective
    count: int  # how often a rank takes part in one
    payload_bytes: int  # of all of them, as whole tensors: what is gathered, what is summed
    # by a rank, if they go around in a ring: (N - 1) / N of what is gathered or scattered, and twice that of an
    # all-reduce
    sent_bytes: int


@dataclass(frozen=True, slots=True)
class RankPlan(Plain):
    """How each of several ranks runs its share of a logical batch within a budget.

    Args:
        ranks: how many there are.
        shard: ``"ddp"``: each has all parameters; ``"fsdp2"``: ``fully_shard`` of each block and of the whole;
            ``"fsdp2-kept"``: the same with ``reshard_after_forward=False``.
        plan: of one rank by itself, from which the micro-batches are; its peak is that of a whole model.
        budget: bytes that each rank may take.
        at_peak: bytes of rank 0 at the peak by what they are for; not below the truth.
        units: what is gathered and reduced together; none with ``"ddp"``.
        traffic: in a step of all micro-batches.

    Example:
        >>> from anybatch.records.plans import PlanRow
        >>> made = RankPlan(2, "ddp", Plan(PlanRow(4, 2), samples=8), 2**30, {"parameters": 3, "gradients": 4})
        >>> made.peak_bytes, made.samples, RankPlan.from_dict(made.to_dict()) == made
        (7, 16, True)
    """

    ranks: int
    shard: Shard
    plan: Plan
    budget: int
    at_peak: Mapping[str, int] = field(default_factory=dict)
    units: tuple[UnitShare, ...] = ()
    traffic: tuple[Traffic, ...] = ()

    @property
    def peak_bytes(self) -> int:
        """All live tensors of a rank at its peak."""
        return sum(self.at_peak.values())

    @property
    def samples(self) -> int:
        """The samples of a step of all ranks."""
        return self.ranks * self.plan.samples

    @property
    def sent_bytes(self) -> int:
        """What a rank sends in a step."""
        return sum(one.sent_bytes for one in self.traffic)

    def to_dict(self) -> dict[str, Any]:
        """The fields as plain values for JSON."""
        sizes = {name: getattr(self.plan, name) for name in ("micro_batch_size", "micro_batches")}
        sums = {name: getattr(self, name) for name in ("samples", "peak_bytes", "sent_bytes")}
        return {"version": VERSION, "kind": _KIND, **Plain.to_dict(self), **sizes, **sums}

    @classmethod
    def from_dict(cls, values: Any) -> "RankPlan":
        """Reads what ``to_dict`` gave.

        Raises:
            PlanMismatch: it is nothing of the kind, or of another version.
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
