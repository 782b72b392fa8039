"""Whether accumulating micro-batches gives the gradient of the whole batch, and if not, why."""

import math
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Self

from anybatch.records.reading import Plain, nothing
from anybatch.records.showing import Shown

_WIDTH = 80


@dataclass(frozen=True, slots=True)
class Reason(Plain):
    """One reason why a certificate is not exact, or one of its notes.

    Example:
        >>> print(Reason("sum", "loss", "The loss is a sum.", ("loss = loss / 8",)))
        sum, in loss: The loss is a sum.
            loss = loss / 8
    """

    _not_finite = nothing
    code: str  # its kind, such as ``"count"``, ``"batch-norm"`` or ``"not-additive"``
    where: str  # the qualified name of a module, a buffer or a parameter; ``"loss"``; or the name of one loss
    message: str  # what was seen, in full sentences
    # lines of code, the first choice first; each may end in a comment that says what it costs
    remedies: tuple[str, ...] = ()
    evidence: Mapping[str, Any] = field(default_factory=dict)  # the numbers behind it, as plain values by name

    @property
    def remedy(self) -> str:
        """The first of the remedies; empty if there is none."""
        return self.remedies[0] if self.remedies else ""

    def shown(self, prefix: str = "") -> str:
        """The text, wrapped at 80 columns; remedies stand on their own lines, unwrapped, so that they can be copied."""
        text = f"{prefix}{self.code}, in {self.where}: {self.message}"
        head = textwrap.wrap(text, _WIDTH, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
        return "\n".join([*head, *(f"    {line}" for line in self.remedies)])

    def __str__(self) -> str:
        return self.shown()


@dataclass(frozen=True, slots=True)
class Certificate(Shown):
    """What ``anybatch.check`` found about a model, a loss and a batch.

    Args:
        model: the class of the model.
        samples: the number of samples that were checked.
        samples_in_batch: the number of samples of the batch; more than ``samples`` if not all of it fits in memory.
        splits: for each split that was compared with the whole, the sizes of its micro-batches, in samples.
        dtype: the precision of the comparison, such as ``"float64"``.
        tolerance: the largest relative error at which two gradients count as equal.
        error: the relative error of the gradient in the worst split, ``||split - whole|| / ||whole||`` over all
            parameters; infinite if there is nothing to compare. Those with more than 4,096 entries are compared by
            1,024 sums with random signs, which give it within about 4 %.
        loss_error: the relative error of the values of the losses.
        reasons: why the accumulated gradient is not the whole batch's; empty if it is.
        notes: other remarks, such as dropout that draws in another order.
        apart: how far the gradient of the worst split is from the whole batch's that is 0 within rounding, to
            which no error is relative; 0 if it is not.
        loss_apart: the same of the losses.

    Example:
        >>> certificate = Certificate("Linear", 8, 8, ((4, 4), (2, 2, 4)), "float64", 1e-9, 2.2e-16, 1.1e-16)
        >>> certificate.exact
        True
        >>> Certificate.from_dict(certificate.to_dict()) == certificate
        True
        >>> print(certificate)
        exact: in micro-batches the gradient of Linear is the whole batch's
          relative error 2.2e-16 (loss 1.1e-16), tolerance 1e-09, in float64
          8 samples as 4 + 4 and as 2 + 2 + 4
    """

    _not_finite = nothing
    model: str
    samples: int
    samples_in_batch: int
    splits: tuple[tuple[int, ...], ...]
    dtype: str
    tolerance: float
    error: float
    loss_error: float
    reasons: tuple[Reason, ...] = ()
    notes: tuple[Reason, ...] = ()
    apart: float = 0.0
    loss_apart: float = 0.0

    @property
    def exact(self) -> bool:
        """Whether micro-batches give the gradient of the whole batch; with dropout: for the same random numbers."""
        return not self.reasons

    @property
    def verdict(self) -> str:
        """The answer in one line."""
        if not self.exact:
            return f"not exact: in micro-batches the gradient of {self.model} is not the whole batch's"
        drawn = any(note.code == "random" for note in self.notes)
        return f"exact: in micro-batches the gradient of {self.model} is the whole batch's" + (
            ",\n  except for random numbers, such as dropout's" if drawn else ""
        )

    @property
    def figures(self) -> str:
        """How far the gradient and the losses are off; in absolute numbers where those of the whole batch are 0."""
        error = f"relative error {self.error:.2g}" if math.isfinite(self.error) else "no error, since one is not finite"
        loss = f"{self.loss_error:.2g}" if math.isfinite(self.loss_error) else "not finite"
        if self.apart:
            error = f"the gradient of the whole batch is 0 within rounding, that of micro-batches {self.apart:.2g}"
        if self.loss_apart:
            loss = f"{self.loss_apart:.2g} instead of 0"
        return f"{error} (loss {loss}), tolerance {self.tolerance:.0e}"

    def to_dict(self) -> dict[str, Any]:
        """The fields as plain values for JSON, and ``exact``; a number that is not finite becomes ``None``."""
        return {"exact": self.exact, **Plain.to_dict(self)}

    @classmethod
    def from_dict(cls, values: Any) -> Self:
        """Reads what ``to_dict`` gave, the fields by name; unknown names are ignored.

        Raises:
            KeyError: ``error`` or ``loss_error`` is missing.
            ValueError: another field is missing, or a value does not have the type of its field.
        """
        errors = {name: math.inf if values[name] is None else values[name] for name in ("error", "loss_error")}
        return super(Certificate, cls).from_dict({**values, **errors})

    def __str__(self) -> str:
        lines = [
            self.verdict,
            f"  {self.figures}, in {self.dtype}",
            f"  {self.samples} samples {' and '.join('as ' + _shown(sizes) for sizes in self.splits)}",
        ]
        lines += ["\n" + reason.shown(f"{number}. ") for number, reason in enumerate(self.reasons, 1)]
        lines += ["\n" + note.shown("note: ") for note in self.notes]
        return "\n".join(lines)


def _shown(sizes: tuple[int, ...]) -> str:
    if len(sizes) <= 8:
        return " + ".join(map(str, sizes))
    return f"{len(sizes)} micro-batches of at most {max(sizes)}"


@dataclass(frozen=True, slots=True)
class Proof(Plain):
    """Whether some samples of a batch have the same gradient when they run whole and as two parts.

    Example:
        >>> print(Proof("exact", "comparison", 8, (3, 5), 1.1e-7, 7.6e-6, "float32", 0))
        8 samples whole and as 3 + 5: the same gradient, by comparison in float32 (error 1.1e-07, tolerance 7.6e-06)
    """

    _not_finite = nothing
    # ``"exact"``, ``"not exact"``, or ``"undecided"`` if they could not be compared
    outcome: Literal["exact", "not exact", "undecided"]
    # ``"comparison"`` of the gradients in the precision of the step; of the ``"losses"`` only, if the gradient of two
    # samples does not fit in memory; or a ``"certificate"`` in float64
    by: Literal["comparison", "losses", "certificate", ""] = ""
    samples: int = 0  # the number of samples that were run
    parts: tuple[int, ...] = ()  # the number of samples in each part
    error: float = math.nan  # the relative error of the gradient, ``||parts - whole|| / ||whole||``
    tolerance: float = 0.0  # the largest error at which the two count as equal
    dtype: str = ""  # the precision of the comparison, such as ``"float32"``
    update: int | None = None  # the number of updates applied before; ``None`` if they are not counted
    group: int = 1  # samples that stand together and have to stay so; 1 for none
    unit: int = 1  # samples of the micro-batches that were compared as they are, of which smaller ones were not seen
    is_of_batch: bool = False  # whether which samples belong together lies in the values of a batch
    chunks: tuple[int, ...] = ()  # of time, the numbers of steps in two ways to cut it that were compared
    apart: float = 0.0  # the how far the parts' gradient is from the whole's that is 0 within rounding; else 0
    note: str = ""  # why it is undecided, or another remark

    @property
    def exact(self) -> bool:
        """Whether the accumulated gradient was found to equal the whole batch's."""
        return self.outcome == "exact"

    def with_note(self, note: str) -> "Proof":
        """The same with one more note."""
        return replace(self, note="; ".join(filter(None, (self.note, note))))

    def holds_for(self, micro_batches: Iterable[Sequence[int]]) -> bool:
        """Whether it holds for another batch of the same layout, with the rows of its micro-batches given."""
        unit = max(self.group, self.unit)
        if unit == 1:
            return True
        return not self.is_of_batch and all(
            list(rows) == list(range(rows[0], rows[-1] + 1)) and not rows[0] % unit and not len(rows) % unit
            for rows in micro_batches
        )

    def __str__(self) -> str:
        if self.outcome == "undecided":
            return f"not proved: {self.note}"
        what, by = ("loss", "comparison") if self.by == "losses" else ("gradient", self.by)
        is_same = self.exact and not self.error > self.tolerance  # two lengths of chunks may be two losses
        what = f"the same {what}" if is_same else f"a different {what}"
        error = (
            f"the whole batch's is 0, that of the parts {self.apart:.2g}" if self.apart else f"error {self.error:.2g}"
        )
        numbers = f"{error}, tolerance {self.tolerance:.2g}"
        note = f"; {self.note}" if self.note else ""
        ways = [f"whole and as {' + '.join(map(str, self.parts))}"] if len(self.parts) > 1 else []
        ways += ["in chunks of {} and of {} steps".format(*self.chunks)] if self.chunks else []
        return f"{self.samples} samples {', '.join(ways)}: {what}, by {by} in {self.dtype} ({numbers}){note}"
