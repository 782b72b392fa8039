"""A plan: how a logical batch is run within a budget of memory."""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from anybatch.errors import PlanMismatch
from anybatch.records.reading import Plain, read
from anybatch.records.showing import Shown
from anybatch.units import format_bytes, format_seconds

Confidence = Literal["predicted", "measured", "estimated"]
_EARLIER = {"exact": "predicted", "bounded": "estimated", "unknown": "estimated"}  # words in plans of earlier versions
PRECISIONS = ("", "bfloat16", "float16")
VERSION = 1

_RUN = re.compile(r"(\d+):(\d+)", re.ASCII)


@dataclass(frozen=True, slots=True)
class PlanRow(Plain):
    """One configuration of a step, with its predicted memory and time.

    Example:
        >>> print(PlanRow(16, 4, recompute=("layers.0", "layers.1"), peak_bytes=2**30, seconds=0.5))
        4 micro-batches of 16, recompute 2 blocks: 1.0 GiB, 500.0 ms, predicted
    """

    micro_batch_size: float  # the most samples in a micro-batch, or the most padded cost if samples have costs
    micro_batches: int  # the number of micro-batches
    # the checkpointed blocks, by qualified name; ``"net.2:5"`` is a run of children of a ``Sequential``
    recompute: tuple[str, ...] = ()
    offload: tuple[str, ...] = ()  # the blocks whose activations are offloaded to host memory
    head: str = ""  # the output layer, if the loss is computed in chunks; empty otherwise
    loss_chunks: int = 1  # the number of chunks; 1 for a loss in one piece
    autocast: str = ""  # the dtype of autocast, such as ``"bfloat16"``; empty without autocast
    # the number of micro-batches of a coupled loss that keep the graph of their first pass; the others are encoded
    # twice. ``None`` if the loss is not coupled
    kept_graphs: int | None = None
    # the time steps in a chunk of a sequence; ``None`` if the loss does not process time in chunks, or sets their
    # length itself
    chunk_length: int | None = None
    peak_bytes: int = 0  # the bytes of all live tensors at the peak of a step, from the second step on
    reserved_bytes: int = 0  # the bytes that the allocator of the device reserves for them; 0 if unknown
    # the time of a logical batch without the optimizer; a relative time if it was not measured on the device; ``None``
    # if unknown
    seconds: float | None = None
    # where ``peak_bytes`` comes from: ``"predicted"`` from the shapes of all tensors, ``"measured"`` extrapolated from
    # steps that ran, ``"estimated"`` without some bytes that can't be seen, or with a bound for them
    confidence: Confidence = "predicted"

    @property
    def needed_bytes(self) -> int:
        """The bytes that must be available: ``reserved_bytes``, or ``peak_bytes`` if that is unknown or larger."""
        return max(self.peak_bytes, self.reserved_bytes)

    @property
    def optimizations(self) -> str:
        """The memory optimizations in words; empty if there are none."""
        parts = [
            f"{verb} {_blocks(names)} block{'s' if _blocks(names) > 1 else ''}"
            for verb, names in (("recompute", self.recompute), ("offload", self.offload))
            if names
        ]
        if self.loss_chunks > 1:
            parts.append(f"loss in {self.loss_chunks} chunks")
        if self.autocast:
            parts.append(f"autocast {self.autocast}")
        if self.kept_graphs is not None and self.kept_graphs < self.micro_batches:
            parts.append(f"encode {self.micro_batches - self.kept_graphs} of {self.micro_batches} twice")
        if self.chunk_length is not None:
            parts.append(f"chunks of {self.chunk_length} step{'s' if self.chunk_length > 1 else ''}")
        return ", ".join(parts)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "PlanRow":
        """Reads what ``to_dict`` gave; unknown fields are ignored.

        Raises:
            ValueError: a field is missing, has the wrong type, or makes a configuration that can't run.
        """
        word = read(Mapping[str, Any], values).get("confidence", "predicted")
        row = super(PlanRow, cls).from_dict(
            {**values, "confidence": _EARLIER.get(word, word) if isinstance(word, str) else word}
        )
        is_sound = (
            0 < row.micro_batch_size < math.inf and min(row.micro_batches, row.loss_chunks) >= 1
            and min(row.peak_bytes, row.reserved_bytes) >= 0 and (row.seconds is None or 0 <= row.seconds < math.inf)
            and (row.loss_chunks == 1 or row.head != "") and row.autocast in PRECISIONS
            and (row.kept_graphs is None or 0 <= row.kept_graphs <= row.micro_batches)
            and (row.chunk_length is None or row.chunk_length >= 1)
        )  # fmt: skip
        if not is_sound:
            raise ValueError(f"a configuration that can't run: {row!r:.200}")
        return row

    def __str__(self) -> str:
        many = "micro-batch" if self.micro_batches == 1 else "micro-batches"
        head = ", ".join(
            part for part in (f"{self.micro_batches} {many} of {self.micro_batch_size:g}", self.optimizations) if part
        )
        time = "time unknown" if self.seconds is None else format_seconds(self.seconds)
        reserved = f" ({format_bytes(self.reserved_bytes)} reserved)" if self.reserved_bytes else ""
        return f"{head}: {format_bytes(self.peak_bytes)}{reserved}, {time}, {self.confidence}"


@dataclass(frozen=True, slots=True)
class ModuleShare:
    """The memory and time of one block of a model."""

    name: str  # its qualified name
    parameter_bytes: int  # the bytes of its parameters
    activation_bytes: int  # the bytes that it keeps for the backward of one micro-batch
    seconds: float | None = None  # the time of its forward of one micro-batch; ``None`` if not measured


@dataclass(frozen=True, slots=True)
class Plan(Shown):
    """The fastest configuration found for a logical batch within a budget, and the alternatives to it.

    Args:
        chosen: the configuration that is used.
        alternatives: other configurations, the fastest first: the Pareto front of bytes against seconds.
        budget: the bytes that were allowed.
        samples: the number of samples of the logical batch.
        device: the device that was planned for, such as ``"cpu"`` or ``"h200"``.
        whole_bytes: the peak of the whole batch at once without memory optimizations (the batches of a window are
            concatenated); 0 if unknown, as with several devices, with ``OverTime``, or for a window whose batches
            can't be concatenated.
        smallest_bytes: the smallest budget for which there is a plan.
        at_peak: the bytes at the peak of the plan, by category.
        binding: what limits the peak and what would lower it, in a sentence.
        modules: the memory and time of each block of the model.
        relative_time: whether seconds are only relative, because the plan was not made on the device.
        shapes: by path, the trailing shape of each tensor of the batch; later batches must not exceed it.
        copies_batch: whether micro-batches are copies, because the loss writes into its batch.
        fingerprint: what the plan is valid for, by name: the model, the loss, the optimizer, torch, the device.

    Example:
        >>> plan = Plan(PlanRow(16, 4, peak_bytes=2**20), budget=2**21, samples=64)
        >>> plan.micro_batch_size, Plan.from_dict(plan.to_dict()) == plan
        (16, True)
    """

    chosen: PlanRow
    alternatives: tuple[PlanRow, ...] = ()
    budget: int = 0
    samples: int = 0
    device: str = "cpu"
    whole_bytes: int = 0
    smallest_bytes: int = 0
    at_peak: Mapping[str, int] = field(default_factory=dict)
    binding: str = ""
    modules: tuple[ModuleShare, ...] = ()
    relative_time: bool = False
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    copies_batch: bool = False
    fingerprint: Mapping[str, str] = field(default_factory=dict)

    @property
    def micro_batch_size(self) -> float:
        """The most samples in a micro-batch, or the most padded cost if samples have costs."""
        return self.chosen.micro_batch_size

    @property
    def micro_batches(self) -> int:
        """The number of micro-batches of the planned logical batch."""
        return self.chosen.micro_batches

    @property
    def recompute(self) -> tuple[str, ...]:
        """The checkpointed blocks."""
        return self.chosen.recompute

    @property
    def offload(self) -> tuple[str, ...]:
        """The blocks whose activations are offloaded to host memory."""
        return self.chosen.offload

    @property
    def loss_chunks(self) -> int:
        """The number of chunks of the loss; 1 for a loss in one piece."""
        return self.chosen.loss_chunks

    @property
    def kept_graphs(self) -> int | None:
        """The number of micro-batches of a coupled loss that keep their graph; ``None`` if it is not coupled."""
        return self.chosen.kept_graphs

    @property
    def chunk_length(self) -> int | None:
        """The time steps in a chunk of a sequence; ``None`` if the plan does not set it."""
        return self.chosen.chunk_length

    @property
    def peak_bytes(self) -> int:
        """The predicted peak: the bytes of all live tensors, from the second step on."""
        return self.chosen.peak_bytes

    @property
    def reserved_bytes(self) -> int:
        """The bytes that the allocator of the device reserves at the peak; 0 if unknown, as on the host."""
        return self.chosen.reserved_bytes

    @property
    def seconds(self) -> float | None:
        """The predicted time of a logical batch without the optimizer; ``None`` if unknown."""
        return self.chosen.seconds

    @property
    def confidence(self) -> Confidence:
        """Where the predicted peak comes from; see ``PlanRow``."""
        return self.chosen.confidence

    def check_fingerprint(self, here: Mapping[str, str]) -> None:
        """Checks that the plan was made for the present model, loss, optimizer, torch and device.

        Args:
            here: the present fingerprint; names that only one of the two has are not compared.

        Raises:
            PlanMismatch: an entry differs; the error names it.
        """
        changed = {
            name: (planned, here[name])
            for name, planned in self.fingerprint.items()
            if name in here and here[name] != planned
        }
        if changed:
            what = "; ".join(f"{name}: planned for {was}, got {now}" for name, (was, now) in changed.items())
            raise PlanMismatch(f"the plan was made for something else: {what}. Plan again: anybatch.plan(...)", changed)

    def save(self, path: str | Path) -> None:
        """Writes the plan as JSON to a file."""
        Path(path).write_text(json.dumps(self.to_dict(), indent=2, allow_nan=False) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> "Plan":
        """Reads a file that ``save`` wrote.

        Raises:
            OSError: the file can't be read.
            PlanMismatch: the file is not a plan, is damaged, or has another version.
        """
        try:
            values = json.loads(Path(path).read_text(encoding="utf-8"))
        except (ValueError, RecursionError) as error:
            raise PlanMismatch(f"{path} is not JSON ({error}); expected a file written by Plan.save") from error
        return cls.from_dict(values)

    def to_dict(self) -> dict[str, Any]:
        """The fields as plain values for JSON, with the version of the format and its ``kind``."""
        return {"version": VERSION, "kind": "anybatch plan", **Shown.to_dict(self)}

    @classmethod
    def from_dict(cls, values: Any) -> "Plan":
        """Reads what ``to_dict`` gave, the fields by name.

        Raises:
            PlanMismatch: the values are not a plan, are damaged, or have another version.
        """
        if not isinstance(values, Mapping) or values.get("kind") != "anybatch plan" or values.get("version") != VERSION:
            found = values.get("version") if isinstance(values, Mapping) else None
            raise PlanMismatch(f"got a plan of version {found!r}; expected {VERSION}. Plan again: anybatch.plan(...)")
        try:
            if missing := [name for name in cls.__slots__ if name not in values]:
                raise ValueError(f"{missing[0]} is missing")
            plan = super(Plan, cls).from_dict(values)
            if min(plan.budget, plan.samples, plan.whole_bytes, plan.smallest_bytes, *plan.at_peak.values()) < 0:
                raise ValueError("bytes or samples are below 0")
            str(plan), json.dumps(plan.to_dict(), allow_nan=False)  # raises if a number is too large to be shown
            return plan
        except (ValueError, OverflowError) as error:
            raise PlanMismatch(f"the plan is damaged: {error}. Plan again: anybatch.plan(...)") from error

    def __str__(self) -> str:
        return f"{self.chosen} (budget {format_bytes(self.budget)}). {self.binding}".rstrip()


def _blocks(names: tuple[str, ...]) -> int:
    """The number of blocks in a list of names; a name may be a run such as ``"net.2:5"``."""
    runs = [_RUN.fullmatch(name.rpartition(".")[2]) for name in names]
    return sum(1 if run is None else max(int(run[2]) - int(run[1]), 1) for run in runs)


Shard = Literal["ddp", "fsdp2", "fsdp2-kept"]
SHARDS: tuple[Shard, ...] = ("ddp", "fsdp2", "fsdp2-kept")


@dataclass(frozen=True, slots=True)
class RankPlan(Plain):
    """How each of several ranks runs its share of a logical batch within a budget.

    Example:
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
