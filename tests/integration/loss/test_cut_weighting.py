"""What goes upstream from a cut: the sum, or what a function of the rows of the losses gives."""

from typing import Any

import pytest
import torch

import anybatch
import reference
from anybatch import LossError, NotSplittable
from anybatch.loss.cutting import Restriction, accumulation, backward_to_leaves
from test_cut import Heads, X
from test_cut_rows import loss_of, near, true_rows


def through(model: Heads, weighting: Any) -> None:
    with anybatch.cut(model.trunk(X), weighting=weighting) as leaf:
        for head in model.heads:
            loss_of(head, leaf).backward()


def combined(weighting: Any, loss_count: int = 3) -> tuple[Any, torch.Tensor]:
    """What the trunk gets by a weighting, and the rows at the trunk's parameters."""
    torch.manual_seed(0)
    model = Heads(loss_count)
    features = model.trunk(X)
    rows = true_rows([loss_of(head, features) for head in model.heads], list(model.trunk.parameters()))
    through(model, weighting)
    return torch.cat([g.flatten() for g in reference.gradients_of(model.trunk) if g is not None]), rows


@pytest.mark.parametrize(
    "weighting",
    [
        lambda matrix: torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64),
        lambda matrix: torch.tensor([1, -2, 0.5]),
        lambda matrix: torch.tensor([[1.0], [-2.0], [0.5]], requires_grad=True),
        lambda matrix: matrix[0] - 2 * matrix[1] + 0.5 * matrix[2],
        lambda matrix: (matrix[0] - 2 * matrix[1] + 0.5 * matrix[2])[None],
        lambda matrix: matrix[0].sub_(2 * matrix[1]).add_(0.5 * matrix[2]),
    ],
)
def test_weights_or_the_combined_row(weighting: Any) -> None:
    found, rows = combined(weighting)
    near(found, rows[0] - 2 * rows[1] + 0.5 * rows[2])


@pytest.mark.parametrize(
    ("result", "words"),
    [
        (None, "NoneType"),
        ([1.0, 1.0, 1.0], "list"),
        (torch.ones(4), r"shape \(4,\).*48 elements.*3 weights"),
        (torch.ones(3, 48), r"shape \(3, 48\)"),
        (torch.ones(()), r"shape \(\)"),
    ],
)
def test_a_result_that_is_neither_is_refused_and_upstream_untouched(result: Any, words: str) -> None:
    model = Heads()
    with pytest.raises(LossError, match=words):
        through(model, lambda matrix: result)
    assert model.passes == 0
    assert all(p.grad is None for p in model.trunk.parameters())


def test_a_square_matrix_needs_a_shape_that_says_what_the_result_is() -> None:
    w = torch.ones(2, dtype=torch.float64, requires_grad=True)

    def arriving(weighting: Any) -> list[float]:
        w.grad = None
        with anybatch.cut(w * 1, weighting=weighting) as leaf:
            (leaf * torch.tensor([1.0, 2.0])).sum().backward()
            (leaf * torch.tensor([3.0, 5.0])).sum().backward()
        assert w.grad is not None
        return [float(value) for value in w.grad]

    with pytest.raises(LossError, match=r"\(1, 2\) for the gradient, or \(2, 1\)"):
        arriving(lambda matrix: torch.ones(2))
    assert arriving(lambda matrix: torch.tensor([[7.0, 9.0]])) == [7.0, 9.0]
    assert arriving(lambda matrix: torch.tensor([[1.0], [10.0]])) == [31.0, 52.0]


def test_a_weighting_that_is_no_function() -> None:
    with pytest.raises(LossError, match=r"weighting is a str.*expected a function"):
        anybatch.cut(torch.ones(2), weighting="upgrad")  # type: ignore[arg-type]


# Within an accumulation.


def test_a_weighting_is_refused_in_micro_batches() -> None:
    model = Heads()
    token = accumulation.set(Restriction(micro_batches=3))
    try:
        with (
            pytest.raises(NotSplittable, match=r"one of 3 micro-batches.*anybatch\.Coupled\(lambda.*one micro-batch"),
            anybatch.cut(model.trunk(X), weighting=lambda matrix: matrix.sum(0)),
        ):
            pytest.fail("the block was entered")
        cut = anybatch.cut(model.trunk(X), per_loss=True)
        with cut as leaf:
            loss_of(model.heads[0], leaf).backward()
        assert cut.names == ("loss_0",)
        with torch.no_grad(), anybatch.cut(model.trunk(X), weighting=lambda matrix: matrix.sum(0)) as leaf:
            loss_of(model.heads[0], leaf)
    finally:
        accumulation.reset(token)


def test_rows_are_unscaled_for_the_weighting_and_scaled_again() -> None:
    scale = torch.tensor(1024.0)
    found = []
    for times in (None, scale):
        torch.manual_seed(0)
        model, kept = Heads(), []  # type: ignore[var-annotated]
        token = accumulation.set(Restriction(scale=times))

        def weighting(matrix: torch.Tensor, kept: list[torch.Tensor] = kept) -> torch.Tensor:
            kept.append(matrix.clone())
            row: torch.Tensor = matrix.sum(0) / matrix.norm() ** 2  # not linear: a scale that is left in changes it
            return row

        try:
            cut = anybatch.cut(model.trunk(X), weighting=weighting)
            with cut as leaf:
                for head in model.heads:
                    (loss_of(head, leaf) * (1 if times is None else times)).backward()
        finally:
            accumulation.reset(token)
        gradients = reference.gradients_of(model.trunk)
        found.append((kept[0], cut.norms, gradients))
    (rows, norms, plain), (rows2, norms2, scaled) = found
    assert torch.equal(rows, rows2)
    assert torch.equal(norms, norms2)
    reference.assert_bitwise([None if g is None else g / 1024 for g in scaled], plain)


def test_an_overflow_goes_past_the_weighting_to_the_scaler() -> None:
    w = torch.ones(3, requires_grad=True)
    token = accumulation.set(Restriction(scale=torch.tensor(2.0**16)))
    try:
        with anybatch.cut(w.half(), weighting=lambda matrix: pytest.fail("asked")) as leaf:
            (leaf * 2.0**16).float().sum().backward()
            leaf.float().sum().backward()
    finally:
        accumulation.reset(token)
    assert w.grad is not None
    assert w.grad.isinf().all()


def test_names_are_those_of_the_losses() -> None:
    model = Heads()
    outer = anybatch.cut(model.trunk(X), per_loss=True)
    with outer as features:
        backward_to_leaves([loss_of(model.heads[0], features)], [torch.ones((), dtype=torch.float64)], "shape")
        inner = anybatch.cut(features * 2, per_loss=True)
        with inner as deep:
            backward_to_leaves([loss_of(model.heads[1], deep)], [torch.ones((), dtype=torch.float64)], "colour")
            backward_to_leaves([loss_of(model.heads[2], deep)], [torch.ones((), dtype=torch.float64)], "size")
        loss_of(model.heads[1], features).backward()
    assert inner.names == ("colour", "size")
    assert outer.names == ("shape", "colour+size", "loss_2")


def test_a_gradient_that_was_put_there_by_hand_is_a_row() -> None:
    w = torch.ones(3, requires_grad=True)
    cut = anybatch.cut(w * 1, weighting=lambda matrix: matrix.new_tensor([1.0, 10.0]))
    with cut as leaf:
        (leaf * 2).sum().backward()
        leaf.grad = torch.full((3,), 5.0)
    assert cut.names == ("loss_0", "loss_1")
    assert w.grad is not None
    assert w.grad.tolist() == [52.0] * 3


def test_autocast_does_not_reach_the_weighting() -> None:
    w = torch.randn(4, 8, requires_grad=True)
    kept: list[torch.Tensor] = []

    def weighting(matrix: torch.Tensor) -> torch.Tensor:
        kept.append(matrix @ matrix.T)
        return matrix.new_tensor([1 + 2.0**-20, 1.0])

    with (
        torch.autocast(torch.get_default_device().type, torch.bfloat16),
        anybatch.cut(w * 1, weighting=weighting) as leaf,
    ):
        leaf.sum().backward()
        leaf.sum().backward()
    assert kept[0].dtype is torch.float32
    assert w.grad is not None
    assert torch.equal(w.grad, torch.full((4, 8), 2 + 2.0**-20))
