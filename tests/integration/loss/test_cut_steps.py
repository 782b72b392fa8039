"""The gradient of each loss at the cut, within ``backward``, ``TrainStep`` and ``check``."""

from collections.abc import Generator, Iterator
from typing import Any

import pytest
import torch

import anybatch
import reference
from anybatch import Mean
from test_several_losses import Batch, Loss, Model, batch_of, classify, sequence


def heads_loss(**options: Any) -> tuple[Loss, list[Any]]:
    made: list[Any] = []

    def loss_fn(model: Any, batch: Batch) -> Generator[Any, None, Any]:
        cut = anybatch.cut(model.trunk(batch), **options)
        made.append(cut)
        with cut as t:
            yield "shape", classify(model.heads[0], t["pair"].a, t["record"].b)
            yield "colour", classify(model.heads[1], t["record"].a[0], t["record"].b)
            yield "size", sequence(model.heads[2], t["packed"])
        if made[-1]._per_loss and torch.is_grad_enabled():
            return {"norm": Mean(made[-1].norms[0], 1)}
        return None

    return loss_fn, made


@pytest.mark.parametrize("size", [2, 5, None])
def test_rows_are_kept_without_changing_a_bit(size: int | None) -> None:
    model, batch = Model(), batch_of()
    found = []
    for per_loss in (False, True):
        reference.clear(model)
        loss_fn, made = heads_loss(per_loss=per_loss)
        out = anybatch.backward(model, loss_fn, batch, micro_batch_size=size, count="forward")
        found.append(reference.gradients_of(model))
    reference.assert_bitwise(found[1], found[0])
    kept = [cut for cut in made if cut._measured is not None and cut.names]
    assert len(kept) == out.micro_batches
    assert all(cut.norms.shape == (3,) for cut in kept)
    norm = sum(float(cut.norms[0]) for cut in kept) / len(kept)
    assert abs(out.metrics["norm"] - norm) < 1e-12


def weigh(matrix: torch.Tensor) -> torch.Tensor:
    """The rows at equal length, which no factor before it leaves alone."""
    row: torch.Tensor = (matrix / matrix.norm(dim=1, keepdim=True)).sum(0)
    return row


def expected_with_weighting(model: Model, batch: Batch) -> list[Any]:
    """By plain autograd: rows at the cut, then the vector-Jacobian product of the trunk."""
    t = model.trunk(batch)
    tensors = [t["pair"].a, t["record"].a[0], t["packed"].data]
    at = [tensor.detach().requires_grad_() for tensor in tensors]  # one depends on another: a row is of the leaves
    losses = [
        classify(model.heads[0], at[0], batch["labels"]),
        classify(model.heads[1], at[1], batch["labels"]),
        model.heads[2](at[2]).square().sum() / len(at[2]),
    ]
    rows = torch.zeros(3, sum(leaf.numel() for leaf in at), dtype=torch.float64)
    for row, loss in zip(rows, losses, strict=True):
        found = torch.autograd.grad(loss, at, retain_graph=True, allow_unused=True)
        for piece, gradient in zip(row.split([leaf.numel() for leaf in at]), found, strict=True):
            if gradient is not None:
                piece.copy_(gradient.flatten())
    pieces = weigh(rows).split([leaf.numel() for leaf in at])
    arriving = [piece.view_as(leaf) for piece, leaf in zip(pieces, at, strict=True)]
    trunk = torch.autograd.grad(tensors, list(model.trunk.parameters()), arriving)
    heads = torch.autograd.grad(sum(losses), list(model.heads[:3].parameters()))
    return [*trunk, *heads]


@pytest.mark.parametrize("scaled", [False, True])
def test_a_weighting_in_a_step(scaled: bool) -> None:
    model, batch = Model(), batch_of()
    expected = expected_with_weighting(model, batch)
    loss_fn, made = heads_loss(weighting=weigh)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0) if scaled else None
    step = anybatch.TrainStep(model, loss_fn, optimizer, scaler=scaler)
    start = [p.detach().clone() for p in model.parameters()]
    step(batch)
    wanted = [*model.trunk.parameters(), *model.heads[:3].parameters()]
    reference.assert_float64([p.grad for p in wanted], expected)
    by_id = dict(zip(map(id, model.parameters()), start, strict=True))
    moved: list[Any] = [by_id[id(p)] - p.detach() for p in wanted]
    reference.assert_float64(moved, expected)
    assert made[-1].norms.shape == (3,)


def test_the_names_are_the_yielded_ones() -> None:
    loss_fn, made = heads_loss(per_loss=True)
    anybatch.backward(Model(), loss_fn, batch_of(), micro_batch_size=4, count="forward")
    assert [cut.names for cut in made if cut.names] == [("shape", "colour", "size")] * 2


def test_a_weighting_is_refused_in_micro_batches_and_nothing_is_changed() -> None:
    model = Model()
    step = anybatch.TrainStep(
        model, heads_loss(weighting=weigh)[0], torch.optim.SGD(model.parameters(), lr=1.0), micro_batch_size=4
    )
    before = reference.everything(model)
    with pytest.raises(anybatch.NotSplittable, match=r"one of 2 micro-batches.*Coupled"):
        step(batch_of())
    reference.assert_unchanged(reference.everything(model), before)
    step.evaluate(batch_of())


def test_the_certificate_names_a_weighting() -> None:
    found = anybatch.check(Model(), heads_loss(weighting=weigh)[0], batch_of(), count="forward")
    assert not found.exact
    assert "anybatch.Coupled(" in " ".join(str(found).split())
    assert anybatch.check(Model(), heads_loss(per_loss=True)[0], batch_of(), count="forward").exact


@pytest.mark.parametrize("scale", [1.0, 1024.0])
@pytest.mark.parametrize("size", [2, 3, None])
def test_the_way_out_that_the_refusal_names(size: int | None, scale: float) -> None:
    """``Coupled``: the trunk in micro-batches, the heads and their weighting on the whole batch."""
    torch.manual_seed(0)
    model = torch.nn.ModuleDict(
        {"trunk": torch.nn.Linear(4, 8), "heads": torch.nn.ModuleList([torch.nn.Linear(8, 1) for _ in range(3)])}
    ).double()
    x = batch_of()["x"]

    def heads(model: Any, features: torch.Tensor, _batch: torch.Tensor) -> Iterator[torch.Tensor]:
        with anybatch.cut(features, weighting=weigh) as leaf:
            for head in model["heads"]:
                yield head(leaf).tanh().square().mean()

    def whole(model: Any, batch: torch.Tensor) -> Iterator[torch.Tensor]:
        yield from heads(model, model["trunk"](batch), batch)

    anybatch.backward(model, whole, x)
    expected = reference.gradients_of(model)
    reference.clear(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    coupled = anybatch.Coupled(lambda model, batch: model["trunk"](batch), heads)
    anybatch.backward(model, coupled, x, micro_batch_size=size, scaler=scaler)
    reference.assert_float64([None if g is None else g / scale for g in reference.gradients_of(model)], expected)
