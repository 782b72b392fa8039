"""The result of a step over one logical batch."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar, cast

from anybatch.records.layouts import BatchLayout
from anybatch.records.reading import Plain

if TYPE_CHECKING:
    from anybatch.records.plans import Plan
    from anybatch.records.proofs import Proof

T = TypeVar("T")


class Deferred(Generic[T]):
    """A value that is computed when it is first read, so that a step does not synchronize with the device."""

    __slots__ = ("_compute", "_value")

    def __init__(self, compute: Callable[[], T]) -> None:
        self._compute: Callable[[], T] | None = compute
        self._value: T | None = None

    def read(self) -> T:
        """The value; the first read frees the tensors that it is computed from."""
        if self._compute is not None:
            self._value = self._compute()
            self._compute = None
        return cast(T, self._value)

    def __reduce__(self) -> tuple[Any, ...]:
        return _read, (self.read(),)


def _read(value: T) -> Deferred[T]:
    deferred = Deferred(lambda: value)
    deferred.read()
    return deferred


@dataclass(frozen=True, slots=True)
class Attempt(Plain):
    """One attempt at a logical batch."""

    micro_batch_size: float  # the largest micro-batch that was tried, in samples, or in cost if ``cost=`` is used
    micro_batches: int  # the number of micro-batches
    samples: int  # the number of samples in the update: all of them, or 0 if the attempt was rolled back
    # ``"done"``, ``"out of memory"``, ``"skipped"``, or ``"units differ"``: under ``fully_shard`` the ranks ran
    # different units, and start again with all parameters gathered
    outcome: Literal["done", "out of memory", "units differ", "skipped"]
    where: str = ""  # the part that ran out of memory, such as ``"micro-batch 3 of 4"`` or ``"optimizer.step"``


class StepResult:
    """The result of a step over one logical batch: detached numbers, computed when they are read.

    Reading ``loss``, ``losses``, ``metrics``, ``count``, ``counts`` or ``grad_norm`` synchronizes with the device; a
    step that does not read them does not wait.

    Attributes:
        micro_batches: the number of micro-batches.
        skipped: why the update was not applied; empty if it was.
        attempts: the attempts, in order; the result is that of the last one.
        accumulator_bytes: the bytes of the float32 buffers in which low-precision gradients were accumulated.
        plan: the plan that was used; ``None`` without a budget.
        layout: the dimension that holds the samples, for each leaf of the batch; ``print`` shows it.
        proof: the proof made before the first split; ``None`` if nothing was split so far, or with ``verify="off"``.

    Example:
        >>> import torch, anybatch
        >>> model = torch.nn.Linear(3, 1)
        >>> out = anybatch.backward(
        ...     model, lambda model, batch: model(batch).pow(2).mean(), torch.ones(5, 3), micro_batch_size=2
        ... )
        >>> out.micro_batches, out.count, [attempt.outcome for attempt in out.attempts]
        (3, 5, ['done'])
    """

    __slots__ = (
        *("_count", "_grad_norm", "_losses", "_metrics"),
        *("accumulator_bytes", "attempts", "layout", "micro_batches", "plan", "proof", "skipped"),
    )

    def __init__(
        self,
        *,
        losses: Deferred[dict[str, float]],
        counts: Deferred[dict[str, float]],
        metrics: Deferred[Mapping[str, Any]],
        grad_norm: Deferred[float] | None,
        micro_batches: int,
        skipped: str = "",
        attempts: tuple[Attempt, ...] = (),
        accumulator_bytes: int = 0,
    ) -> None:
        self._losses = losses
        self._count = counts
        self._metrics = metrics
        self._grad_norm = grad_norm
        self.micro_batches = micro_batches
        self.skipped = skipped
        self.attempts = attempts
        self.accumulator_bytes = accumulator_bytes
        self.plan: Plan | None = None
        self.proof: Proof | None = None
        self.layout: BatchLayout | None = None

    def _repr_html_(self) -> str | None:
        from anybatch.records.showing import page_of

        return page_of(self)

    @property
    def loss(self) -> float:
        """The loss of the logical batch, a mean over its count; the sum of several losses."""
        return float(sum(self.losses.values()))

    @property
    def losses(self) -> dict[str, float]:
        """Each loss by its name; a single unnamed loss is called ``"loss"``."""
        return self._losses.read()

    @property
    def metrics(self) -> Mapping[str, Any]:
        """What the loss function returned beside the loss: each ``Mean`` as a float, per-sample tensors in the order of
        the batch."""
        return self._metrics.read()

    @property
    def counts(self) -> dict[str, float]:
        """The number of items of each loss, by its name."""
        return self._count.read()

    @property
    def count(self) -> float:
        """The number of items that the first loss is the mean over; an int if it is integral."""
        first = next(iter(self.counts.values()), 0)
        return int(first) if float(first).is_integer() else first

    @property
    def grad_norm(self) -> float | None:
        """The norm of the whole gradient before clipping; ``None`` if ``clip_norm`` is not set."""
        return None if self._grad_norm is None else self._grad_norm.read()

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON, without per-sample metrics, plan, layout and proof."""
        metrics = {name: value for name, value in self.metrics.items() if isinstance(value, (int, float))}
        return {
            "loss": self.loss,
            "losses": self.losses,
            "counts": self.counts,
            "metrics": metrics,
            "grad_norm": self.grad_norm,
            "micro_batches": self.micro_batches,
            "skipped": self.skipped,
            "attempts": [attempt.to_dict() for attempt in self.attempts],
            "accumulator_bytes": self.accumulator_bytes,
        }

    def __repr__(self) -> str:
        skipped = f", skipped={self.skipped!r}" if self.skipped else ""
        return f"StepResult(loss={self.loss:.6g}, count={self.count:g}, micro_batches={self.micro_batches}{skipped})"
