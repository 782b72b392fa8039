"""The gradient of each loss at the cut: one row a backward, compared, weighted, and summed as without it."""

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

import anybatch
import reference
from anybatch import AnyBatchError
from test_cut import Heads, X

Weighting = Callable[[torch.Tensor], torch.Tensor]


def loss_of(head: nn.Module, features: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = head(features).square().mean()
    return loss


def true_rows(losses: list[torch.Tensor], at: list[torch.Tensor]) -> torch.Tensor:
    """The matrix of the gradients of the losses at some tensors, by plain autograd."""
    rows = []
    for loss in losses:
        found = torch.autograd.grad(loss, at, retain_graph=True, allow_unused=True)
        parts = [torch.zeros_like(t) if g is None else g for t, g in zip(at, found, strict=True)]
        rows.append(torch.cat([part.flatten() for part in parts]))
    return torch.stack(rows)


def seen(kept: list[torch.Tensor]) -> Weighting:
    """A weighting that keeps the matrix and sums it."""

    def weighting(matrix: torch.Tensor) -> torch.Tensor:
        kept.append(matrix.clone())
        return matrix.sum(0)

    return weighting


def near(found: torch.Tensor, expected: torch.Tensor) -> None:
    reference.assert_float64([found], [expected], "the tensor")


def test_each_backward_is_a_row() -> None:
    model, kept = Heads(), []  # type: ignore[var-annotated]
    features = model.trunk(X)
    rows = true_rows([loss_of(head, features) for head in model.heads], [features])
    expected, _ = reference.whole_gradients(model, lambda *_: sum(loss_of(h, model.trunk(X)) for h in model.heads), X)
    model.passes = 0
    cut = anybatch.cut(model.trunk(X), weighting=seen(kept))
    with cut as leaf:
        for head in model.heads:
            loss_of(head, leaf).backward()
            assert leaf.grad is None
    near(kept[0], rows)
    assert model.passes == 1
    assert cut.names == ("loss_0", "loss_1", "loss_2")
    near(cut.norms, rows.norm(dim=1))
    assert not cut.norms.requires_grad
    reference.assert_float64(reference.gradients_of(model), expected)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_rows_without_a_weighting_change_no_bit(dtype: torch.dtype) -> None:
    model = Heads(5).to(dtype)
    found = []
    for per_loss in (False, True):
        reference.clear(model)
        with anybatch.cut(model.trunk(X.to(dtype)), per_loss=per_loss) as leaf:
            for head in model.heads:
                loss_of(head, leaf).backward()
        found.append(reference.gradients_of(model))
    reference.assert_bitwise(found[1], found[0])


@given(st.lists(st.lists(st.integers(0, 3), max_size=4, unique=True), min_size=1, max_size=6), st.integers(0, 2**31))
def test_any_losses_of_any_leaves(reached: list[list[int]], seed: int) -> None:
    """Loss k reaches some of four leaves, some of them twice over; what none reaches is in no column."""
    torch.manual_seed(seed)
    shapes = [(2, 3), (), (4,), (1, 2, 2)]
    weights = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    factors = [torch.randn(shape, dtype=torch.float64) for shape in shapes]

    def losses(tensors: list[torch.Tensor]) -> Iterator[torch.Tensor]:
        own = torch.ones((), dtype=torch.float64, requires_grad=True)
        for k, leaves in enumerate(reached):
            total = own * k
            for i in leaves:
                total = total + (tensors[i] * factors[i]).sin().sum() + k * tensors[i].square().sum()
            yield total

    def made() -> list[torch.Tensor]:
        return [weight * 2 for weight in weights]

    tensors = made()
    used = sorted({i for leaves in reached for i in leaves})
    rows = true_rows([loss for loss, leaves in zip(losses(tensors), reached, strict=True) if leaves],
                     [tensors[i] for i in used]) if used else torch.zeros(0, 0, dtype=torch.float64)  # fmt: skip
    coefficients = torch.randn(len(rows), dtype=torch.float64)
    kept: list[torch.Tensor] = []

    def weighting(matrix: torch.Tensor) -> torch.Tensor:
        kept.append(matrix.clone())
        return (coefficients @ matrix)[None]

    with warnings.catch_warnings():
        warnings.simplefilter("error" if used else "ignore")
        cut = anybatch.cut(made(), weighting=weighting)
        with cut as leaves:
            for loss in losses(leaves):
                loss.backward()
    assert len(cut.names) == len(rows)
    assert cut.norms.shape == (len(rows),)
    if not used:
        assert kept == []
        return
    near(kept[0], rows)
    near(cut.norms, rows.norm(dim=1))
    expected = iter((coefficients @ rows).split([weights[i].numel() for i in used]))
    for i, weight in enumerate(weights):
        if i in used:
            assert weight.grad is not None
            near(weight.grad.flatten(), 2 * next(expected))
        else:
            assert weight.grad is None


def test_a_joint_backward_is_one_row() -> None:
    model = Heads()
    features = model.trunk(X)
    losses = [loss_of(head, features) for head in model.heads]
    kept: list[torch.Tensor] = []
    with anybatch.cut(model.trunk(X), weighting=seen(kept)) as leaf:
        torch.autograd.backward([loss_of(head, leaf) for head in model.heads[:2]])
        loss_of(model.heads[2], leaf).backward()
    near(kept[0], true_rows([losses[0] + losses[1], losses[2]], [features]))


def test_what_autograd_grad_asks_for_is_no_row() -> None:
    """A penalty on the gradient at the cut: asked for on the way, and one row with its loss."""
    model, kept = Heads(1), []  # type: ignore[var-annotated]

    def loss_with_penalty(at: torch.Tensor) -> torch.Tensor:
        loss = model.heads[0](at).tanh().square().mean()
        (slope,) = torch.autograd.grad(loss, at, create_graph=True)
        total: torch.Tensor = loss + slope.square().sum()
        return total

    features = model.trunk(X)
    rows = true_rows([loss_with_penalty(features)], [features])
    with anybatch.cut(model.trunk(X), weighting=seen(kept)) as leaf:
        loss_with_penalty(leaf).backward()
    near(kept[0], rows)


@pytest.mark.parametrize("first", [True, False])
def test_a_backward_within_a_backward_is_no_row_of_its_own(first: bool) -> None:
    """A reentrant checkpoint whose function closes over the leaf gives it gradient from an inner backward."""
    model, kept = Heads(2), []  # type: ignore[var-annotated]
    start = torch.ones(6, 8, dtype=torch.float64, requires_grad=True)

    def loss_at(at: torch.Tensor) -> torch.Tensor:
        inner = checkpoint(lambda x: (x * at).sin().sum(), start, use_reentrant=True)
        outer = loss_of(model.heads[0], at)
        total: torch.Tensor = outer + inner if first else inner + outer
        return total

    features = model.trunk(X)
    plain = (start * features).sin().sum() + loss_of(model.heads[0], features)
    rows = true_rows([plain, loss_of(model.heads[1], features)], [features])
    with anybatch.cut(model.trunk(X), weighting=seen(kept)) as leaf:
        loss_at(leaf).backward()
        loss_of(model.heads[1], leaf).backward()
    near(kept[0], rows)


class Failing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *_gradients: Any) -> Any:
        raise ZeroDivisionError


def test_a_backward_that_fails_is_no_row() -> None:
    model, kept = Heads(2), []  # type: ignore[var-annotated]
    features = model.trunk(X)
    rows = true_rows([loss_of(head, features) for head in model.heads], [features])
    own = torch.ones(3, dtype=torch.float64, requires_grad=True)
    cut = anybatch.cut(model.trunk(X), weighting=seen(kept))
    with cut as leaf:
        loss_of(model.heads[0], leaf).backward()
        for _ in range(2):
            broken = Failing.apply(own * 1).sum()  # type: ignore[no-untyped-call]
            with pytest.raises(ZeroDivisionError):  # the newer node goes first: the leaf gets its part before
                (broken + leaf.sum()).backward()
        loss_of(model.heads[1], leaf).backward()
    near(kept[0], rows)
    assert cut.names == ("loss_0", "loss_1")


def test_mixed_precision_of_the_leaves() -> None:
    w = torch.tensor([1.0, 2.0], dtype=torch.float64, requires_grad=True)
    kept: list[torch.Tensor] = []
    parts = {"half": w.bfloat16(), "single": w.float(), "complex": w.to(torch.complex128) * 1j, "count": 3}
    with anybatch.cut(parts, weighting=lambda m: kept.append(m.clone()) or m.new_tensor([1.0, 2.0, 4.0])) as leaf:  # type: ignore[func-returns-value]
        assert leaf["half"].dtype is torch.bfloat16
        (leaf["half"] * 3).sum().backward()
        (leaf["single"] * 5).sum().backward()
        leaf["complex"].imag.square().sum().backward()
    assert kept[0].dtype is torch.float64
    expected = torch.zeros(3, 8, dtype=torch.float64)
    expected[0, :2], expected[1, 2:4] = 3, 5
    expected[2, 5], expected[2, 7] = 2, 4  # the imaginary parts
    assert torch.equal(kept[0], expected)
    assert w.grad is not None
    assert w.grad.tolist() == [3 + 10 + 8, 3 + 10 + 16]


def test_only_low_precision_is_compared_in_float32() -> None:
    w = torch.ones(4096, requires_grad=True)
    cut = anybatch.cut(w.bfloat16(), per_loss=True)
    with cut as leaf:
        leaf.sum().backward()
        (leaf[:1024] * 3).sum().backward()
    assert cut.norms.dtype is torch.float32
    assert cut.norms.tolist() == [64.0, 96.0]


def test_sparse_and_dense_gradients_of_a_table() -> None:
    table = torch.ones(5, 2, requires_grad=True)
    kept: list[torch.Tensor] = []
    for weighting in (None, seen(kept)):
        table.grad = None
        cut = anybatch.cut(table * 1, weighting=weighting, per_loss=True)
        with cut as leaf:
            for index in (1, 3):
                nn.functional.embedding(torch.tensor([index]), leaf, sparse=True).sum().backward()
            (leaf * 2).sum().backward()
            nn.functional.embedding(torch.tensor([3]), leaf, sparse=True).sum().backward()
        assert table.grad is not None
        assert table.grad[:, 0].tolist() == [2, 3, 2, 4, 2]
    assert kept[0][:, 2].tolist() == [1, 0, 2, 0]


def test_a_row_of_zeros_has_the_norm_0() -> None:
    w = torch.ones(3, requires_grad=True)
    cut = anybatch.cut(w * 1, per_loss=True)
    with cut as leaf:
        (leaf * 0).sum().backward()
        leaf.sum().backward()
    assert cut.norms[0].item() == 0


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_what_is_not_finite_is_not_hidden(bad: float) -> None:
    w = torch.ones(3, requires_grad=True)
    cut = anybatch.cut(w * 1, per_loss=True)
    with cut as leaf:
        (leaf * bad).sum().backward()
        leaf.sum().backward()
    assert not cut.norms[0].isfinite()
    assert cut.norms[1].isfinite()


# What can be read, and when.


def test_nothing_is_readable_unless_asked_for_or_before_the_end() -> None:
    model = Heads(1)
    plain = anybatch.cut(model.trunk(X))
    with plain as leaf:
        loss_of(model.heads[0], leaf).backward()
    with pytest.raises(AnyBatchError, match="per_loss=True"):
        plain.norms  # noqa: B018
    cut = anybatch.cut(model.trunk(X), per_loss=True)
    with cut as leaf:
        loss_of(model.heads[0], leaf).backward()
        with pytest.raises(AnyBatchError, match="after the with block"):
            cut.names  # noqa: B018
    assert cut.names == ("loss_0",)


def test_nothing_to_differentiate_gives_nothing() -> None:
    model = Heads(1)
    for cut in (anybatch.cut({"none": None}, per_loss=True), anybatch.cut(X, weighting=lambda matrix: matrix[0])):
        with cut:
            loss_of(model.heads[0], model.trunk(X)).backward()
        assert (cut.names, cut.norms.shape) == ((), (0,))
    with torch.no_grad():
        cut = anybatch.cut(model.trunk(X), weighting=lambda matrix: matrix[0])
        with cut as leaf:
            loss_of(model.heads[0], leaf)
        assert cut.names == ()


def test_a_plain_cut_has_no_hooks_for_rows() -> None:
    model = Heads(1)
    with anybatch.cut(model.trunk(X)) as leaf:
        assert not leaf._post_accumulate_grad_hooks
        loss_of(model.heads[0], leaf).backward()


def test_the_hooks_come_off() -> None:
    model = Heads(1)
    cut = anybatch.cut(model.trunk(X), per_loss=True)
    leaves = []

    def fail() -> None:
        with cut as leaf:
            leaves.append(leaf)
            assert leaf._post_accumulate_grad_hooks
            loss_of(model.heads[0], leaf).backward()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert not leaves[0]._post_accumulate_grad_hooks
    assert model.passes == 0
    with pytest.raises(AnyBatchError, match="not ended without an error"):
        cut.norms  # noqa: B018


# On a GPU, where hooks run in a thread of the device.


@pytest.mark.gpu
def test_rows_on_a_device_wait_for_nothing() -> None:
    model, x = Heads(4).cuda(), X.cuda()
    features = model.trunk(x)
    rows = true_rows([loss_of(head, features) for head in model.heads], [features])

    def run() -> anybatch.cut:
        cut = anybatch.cut(model.trunk(x), weighting=lambda matrix: matrix.sum(0))
        with cut as leaf:
            for head in model.heads:
                loss_of(head, leaf).backward()
        return cut

    run()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        cut = run()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert cut.norms.is_cuda
    near(cut.norms, rows.norm(dim=1))


@pytest.mark.gpu
def test_a_backward_within_a_backward_on_a_device() -> None:
    start = torch.ones(3, device="cuda", dtype=torch.float64, requires_grad=True)
    w = torch.tensor([1.0, 2.0, 3.0], device="cuda", dtype=torch.float64, requires_grad=True)
    cut = anybatch.cut(w * 2, per_loss=True)
    with cut as leaf:
        for sign in (1, -1):
            inner = checkpoint(lambda x: (x * leaf).sum(), start, use_reentrant=True)
            (sign * (inner + leaf.square().sum())).backward()
    assert cut.names == ("loss_0", "loss_1")
    assert cut.norms[0] == cut.norms[1] > 0


@pytest.mark.gpu
def test_leaves_on_two_devices() -> None:
    w = torch.tensor([1.0, 2.0], requires_grad=True)
    kept: list[torch.Tensor] = []
    with anybatch.cut([w * 1, w.cuda() * 2], weighting=seen(kept)) as (here, there):
        (here * 3).sum().backward()
        (there.sum().cpu() + here.sum()).backward()
    assert kept[0].tolist() == [[3.0, 3.0, 0.0, 0.0], [1.0, 1.0, 1.0, 1.0]]
    assert w.grad is not None
    assert w.grad.tolist() == [6.0, 6.0]
