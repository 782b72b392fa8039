"""The operation that made a number that is not finite is named, with its line, and told from what only handed it on."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import versions
from anybatch import Doctor
from anybatch.doctor.recording.numbering import Numbering
from anybatch.doctor.samples.nonfinite import NonFiniteWatch
from anybatch.records.samples import NonFinite

pytestmark = [versions.saved_tensors, pytest.mark.filterwarnings("ignore:.*degrees of freedom:UserWarning")]
X = torch.linspace(-1, 1, 24).reshape(6, 4)
LOST = X.clone()
LOST[2, 1] = math.nan
HIDDEN = torch.zeros(6, 3, dtype=torch.bool)
HIDDEN[1] = True
LossOf = Callable[[torch.Tensor], torch.Tensor]


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        return grads[0] * math.nan


class Spoilt(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * math.nan

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        return grads[0]


def net(outputs: int = 3) -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, outputs))


def watch(model: nn.Module) -> NonFiniteWatch:
    numbering = Numbering(lambda fact: None)
    numbering.root(model)
    return NonFiniteWatch(numbering)


def of(model: nn.Module, loss: torch.Tensor) -> NonFinite:
    found = watch(model).at_backward(loss)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("loss_of", "op", "detail"),
    [
        (lambda y: (z := (y * 0) / (y * 0).norm(), (z @ z.t()).mean())[-1], "DivBackward0", "its divisor has"),
        (lambda y: (y[:1].var(0) + 1e-6).log().mean(), "VarBackward0", "the spread of 1 value"),
        (lambda y: ((y[:1] - y.mean(0)) / y[:1].std(0)).pow(2).mean(), "StdBackward0", "the spread of 1 value"),
        (lambda y: y[:0].pow(2).mean() + y.mean(), "MeanBackward0", "mean of nothing"),
        (lambda y: ((y * 0).log() * 0 + y).pow(2).mean(), "LogBackward0", "its input has 18 zeros"),
        (lambda y: (z := y.square() * 1e30, (z.square() - z.square().max()).exp().mean())[-1], "PowBackward0", "over"),
        (lambda y: (-y.abs() - 1).sqrt().sum(), "SqrtBackward0", "its input has 18 negative numbers"),
        (lambda y: ((y * 0).rsqrt() * y).pow(2).sum(), "RsqrtBackward0", "its input has 18 zeros"),
        (lambda y: y.masked_fill(HIDDEN, -math.inf).softmax(-1).pow(2).sum(), "SoftmaxBackward0", "1 of its 6 rows"),
        (lambda y: y.masked_fill(HIDDEN, -math.inf).log_softmax(-1)[:, 0].sum(), "LogSoftmaxBackward0", "1 of its 6"),
        (lambda y: F.layer_norm(y * 0, (3,), eps=0.0).pow(2).mean(), "NativeLayerNormBackward0", "no spread"),
        (lambda y: Spoilt.apply(y).pow(2).mean(), "SpoiltBackward", ""),  # type: ignore[no-untyped-call]
    ],
)
def test_what_made_it_is_told_from_what_handed_it_on(loss_of: LossOf, op: str, detail: str) -> None:
    model = net()
    found = of(model, loss_of(model(X)))
    assert (found.where, found.op) == ("forward", op), found
    assert detail in found.detail


@pytest.mark.parametrize(
    ("loss_of", "op", "detail"),
    [
        (lambda y: F.mse_loss(y, LOST), "MseLossBackward0", "shape [6, 4]"),
        (lambda y: F.smooth_l1_loss(y, LOST), "SmoothL1LossBackward0", "in 1 of its 6 rows"),
        (lambda y: F.binary_cross_entropy_with_logits(y, LOST), "BinaryCrossEntropyWithLogitsBackward0", "1 of its 6"),
        (lambda y: ((y - LOST) ** 2).mean(), "SubBackward0", "without a gradient"),
        (lambda y: (y.exp() - LOST.abs()).abs().mean(), "SubBackward0", "without a gradient"),
        (lambda y: F.l1_loss(y, LOST), "SubBackward0", "without a gradient"),
        (lambda y: (y * (LOST * 0)).pow(2).sum(), "MulBackward0", "shape [6, 4]"),
        (lambda y: F.kl_div(y.log_softmax(-1), LOST, reduction="sum"), "MulBackward0", "shape [6, 4]"),
    ],
)
def test_targets_and_weights_that_had_it_are_data(loss_of: LossOf, op: str, detail: str) -> None:
    model = net(4)
    found = of(model, loss_of(model(X)))
    assert (found.where, found.op, found.of_data) == ("input", op, True), found
    assert detail in found.detail


def test_a_square_input_is_told_from_the_weights() -> None:
    model = nn.Linear(4, 4)
    assert of(model, model(LOST[:4]).pow(2).mean()).where == "input"


def test_what_cannot_be_followed_is_no_data() -> None:
    model = net(4)
    y = model(X)
    assert of(model, ((y * 0).lgamma() + torch.ones(6, 4)).pow(2).mean()).where == "forward"


def test_a_divisor_that_is_none_of_the_weights_is_data() -> None:
    model, none = net(), torch.zeros(6, 1)
    assert of(model, (model(X) * none).sum() / none.sum()).of_data
    y = model(X)
    assert not of(model, (y / (y * 0)).mean()).of_data


def at_step(loss_of: LossOf) -> NonFinite:
    model = net()
    watched, sgd = watch(model), torch.optim.SGD(model.parameters(), lr=0.1)
    loss = loss_of(model(X))
    assert watched.at_backward(loss) is None
    loss.backward()
    found = watched.at_step(sgd)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("loss_of", "op", "detail"),
    [
        (lambda y: ((y * 0).pow(2).sum(-1).sqrt() + 1).log().mean(), "SqrtBackward0", "square root"),
        (lambda y: torch.where(y > 1e9, (y * 0).sqrt(), y).abs().add(1).sqrt().sum(), "SqrtBackward0", "square root"),
        (lambda y: torch.where(y.abs() < 1e9, y, (y.abs() * 1e9).exp()).sum(), "ExpBackward0", "too large"),
        (lambda y: (Doubled.apply(y) + 1).abs().mean(), "DoubledBackward", "written by hand"),  # type: ignore[no-untyped-call]
        (lambda y: (Doubled.apply(y).abs() + 1).sqrt().mean(), "SqrtBackward0", "or it is made by Doubled"),  # type: ignore[no-untyped-call]
    ],
)
def test_slopes_that_are_infinite(loss_of: LossOf, op: str, detail: str) -> None:
    found = at_step(loss_of)
    assert (found.where, found.op) == ("gradient", op), found
    assert detail in found.detail


def lines_named(loss_of: LossOf) -> list[str]:
    """The lines that made what is not finite, in a run with a doctor."""
    model = net()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    with Doctor(model, sgd) as doctor:
        loss_of(model(X)).backward()
        sgd.step()
    (found,) = doctor.run.of(NonFinite)
    assert found.made_in == (__file__ if found.made_at else "")
    return [Path(__file__).read_text(encoding="utf-8").splitlines()[line - 1].strip() for line in found.made_at]


def test_the_line_of_the_operation_is_named() -> None:
    def loss_of(y: torch.Tensor) -> torch.Tensor:
        kept = y.exp() * 0
        return kept.log10().mean()

    assert lines_named(loss_of) == ["return kept.log10().mean()"]


def test_lines_are_named_where_they_are_few() -> None:
    def twice(y: torch.Tensor) -> torch.Tensor:
        other = y.exp().log().mean()
        return other + (y.exp() * 0).log().mean()

    def often(y: torch.Tensor) -> torch.Tensor:
        y = y.exp().log()
        y = y.exp().log()
        y = y.exp().log()
        return y + (y.exp() * 0).log()

    assert lines_named(twice) == ["other = y.exp().log().mean()", "return other + (y.exp() * 0).log().mean()"]
    assert lines_named(lambda y: often(y).mean()) == []
