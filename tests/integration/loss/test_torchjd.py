"""TorchJD's aggregators at the cut, unchanged: the same gradient as TorchJD's own way gives."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import anybatch
import reference
from test_cut import Heads, X

aggregation = pytest.importorskip("torchjd.aggregation")
autojac = pytest.importorskip("torchjd.autojac")


class Conflicting(Heads):
    """Heads that pull the features apart: UPGrad changes what a sum would do."""

    def losses(self, features: torch.Tensor) -> list[torch.Tensor]:
        signs = (1.0, -3.0, 0.5)
        return [(head(features).tanh() * sign).mean() for head, sign in zip(self.heads, signs, strict=True)]


def conflicting() -> Conflicting:
    torch.manual_seed(0)
    model = Conflicting(3)
    for head in model.heads:
        nn.init.constant_(head.weight, 0.3)  # type: ignore[arg-type]
    return model


def loss_fn(aggregator: Any) -> Any:
    def losses(model: Any, batch: torch.Tensor) -> Iterator[torch.Tensor]:
        features = model.trunk(batch)
        with anybatch.cut(features, weighting=aggregator) as leaf:
            yield from (head for head in model.losses(leaf))

    return losses


def by_torchjd(model: Conflicting, aggregator: Any) -> list[Any]:
    """Rows at the features by TorchJD, aggregated by it, and sent through the trunk."""
    features = model.trunk(X)
    leaf = features.detach().requires_grad_()
    losses = model.losses(leaf)
    heads = torch.autograd.grad(torch.stack(losses).sum(), list(model.heads.parameters()), retain_graph=True)
    autojac.backward(losses, inputs=[leaf])
    autojac.jac_to_grad([leaf], aggregator)
    trunk = torch.autograd.grad(features, list(model.trunk.parameters()), leaf.grad)
    return [*trunk, *heads]


NAMES = ("UPGrad", "MGDA", "DualProj", "PCGrad", "IMTLG", "AlignedMTL", "ConFIG", "Mean", "Sum")


@pytest.mark.parametrize("name", [name for name in NAMES if hasattr(aggregation, name)])
def test_an_aggregator_is_a_weighting_as_it_is(name: str) -> None:
    model = conflicting()
    torch.manual_seed(7)  # some of them draw
    expected = by_torchjd(model, getattr(aggregation, name)())
    torch.manual_seed(7)
    anybatch.backward(model, loss_fn(getattr(aggregation, name)()), X)
    reference.assert_float64(reference.gradients_of(model), expected)


def test_upgrad_is_not_the_sum_here() -> None:
    model = conflicting()
    by_upgrad, by_sum = by_torchjd(model, aggregation.UPGrad()), by_torchjd(model, aggregation.Sum())
    assert reference.distance(by_upgrad, by_sum) > 0.1 * reference.norm(by_sum)


def test_it_is_mtl_backward_where_the_shared_parameters_are_the_features() -> None:
    """There the rows of the parameters, which TorchJD combines, are the rows of the cut."""
    model = conflicting()
    shared = nn.Parameter(torch.randn(6, 8, dtype=torch.float64))
    features = shared * 1
    autojac.mtl_backward(model.losses(features), features=features)
    autojac.jac_to_grad([shared], aggregation.UPGrad())
    expected = reference.gradients_of([shared, *model.heads.parameters()])
    reference.clear([shared, *model.heads.parameters()])
    with anybatch.cut(shared * 1, weighting=aggregation.UPGrad()) as leaf:
        for loss in model.losses(leaf):
            loss.backward(retain_graph=True)
    reference.assert_float64(reference.gradients_of([shared, *model.heads.parameters()]), expected)


def test_it_is_mtl_backward_for_what_adds_rows_alike() -> None:
    model = conflicting()
    features = model.trunk(X)
    autojac.mtl_backward(model.losses(features), features=features)
    autojac.jac_to_grad(list(model.trunk.parameters()), aggregation.Mean())
    expected = reference.gradients_of(model)
    reference.clear(model)
    anybatch.backward(model, loss_fn(aggregation.Mean()), X)
    reference.assert_float64(reference.gradients_of(model), expected)


def test_a_weighting_of_torchjd_gives_weights() -> None:
    model = conflicting()
    expected = by_torchjd(model, aggregation.Mean())
    anybatch.backward(model, loss_fn(aggregation.MeanWeighting()), X)
    reference.assert_float64(reference.gradients_of(model), expected)


def test_upgrad_in_a_training_step_conflicts_with_no_loss_at_the_cut() -> None:
    """No loss rises to first order when the features move against what is sent upstream, as one does with the sum."""
    model = conflicting()
    upgrad, seen = aggregation.UPGrad(), []

    def watched(matrix: torch.Tensor) -> torch.Tensor:
        vector: torch.Tensor = upgrad(matrix)
        seen.append((matrix @ vector, matrix @ matrix.sum(0)))
        return vector

    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    expected = by_torchjd(model, aggregation.UPGrad())
    before = [p.detach().clone() for p in model.parameters()]
    anybatch.TrainStep(model, loss_fn(watched), optimizer)(X)
    moved: list[Any] = [then - now.detach() for then, now in zip(before, model.parameters(), strict=True)]
    reference.assert_float64(moved, expected)
    ((by_upgrad, by_sum),) = seen
    assert by_upgrad.min() > -1e-9
    assert by_sum.min() < -1e-3
