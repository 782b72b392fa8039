"""Where the first number that is not finite came from: each origin by its operation, and silence of healthy runs."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import versions
from anybatch.doctor.recording.numbering import Numbering
from anybatch.doctor.samples.nonfinite import NonFiniteWatch
from anybatch.records.samples import NonFinite


def net() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3))


X, Y = torch.linspace(-1, 1, 24).reshape(6, 4), torch.tensor([0, 1, 2, 0, 1, 2])


def watch(model: nn.Module) -> NonFiniteWatch:
    numbering = Numbering(lambda fact: None)
    numbering.root(model)
    return NonFiniteWatch(numbering)


def of(model: nn.Module, loss: torch.Tensor) -> NonFinite:
    found = watch(model).at_backward(loss)
    assert found is not None
    assert found.file == __file__
    return found


@versions.saved_tensors
@pytest.mark.parametrize(
    ("loss_of", "op", "detail"),
    [
        (lambda y: (y * 0).log().mean(), "LogBackward0", "its input has 18 zeros"),
        (lambda y: (y.relu() * 0 * (y.relu() * 0).log()).sum(), "LogBackward0", "its input has 18 zeros"),
        (lambda y: (-y.abs()).sqrt().mean(), "SqrtBackward0", ""),
        (lambda y: (y / (y.detach() * 0)).mean(), "DivBackward0", "its divisor has 18 zeros"),
        (lambda y: (y * 1000).abs().exp().mean(), "ExpBackward0", ""),
        (lambda y: F.cross_entropy(y, torch.full((6,), -100)), "NllLossBackward0", "none of its targets counts"),
        (lambda y: y.sum().exp() * F.cross_entropy(y, torch.full((6,), -100)), "NllLossBackward0", "none of its"),
        (lambda y: F.cross_entropy(y, torch.full((6,), -100)) * y.sum().exp(), "NllLossBackward0", "none of its"),
        (lambda y: (y.abs() + 2).acos().mean(), "AcosBackward0", "18 numbers outside of -1 to 1"),
        (lambda y: (-y.abs() - 1).pow(0.5).mean(), "PowBackward0", "its base has 18 negative numbers"),
    ],
)
def test_the_operation_that_made_it(loss_of: Callable[[torch.Tensor], torch.Tensor], op: str, detail: str) -> None:
    model = net()
    found = of(model, loss_of(model(X)))
    assert (found.where, found.op) == ("forward", op)
    assert detail in found.detail
    assert found.value in ("nan", "inf", "-inf")
    assert "it comes after 2" in found.detail


@versions.saved_tensors
@pytest.mark.parametrize("value", ["nan", "inf"])
def test_what_comes_in_as_it_is(value: str) -> None:
    model = net()
    x = X.clone()
    x[1] = float(value)
    found = of(model, F.cross_entropy(model(x), Y))
    assert (found.where, found.op, found.value) == ("input", "AddmmBackward0", value)
    assert "shape [6, 4]" in found.detail


@versions.saved_tensors
@pytest.mark.parametrize("value", ["inf", "nan"])
def test_the_value_is_the_one_that_came_in(value: str) -> None:
    model, x = nn.Sequential(nn.Linear(4, 3)), X.clone()
    x[3, 2] = float(value)
    found = of(model, F.cross_entropy(model(x), Y))
    assert (found.where, found.value) == ("input", value)
    assert math.isnan(F.cross_entropy(model(x), Y).item())


def test_parameters_that_are_not_finite_have_names() -> None:
    model = net()
    with torch.no_grad():
        model[2].bias[1] = math.inf
    found = of(model, model(X).pow(2).mean())
    assert (found.where, found.parameters, found.module, found.value) == ("parameter", ("2.bias",), "2", "inf")


@versions.saved_tensors
def test_an_overflow_inside_of_a_module_has_its_name() -> None:
    model: Any = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Tanh())
    with torch.no_grad():
        model[0].weight.fill_(1e30)
        model[1].weight.fill_(1e30)
    y = model[1](model[0](torch.ones(2, 4)))
    found = of(model, (y * y).sum() - (y * y).sum())
    assert (found.where, found.op, found.module) == ("forward", "AddmmBackward0", "1")


@versions.saved_tensors
def test_masks_of_minus_infinity_are_not_the_origin() -> None:
    model = net()
    y = model(X)
    masked = (y + torch.where(torch.ones(6, 3).tril() > 0, 0.0, -math.inf)).softmax(-1)
    found = of(model, (masked.sum() * 0).log() + masked.logsumexp(0).sum())
    assert found.op == "LogBackward0"


@pytest.mark.parametrize(
    ("loss_of", "op"),
    [
        (lambda y: (y * 0).sqrt().mean(), "SqrtBackward0"),
        (lambda y: ((y * 0).pow(0.5) / 3).pow(2).sum(), "PowBackward0"),
        (lambda y: torch.where(y > 1e9, (y * 0).log(), y).sum(), "LogBackward0"),
        (lambda y: torch.where(y > 1e9, y / (y * 0), y).sum(), "DivBackward0"),
    ],
)
def test_a_gradient_that_is_not_finite_though_the_loss_is(
    loss_of: Callable[[torch.Tensor], torch.Tensor], op: str
) -> None:
    model = net()
    watched = watch(model)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = loss_of(model(X))
    assert watched.at_backward(loss) is None
    loss.backward()
    found = watched.at_step(sgd)
    assert found is not None
    assert (found.where, found.op, found.value) == ("gradient", op, "nan")
    assert found.parameters[0].startswith("2.")
    assert len(found.parameters) == 4
    assert found.loss is not None
    assert watched.at_step(sgd) is None  # once


def test_the_branch_whose_gradient_is_bad_is_told_from_the_other() -> None:
    model = nn.ModuleDict({"good": nn.Linear(4, 2), "bad": nn.Linear(4, 2)})
    watched = watch(model)
    good = (model["good"](X) + 5).abs().sqrt().mean()
    loss = good + (model["bad"](X) * 0).sqrt().mean()
    assert watched.at_backward(loss) is None
    loss.backward()
    found = watched.at_step(torch.optim.SGD(model["bad"].parameters(), lr=0.1))
    assert found is not None
    assert found.op == "SqrtBackward0"
    assert "comes after bad" in found.detail
    assert set(found.parameters) == {"bad.weight", "bad.bias"}


def test_healthy_steps_are_silent_and_unchanged() -> None:
    model = net()
    watched = watch(model)
    adam = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(5):
        adam.zero_grad()
        loss = F.cross_entropy(model(X), Y)
        versions = [p._version for p in model.parameters()]
        assert watched.at_backward(loss) is None
        loss.backward()
        assert watched.at_step(adam) is None
        assert versions == [p._version for p in model.parameters()]
        adam.step()


def test_an_overflow_of_a_scaler_is_none() -> None:
    model = net()
    watched = watch(model)
    loss = model(X).pow(2).mean() * math.inf
    assert watched.at_backward(loss, scaled=True) is None
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    model(X).sum().backward()
    for p in model.parameters():
        assert p.grad is not None
        p.grad.fill_(math.inf)
    sgd.found_inf = torch.ones(())  # type: ignore[attr-defined]  # as a scaler gives it to a fused step
    assert watched.at_step(sgd) is None
    del sgd.found_inf  # type: ignore[attr-defined]
    assert watched.at_step(sgd) is not None


def test_what_is_saved_is_not_unpacked() -> None:
    model = net()

    def refuse(_: object) -> torch.Tensor:
        raise AssertionError("unpacked")

    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, refuse):
        loss = (model(X) * 0).log().mean()
    assert of(model, loss).where == "forward"


def test_odd_losses() -> None:
    model = net()
    watched = watch(model)
    assert watched.at_backward(model(X)) is None
    assert watched.at_backward(torch.tensor(math.nan, device="meta")) is None
    found = watched.at_backward(torch.tensor(math.nan))
    assert found is not None
    assert found.detail == "the loss has no graph"


def test_a_row_that_is_masked_altogether_is_found_though_its_target_does_not_count() -> None:
    model = net()
    watched = watch(model)
    hidden = torch.zeros(6, 6, dtype=torch.bool)
    hidden[2] = True
    y = model(X)
    mixed = (y @ y.T).masked_fill(hidden, -math.inf).softmax(-1) @ y
    loss = F.cross_entropy(mixed, Y.masked_fill(hidden[:, 0], -100))
    assert watched.at_backward(loss) is None
    loss.backward()
    found = watched.at_step(torch.optim.SGD(model.parameters(), lr=0.1))
    assert found is not None
    assert (found.where, found.op, found.value) == ("forward", "SoftmaxBackward0", "nan")
