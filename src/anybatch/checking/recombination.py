"""How the losses and gradients of parts make up those of the whole: by which weights, if by any."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch

from anybatch.checking.measuring import Outcome, norm_of

SOLVED_SLACK = 1e3  # times the tolerance: how much solved weights may leave, which are no better than the least squares


@dataclass
class Piece:
    """One loss of a batch or of a part of it.

    Args:
        value: of the loss, or of the total of a ``Mean``.
        gradient: some entries of its gradient, in float64.
        count: what a ``Mean`` is over, ``None`` for a plain loss.
    """

    value: float
    gradient: torch.Tensor
    count: float | None = None

    @property
    def is_finite(self) -> bool:
        """Whether value and gradient are."""
        return bool(torch.isfinite(torch.tensor(self.value)) and torch.isfinite(self.gradient).all())


@dataclass
class Pieces:
    """One loss of the whole batch, and of every part of every split.

    Args:
        name: of the loss.
        whole: of the whole batch.
        splits: for each split one a part.
    """

    name: str
    whole: Piece
    splits: list[list[Piece]]

    @property
    def is_mean(self) -> bool:
        """Whether the loss is a ``Mean``, whose totals are compared."""
        return self.whole.count is not None


def piece_of(outcome: Outcome, name: str) -> Piece:
    """One loss of a run in which it was the only one that counted.

    Args:
        outcome: of the run.
        name: of the loss.
    """
    count = outcome.counts.get(name)
    factor = 1.0 if count is None else count
    return Piece(outcome.losses.get(name, 0.0) * factor, outcome.sample() * factor, count)


def narrowed(outcome: Outcome, positions: Collection[int]) -> Piece:
    """The gradient of some parameters.

    Args:
        outcome: of a run.
        positions: of the parameters.
    """
    return Piece(0.0, outcome.sample(positions))


def residual(pieces: Pieces, split: int, weights: Sequence[float]) -> float:
    """How far the weighted sum of a split's parts is from the whole, relative to what is summed.

    Args:
        pieces: a loss.
        split: which of its splits.
        weights: one a part; parts of weight 0 may be not finite.

    Returns:
        The larger of the relative differences of the value and of the gradient; infinite if it is not finite.
    """
    used = [(w, part) for w, part in zip(weights, pieces.splits[split], strict=True) if w != 0]
    if not all(part.is_finite for _, part in used):
        return float("inf")
    whole = pieces.whole
    gradient = sum((w * part.gradient for w, part in used), torch.zeros_like(whole.gradient))
    gradient_scale = norm_of(whole.gradient) + sum(abs(w) * norm_of(part.gradient) for w, part in used)
    value = sum(w * part.value for w, part in used)
    value_scale = abs(whole.value) + sum(abs(w * part.value) for w, part in used)
    differences = (
        _over(norm_of(gradient - whole.gradient), gradient_scale),
        _over(abs(value - whole.value), value_scale),
    )
    return max(differences)


def _over(difference: float, scale: float) -> float:
    return difference / scale if scale else 0.0


@dataclass
class Shared:
    """A term that every part holds whole.

    Args:
        value: of the term.
        norm: of its gradient, of the entries that were looked at.
    """

    value: float
    norm: float


def shared_term(pieces: Pieces, tolerance: float) -> Shared | None:
    """Finds a term of a sum that does not depend on the samples: N parts hold it N times, the whole once.

    Args:
        pieces: a loss with at least two splits of different numbers of parts.
        tolerance: up to which relative error the two splits agree about it.

    Returns:
        The term, or ``None`` if the splits do not agree about one.
    """
    found: list[tuple[float, torch.Tensor]] = []
    scale = norm_of(pieces.whole.gradient)
    value_scale = abs(pieces.whole.value)
    for split in pieces.splits:
        if not all(part.is_finite for part in split):
            return None
        value = sum(part.value for part in split) - pieces.whole.value
        gradient = sum((part.gradient for part in split), -pieces.whole.gradient)
        found.append((value / (len(split) - 1), gradient / (len(split) - 1)))
        scale += sum(norm_of(part.gradient) for part in split)
        value_scale += sum(abs(part.value) for part in split)
    if len({len(split) for split in pieces.splits}) < 2:
        return None
    (value, gradient), *others = found
    for other_value, other in others:
        if norm_of(gradient - other) > tolerance * scale or abs(value - other_value) > tolerance * value_scale:
            return None
    norm = norm_of(gradient)
    return Shared(value, norm) if norm > 10 * tolerance * scale or abs(value) > 10 * tolerance * value_scale else None


def solved_weights(pieces: Pieces, tolerance: float) -> list[list[float]] | None:
    """Solves for the weights by which the parts make up the whole, if the parts have enough to tell.

    Args:
        pieces: a loss.
        tolerance: up to which residual weights are a solution.

    Returns:
        For each split its weights, which are positive and add up to one; ``None`` if there are none, or too many.
    """
    solved = []
    for index, split in enumerate(pieces.splits):
        if not all(part.is_finite for part in split) or pieces.whole.gradient.numel() < len(split) + 1:
            return None
        columns = torch.stack([part.gradient for part in split], dim=1)
        scale = norm_of(columns)
        if not scale or int(torch.linalg.matrix_rank(columns / scale, rtol=1e-8)) < len(split):
            return None
        solution = torch.linalg.lstsq(columns / scale, (pieces.whole.gradient / scale)[:, None]).solution[:, 0]
        weights = [float(weight) for weight in solution]
        if (
            min(weights) < -1e-6
            or abs(sum(weights) - 1) > 1e-6
            or residual(pieces, index, weights) > SOLVED_SLACK * tolerance
        ):
            return None
        solved.append(weights)
    return solved


def own_weights(pieces: Pieces, tolerance: float) -> list[list[float]] | None:
    """Solves for weights as ``solved_weights`` does, where some parts have no gradient, and so no weight.

    Args:
        pieces: a loss.
        tolerance: up to which residual weights are a solution.

    Returns:
        For each split the weights of the parts that have a gradient; ``None`` if there are none.
    """
    reached = [[part for part in split if norm_of(part.gradient)] for split in pieces.splits]
    if any(len(split) < 1 for split in reached):
        return None
    found = Pieces(pieces.name, pieces.whole, reached)
    weights = solved_weights(found, tolerance)
    is_exact = weights is not None and all(residual(found, i, own) <= 10 * tolerance for i, own in enumerate(weights))
    return weights if is_exact else None
