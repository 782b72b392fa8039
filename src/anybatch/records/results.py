"""The result of a step over one logical batch."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from anybatch.records.layouts import BatchLayout
from anybatch.records.reading import Plain

if TYPE_CHECKING:
    from anybatch.records.certificates import Proof
    from anybatch.records.plans import Plan


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
        *("_known", "_to_compute", "accumulator_bytes", "attempts", "layout", "micro_batches", "plan", "proof"),
        "skipped",
    )

    def __init__(
        self,
        *,
        losses: Callable[[], dict[str, float]],
        counts: Callable[[], dict[str, float]],
        metrics: Callable[[], Mapping[str, Any]],
        grad_norm: Callable[[], float] | None,
        micro_batches: int,
        skipped: str = "",
        attempts: tuple[Attempt, ...] = (),
        accumulator_bytes: int = 0,
    ) -> None:
        # by name; a value is computed when it is first read, which frees the tensors that it is computed from
        self._to_compute: dict[str, Any] = {"losses": losses, "counts": counts, "metrics": metrics}
        self._known: dict[str, Any] = {}
        if grad_norm is not None:
            self._to_compute["grad_norm"] = grad_norm
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

    def _read(self, name: str) -> Any:
        compute = self._to_compute.get(name)
        if compute is not None:  # several threads may be here at once: all get what the first one stores
            self._known.setdefault(name, compute())
            self._to_compute.pop(name, None)  # after it is known
        return self._known.get(name)

    def __getstate__(self) -> object:
        for name in [*self._to_compute]:
            self._read(name)
        return super().__getstate__()

    @property
    def loss(self) -> float:
        """The loss of the logical batch, a mean over its count; the sum of several losses."""
        return float(sum(self.losses.values()))

    @property
    def losses(self) -> dict[str, float]:
        """Each loss by its name; a single unnamed loss is called ``"loss"``."""
        return self._read("losses")  # type: ignore[no-any-return]

    @property
    def metrics(self) -> Mapping[str, Any]:
        """What the loss function returned beside the loss: each ``Mean`` as a float, per-sample tensors in the order of
        the batch."""
        return self._read("metrics")  # type: ignore[no-any-return]

    @property
    def counts(self) -> dict[str, float]:
        """The number of items of each loss, by its name."""
        return self._read("counts")  # type: ignore[no-any-return]

    @property
    def count(self) -> float:
        """The number of items that the first loss is the mean over; an int if it is integral."""
        first = next(iter(self.counts.values()), 0)
        return int(first) if float(first).is_integer() else first

    @property
    def grad_norm(self) -> float | None:
        """The norm of the whole gradient before clipping; ``None`` if ``clip_norm`` is not set."""
        return self._read("grad_norm")  # type: ignore[no-any-return]

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
