"""How the losses and gradients of parts make up those of the whole: by which weights, if by any."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from anybatch.checking.measuring import Outcome, norm_of

SOLVED_SLACK = 1e3  # times the tolerance: how much solved weights may leave, which are no better than the least squares


class Columns(NamedTuple):
    """One loss of some parts of a batch, a column each, all in float64.

    Args:
        values: of the loss, or of the total of a ``Mean``.
        gradients: some entries of them, of shape ``[entries, parts]``.
        counts: what ``Mean`` s are over; empty for a plain loss.
    """

    values: torch.Tensor
    gradients: torch.Tensor
    counts: list[float]

    @classmethod
    def of(cls, outcomes: Sequence[Outcome], name: str) -> "Columns":
        """The columns of runs in which one loss was the only one that counted.

        Args:
            outcomes: of the runs.
            name: of the loss.
        """
        counts = [outcome.counts[name] for outcome in outcomes if name in outcome.counts]
        factors = torch.tensor([outcome.counts.get(name, 1.0) for outcome in outcomes], dtype=torch.float64)
        values = torch.tensor([outcome.losses.get(name, 0.0) for outcome in outcomes], dtype=torch.float64)
        gradients = torch.stack([outcome.sample() for outcome in outcomes], 1)
        return cls(values * factors, gradients * factors, counts)

    def chosen(self, which: torch.Tensor) -> "Columns":
        """Some of the columns."""
        return Columns(self.values[which], self.gradients[:, which], self.counts)

    @property
    def is_finite(self) -> bool:
        """Whether values and gradients are."""
        return bool(self.values.isfinite().all() and self.gradients.isfinite().all())

    @property
    def norms(self) -> torch.Tensor:
        """The norm of each gradient."""
        return torch.tensor([norm_of(column) for column in self.gradients.T], dtype=torch.float64)


@dataclass
class Pieces:
    """One loss of the whole batch, and of every part of every split.

    Args:
        whole: one column.
        splits: for each split one a part.
        tolerance: up to which relative error sums are the same.
    """

    whole: Columns
    splits: list[Columns]
    tolerance: float

    def narrowed(self, entries: torch.Tensor) -> "Pieces":
        """The same of some entries of the gradient only, without the value of the loss.

        Args:
            entries: which.
        """
        whole, *splits = (
            Columns(torch.zeros_like(one.values), one.gradients[entries], one.counts)
            for one in (self.whole, *self.splits)
        )
        return Pieces(whole, splits, self.tolerance)

    def residual(self, split: int, weights: Sequence[float]) -> float:
        """How far the weighted sum of a split's parts is from the whole, relative to what is summed.

        Args:
            split: which of the splits.
            weights: one a part; parts of weight 0 may be not finite.

        Returns:
            The larger of the relative differences of the value and of the gradient; infinite if it is not finite.
        """
        factors = torch.tensor(weights, dtype=torch.float64)
        used, factors = self.splits[split].chosen(factors != 0), factors[factors != 0]
        if not used.is_finite:
            return float("inf")
        gradient, value = self.whole.gradients[:, 0], self.whole.values[0]
        gradient_scale = norm_of(gradient) + float(factors.abs() @ used.norms)
        value_scale = float(value.abs() + factors.abs() @ used.values.abs())
        return max(
            _over(norm_of(used.gradients @ factors - gradient), gradient_scale),
            _over(abs(float(used.values @ factors - value)), value_scale),
        )

    def fits(self, weights: Sequence[Sequence[float]], slack: float = 1.0) -> bool:
        """Whether the weights give the whole in each split.

        Args:
            weights: for each split one a part.
            slack: times the tolerance.
        """
        return all(self.residual(i, weights[i]) <= slack * self.tolerance for i in range(len(self.splits)))

    def shared_term(self) -> tuple[float, float] | None:
        """Finds a term of a sum that does not depend on the samples: N parts hold it N times, the whole once.

        Returns:
            Its value and the norm of its gradient, or ``None`` if the splits do not agree about one.
        """
        sizes = [len(split.values) for split in self.splits]
        if len(set(sizes)) < 2 or not all(split.is_finite for split in self.splits):
            return None
        whole, value = self.whole.gradients[:, 0], float(self.whole.values[0])
        scale = self.tolerance * (norm_of(whole) + sum(float(split.norms.sum()) for split in self.splits))
        value_scale = self.tolerance * (abs(value) + sum(float(split.values.abs().sum()) for split in self.splits))
        values = [(float(split.values.sum()) - value) / (n - 1) for n, split in zip(sizes, self.splits, strict=True)]
        terms = [(split.gradients.sum(1) - whole) / (n - 1) for n, split in zip(sizes, self.splits, strict=True)]
        agree = all(norm_of(term - terms[0]) <= scale for term in terms)
        if not agree or any(abs(one - values[0]) > value_scale for one in values):
            return None
        norm = norm_of(terms[0])
        return (values[0], norm) if norm > 10 * scale or abs(values[0]) > 10 * value_scale else None

    def solved_weights(self) -> list[list[float]] | None:
        """Solves for the weights by which the parts make up the whole, if the parts have enough to tell.

        Returns:
            For each split its weights, which are positive and add up to one; ``None`` if there are none, or too many.
        """
        solved = []
        for index, split in enumerate(self.splits):
            entries, parts = split.gradients.shape
            scale = norm_of(split.gradients) if split.is_finite and entries > parts else 0.0
            if not scale or int(torch.linalg.matrix_rank(split.gradients / scale, rtol=1e-8)) < parts:
                return None
            solution = torch.linalg.lstsq(split.gradients / scale, self.whole.gradients / scale).solution[:, 0]
            weights = [float(weight) for weight in solution]
            if min(weights) < -1e-6 or abs(sum(weights) - 1) > 1e-6:
                return None
            if self.residual(index, weights) > SOLVED_SLACK * self.tolerance:
                return None
            solved.append(weights)
        return solved

    def is_mean_of_reached(self) -> bool:
        """Whether such weights give the whole where parts without gradient have none."""
        if not all(split.gradients.any() for split in self.splits):
            return False
        found = dataclasses.replace(self, splits=[split.chosen(split.norms > 0) for split in self.splits])
        weights = found.solved_weights()
        return weights is not None and found.fits(weights, slack=10)


def _over(difference: float, scale: float) -> float:
    return difference / scale if scale else 0.0
