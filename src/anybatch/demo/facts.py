"""What the demonstration found: plain values, frozen, for the terminal, the report and JSON."""

from dataclasses import asdict, dataclass
from typing import Any

from anybatch.records.plans import Plan


@dataclass(frozen=True, slots=True)
class TextFacts:
    """The text that was read.

    Args:
        root: the folder that it is from.
        train_files: files to train on.
        train_bytes: their length.
        validation_files: files held out.
        validation_bytes: their length.
        unigram_bits: entropy of a single byte of the training text, in bits per byte.
    """

    root: str
    train_files: int
    train_bytes: int
    validation_files: int
    validation_bytes: int
    unigram_bits: float


@dataclass(frozen=True, slots=True)
class Method:
    """One way to get the gradient of the logical batch, measured.

    Args:
        name: what it is called in tables.
        micro_batches: how many forward and backward passes it took.
        error: distance to the float64 gradient of the whole batch, relative to that gradient's length.
        peak_bytes: the most bytes that tensors held at once: weights, gradients, batch and activations.
        process_bytes: by how much one pass raised the resident memory of a process of its own; ``None`` if unknown.
        seconds: median time of a pass.
    """

    name: str
    micro_batches: int
    error: float
    peak_bytes: int
    process_bytes: int | None
    seconds: float


@dataclass(frozen=True, slots=True)
class GradientComparison:
    """The same logical batch, whole and in pieces.

    Args:
        samples: sequences in the logical batch.
        context: bytes of a sequence.
        parameters: how many numbers the gradient has.
        memory_bytes: the memory that the demonstration pretends to have.
        micro_batch_size: samples in a micro-batch at most, as planned for that memory.
        optimized: the other memory optimizations of the plan, in words; empty if nothing.
        whole: the whole batch at once.
        split: ``anybatch.backward``, as planned.
        loop: the loop that divides the mean loss of each micro-batch by their number.
        bound: the error that ``split`` may have at most, from that of ``whole`` and float32's rounding.
        float64_difference: relative distance of ``split`` and ``whole`` where both are computed in float64.
    """

    samples: int
    context: int
    parameters: int
    memory_bytes: int
    micro_batch_size: int
    optimized: str
    whole: Method
    split: Method
    loop: Method
    bound: float
    float64_difference: float

    @property
    def is_within_bound(self) -> bool:
        """Whether the gradient in pieces is as near to the true one as promised."""
        return self.split.error <= self.bound


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """Where training stood at a validation.

    Args:
        seconds: since training began.
        updates: applied so far.
        training_bits: loss of the updates since the last point, in bits per byte; ``None`` before the first one.
        validation_bits: loss on held-out text, in bits per byte.
        tokens_per_second: of training alone, since it began.
        resident_bytes: memory of the process; ``None`` if the system does not say.
    """

    seconds: float
    updates: int
    training_bits: float | None
    validation_bits: float
    tokens_per_second: float
    resident_bytes: int | None


@dataclass(frozen=True, slots=True)
class TrainingCurve:
    """How training went.

    Args:
        losses: of every update, in bits per byte.
        points: the validations, the last one after the last update.
        peak_bytes: the most bytes that tensors held at once during a whole update, the optimizer included.
        micro_batches: of each update.
        stopped_early: whether it was stopped before its time.
    """

    losses: tuple[float, ...]
    points: tuple[CurvePoint, ...]
    peak_bytes: int | None
    micro_batches: int
    stopped_early: bool


@dataclass(frozen=True, slots=True)
class DemoRecord:
    """All that one run of the demonstration found.

    Args:
        versions: of anybatch, Python and torch, and how many threads torch used.
        seed: of the weights, the batches and the sample.
        text: see ``TextFacts``.
        plan: how the logical batch is run.
        comparison: see ``GradientComparison``.
        training: see ``TrainingCurve``.
        sample: text that the model wrote.
    """

    versions: dict[str, str | int]
    seed: int
    text: TextFacts
    plan: Plan
    comparison: GradientComparison
    training: TrainingCurve
    sample: str

    def to_dict(self) -> dict[str, Any]:
        """The fields as plain values."""
        return {**asdict(self), "plan": self.plan.to_dict()}
