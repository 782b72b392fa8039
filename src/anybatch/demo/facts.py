"""What the demonstration found: plain values, frozen, for the terminal, the report and JSON."""

from dataclasses import asdict, dataclass
from typing import Any

from anybatch.records.plans import Plan


@dataclass(frozen=True, slots=True)
class TextFacts:
    """The text that was read."""

    root: str  # the folder that it is from
    train_files: int  # files to train on
    train_bytes: int  # their length
    validation_files: int  # files held out
    validation_bytes: int  # their length
    unigram_bits: float  # entropy of a single byte of the training text, in bits per byte


@dataclass(frozen=True, slots=True)
class Method:
    """One way to get the gradient of the logical batch, measured."""

    name: str  # what it is called in tables
    micro_batches: int  # how many forward and backward passes it took
    error: float  # distance to the float64 gradient of the whole batch, relative to that gradient's length
    peak_bytes: int  # the most bytes that tensors held at once: weights, gradients, batch and activations
    seconds: float  # median time of a pass


@dataclass(frozen=True, slots=True)
class GradientComparison:
    """The same logical batch, whole and in pieces."""

    samples: int  # sequences in the logical batch
    context: int  # bytes of a sequence
    parameters: int  # how many numbers the gradient has
    memory_bytes: int  # the simulated budget
    micro_batch_size: int  # samples in a micro-batch at most, as planned for that memory
    optimized: str  # the other memory optimizations of the plan, in words; empty if nothing
    whole: Method  # the whole batch at once
    split: Method  # ``anybatch.backward``, as planned
    loop: Method  # the loop that divides the mean loss of each micro-batch by their number
    bound: float  # the error that ``split`` may have at most, from that of ``whole`` and float32's rounding
    float64_difference: float  # relative distance of ``split`` and ``whole`` where both are computed in float64

    @property
    def methods(self) -> tuple[Method, ...]:
        """The three ways."""
        return self.whole, self.split, self.loop

    @property
    def is_within_bound(self) -> bool:
        """Whether the error of the split gradient is within the promised bound."""
        return self.split.error <= self.bound


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """The state of training at a validation."""

    seconds: float  # since training began
    updates: int  # applied so far
    # loss of the updates since the last point, in bits per byte; ``None`` before the first one
    training_bits: float | None
    validation_bits: float  # loss on held-out text, in bits per byte
    tokens_per_second: float  # of training alone, since it began
    resident_bytes: int  # memory of the process


@dataclass(frozen=True, slots=True)
class TrainingCurve:
    """The course of training."""

    losses: tuple[float, ...]  # of every update, in bits per byte
    points: tuple[CurvePoint, ...]  # the validations, the last one after the last update
    peak_bytes: int | None  # the most bytes that tensors held at once during a whole update, the optimizer included
    micro_batches: int  # of each update
    stopped_early: bool  # whether it was stopped before its time


@dataclass(frozen=True, slots=True)
class DemoRecord:
    """All results of one run of the demonstration."""

    versions: dict[str, str | int]  # of anybatch, Python and torch, and how many threads torch used
    text: TextFacts  # see ``TextFacts``
    plan: Plan  # how the logical batch is run
    comparison: GradientComparison  # see ``GradientComparison``
    training: TrainingCurve  # see ``TrainingCurve``
    sample: str  # text that the model wrote

    def to_dict(self) -> dict[str, Any]:
        """The fields as plain values."""
        return {**asdict(self), "plan": self.plan.to_dict()}
