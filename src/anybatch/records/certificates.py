"""Whether a loss may be split, and why not."""

import math
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from anybatch.records.plainvalues import Plain, nothing, plain
from anybatch.records.showing import Shown

_WIDTH = 80


@dataclass(frozen=True, slots=True)
class Reason(Plain):
    """One thing that was found.

    Args:
        code: what kind of thing it is, such as ``"count"``, ``"batch-norm"`` or ``"not-additive"``.
        where: the qualified name of a module, a buffer or a parameter, ``"loss"``, or the loss by its name.
        message: what was seen, in full sentences.
        remedies: lines of code, the first choice first; each may end in a comment that says what it costs.
        evidence: the numbers behind it, plain values.

    Example:
        >>> print(Reason("sum", "loss", "The loss is a sum.", ("loss = loss / 8",)))
        sum, in loss: The loss is a sum.
            loss = loss / 8
    """

    code: str
    where: str
    message: str
    remedies: tuple[str, ...] = ()
    evidence: Mapping[str, Any] = field(default_factory=dict)

    @property
    def remedy(self) -> str:
        """The first of the remedies, empty if there is none."""
        return self.remedies[0] if self.remedies else ""

    def to_dict(self) -> dict[str, Any]:
        """The fields as plain values for JSON; a number that is not finite becomes ``None``."""
        return {name: plain(value, nothing) for name, value in Plain.to_dict(self).items()}

    def shown(self, prefix: str = "") -> str:
        """The text, wrapped; remedies on lines of their own, which are not wrapped, so that they can be copied."""
        text = f"{prefix}{self.code}, in {self.where}: {self.message}"
        head = textwrap.wrap(text, _WIDTH, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
        return "\n".join([*head, *(f"    {line}" for line in self.remedies)])

    def __str__(self) -> str:
        return self.shown()


@dataclass(frozen=True, slots=True)
class Certificate(Shown):
    """What ``anybatch.check`` found out about a model, a loss and a batch.

    Args:
        model: the class of the model.
        samples: samples that were checked.
        samples_in_batch: samples that the batch has; more than ``samples`` if not all of it fits in memory.
        splits: the sizes of the micro-batches of each split that was compared with the whole.
        dtype: the precision of the comparison, such as ``"float64"``.
        tolerance: up to which relative error a gradient counts as the same.
        error: the norm of the difference of the gradients over the norm of the whole batch's, all parameters together,
            of the worst split; infinite if there is nothing to compare.
        loss_error: the same of the values of the losses.
        reasons: why the split gradient is not the whole batch's; empty if it is.
        notes: what else there is to know, such as dropout that draws in another order.

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
            ",\n  up to the drawing of random numbers" if drawn else ""
        )

    def to_dict(self) -> dict[str, Any]:
        """The fields as plain values for JSON, and ``exact``; a number that is not finite becomes ``None``."""
        return {"exact": self.exact, **{name: plain(value, nothing) for name, value in Plain.to_dict(self).items()}}

    @classmethod
    def from_dict(cls, values: Any) -> Self:
        """Reads what ``to_dict`` gave.

        Args:
            values: the fields by name; those that are unknown are left out.

        Returns:
            The certificate.
        """
        errors = {name: math.inf if values[name] is None else values[name] for name in ("error", "loss_error")}
        return super(Certificate, cls).from_dict({**values, **errors})

    def __str__(self) -> str:
        errors = f"{self.error:.2g} (loss {self.loss_error:.2g})"
        lines = [
            self.verdict,
            f"  relative error {errors}, tolerance {self.tolerance:.0e}, in {self.dtype}",
            f"  {self.samples} samples {' and '.join('as ' + _shown(sizes) for sizes in self.splits)}",
        ]
        lines += ["\n" + reason.shown(f"{number}. ") for number, reason in enumerate(self.reasons, 1)]
        lines += ["\n" + note.shown("note: ") for note in self.notes]
        return "\n".join(lines)


def _shown(sizes: tuple[int, ...]) -> str:
    if len(sizes) <= 8:
        return " + ".join(map(str, sizes))
    return f"{len(sizes)} micro-batches of {max(sizes)} at most"
