"""Backwards of own functions that are not the slope are told, and those that are meant to be something else are not."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from anybatch.doctor.recorder import Doctor
from test_doctor_ask import asked, nothing_was_compiled, steps

__all__ = ["nothing_was_compiled"]

Backward = Callable[..., Any]


def made(forward: Backward, backward: Backward) -> Any:
    """A function whose forward keeps all that it is given."""

    def whole(ctx: Any, *given: torch.Tensor) -> Any:
        ctx.save_for_backward(*given)
        return forward(*given)

    def back(ctx: Any, *grads: torch.Tensor) -> Any:
        return backward(*grads, *ctx.saved_tensors)

    parts = {"forward": staticmethod(whole), "backward": staticmethod(back)}
    return type("Own", (torch.autograd.Function,), parts)


def linear(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return x @ w.t()


def squared(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (x - y).square().mean()


def fake(x: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
    return (x / s).round().clamp(-8, 7) * s


def signed(x: torch.Tensor) -> torch.Tensor:
    return torch.where(x >= 0, 1.0, -1.0)


def lost(x: torch.Tensor) -> torch.Tensor:
    return x * x.sigmoid()


class Net(nn.Module):
    """Has a function of one or two tensors behind its first layer."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)
        self.weight, self.scale = nn.Parameter(torch.randn(8, 8) / 3), nn.Parameter(torch.tensor([0.1]))
        self.register_buffer("feedback", torch.randn(8, 8))

    def forward(self, x: torch.Tensor) -> Any:
        given = {"w": self.weight, "s": self.scale, "b": self.feedback}
        more = [given[name] for name in getattr(self.function, "more", "")]
        return self.last(self.function.apply(self.first(x), *more))


def with_more(more: str, forward: Backward, backward: Backward) -> Any:
    function = made(forward, backward)
    function.more = more
    return function


FAULTY = {
    "turned": with_more("w", linear, lambda g, x, w: (g @ w, x.t() @ g)),
    "factor": with_more("w", linear, lambda g, x, w: (g @ w, g.t() @ x / len(x))),
    "aside": made(lost, lambda g, x: g * (x.sigmoid() - x * x.sigmoid() * (1 - x.sigmoid()))),
    "zero": with_more("w", linear, lambda g, x, w: (g @ w, torch.zeros_like(w))),
}
MEANT = {
    "the slope": with_more("w", linear, lambda g, x, w: (g @ w, g.t() @ x)),
    "reversed": made(lambda x: x.view_as(x), lambda g, x: -g),
    "rounded": made(lambda x: (x * 8).round() / 8, lambda g, x: g),
    "cut off": made(lambda x: x.clamp(-1, 1), lambda g, x: g),
    "guided": made(lambda x: x.clamp(min=0), lambda g, x: g.clamp(min=0) * (x > 0)),
    "near its jump": made(signed, lambda g, x: g * (x.abs() < 0.5)),
    "far to both sides": made(signed, lambda g, x: g * (x.abs() < 5)),
    "one side": made(lambda x: (x > 0).to(x.dtype), lambda g, x: g * (x > 0)),
    "ternary": made(lambda x: x.sign() * (x.abs() > 0.3), lambda g, x: g * (x.abs() < 1)),
    "what is left": made(lambda x: x * (x.abs() > 0.3), lambda g, x: g * (x.abs() > 0.3)),
    "levels within": made(lambda x: (x.clamp(-0.4, 0.4) * 5).round() / 5, lambda g, x: g * (x.abs() <= 0.4)),
    "sizes of rows": made(lambda x: x.sign() * x.abs().mean(1, keepdim=True), lambda g, x: g * (x.abs() <= 1)),
    "the largest": made(lambda x: (x >= x.topk(3, 1).values[:, -1:]).to(x.dtype), lambda g, x: g * (x > 0)),
    "a mask": made(lambda x: (x > 0).to(x.dtype), lambda g, x: torch.zeros_like(x)),
    "a spike": made(lambda x: (x > 0).to(x.dtype), lambda g, x: g / (1 + x.abs())),
    "a learned scale": with_more("s", fake, lambda g, x, s: (g, (g * ((x / s).round() - x / s)).sum().reshape(1))),
    "feedback": with_more("wb", lambda x, w, b: x @ w.t(), lambda g, x, w, b: (g @ b, g.t() @ x, None)),
    "clipped": made(torch.tanh, lambda g, x: (g * (1 - x.tanh() ** 2)).clamp(-1e-5, 1e-5)),
    "nearly": made(F.gelu, lambda g, x: g * (1.702 * x).sigmoid() * (1 + 1.702 * x * (1 - (1.702 * x).sigmoid()))),
}


def kind_of(function: Any, loss: Callable[..., torch.Tensor] = F.cross_entropy) -> str:
    (found,) = asked(lambda: steps(Net(function), loss), "function gradient")
    return str(found.evidence["kind"]) if found.answer == "yes" else found.answer


@pytest.mark.parametrize("kind", FAULTY)
def test_a_gradient_that_is_not_the_slope_is_told(kind: str) -> None:
    assert kind_of(FAULTY[kind]) == kind


@pytest.mark.parametrize("name", MEANT)
def test_a_gradient_that_is_meant_to_be_another_one_is_not(name: str) -> None:
    assert kind_of(MEANT[name]) == "no"


def test_a_loss_with_the_wrong_sign_is_told() -> None:
    against = made(squared, lambda g, x, y: (g * 2 * (y - x) / x.numel(), None))
    right = made(squared, lambda g, x, y: (g * 2 * (x - y) / x.numel(), None))
    for function, kind in ((against, "factor"), (right, "no")):

        def train(function: Any = function) -> None:
            steps(nn.Linear(6, 1), lambda made, y: function.apply(made[:, 0], y.float()))

        (found,) = asked(train, "function gradient")
        assert found.evidence.get("kind", found.answer) == kind


def test_a_function_stays_what_it_is() -> None:
    function = MEANT["the slope"]
    before = function.forward, function.forward.__code__
    with Doctor():
        steps(Net(function), F.cross_entropy)
    assert (function.forward, function.forward.__code__) == before


class Reversal(nn.Module):
    """Two heads on one layer, one behind a function that is called a reversal or something else."""

    def __init__(self, name: str, factor: float) -> None:
        super().__init__()
        self.function: Any = type(name, (made(lambda x: x.view_as(x), lambda grad, x: factor * grad),), {})
        self.first, self.last, self.domain = nn.Linear(6, 8), nn.Linear(8, 3), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> Any:
        h = self.first(x).relu()
        return self.last(h) + self.domain(self.function.apply(h))


@pytest.mark.parametrize(
    ("name", "factor", "kind"),
    [
        ("GradReverse", 0.3, "not reversed"), ("GRL", 1.0, "not reversed"), ("ReverseLayerF", 2.0, "not reversed"),
        ("GradReverse", -0.3, None), ("GRL", -1.0, None), ("ScaleGrad", 0.3, None), ("ReverseLayerF", 0.0, None),
    ],
)  # fmt: skip
def test_a_reversal_that_does_not_reverse_is_told(name: str, factor: float, kind: str | None) -> None:
    found = asked(lambda: steps(Reversal(name, factor), F.cross_entropy), "function gradient")
    assert [one.evidence.get("kind") for one in found] == [kind]


@pytest.mark.parametrize(("calls", "kept"), [(1, True), (2, False)])
def test_labels_are_of_no_call_where_a_net_is_called_for_several_inputs(calls: int, kept: bool) -> None:
    net = nn.Linear(6, 3)
    optimizer = torch.optim.Adam(net.parameters())

    def train() -> None:
        for _ in range(4):
            first, *others = (net(torch.randn(12, 6)) for _ in range(calls))
            loss = F.cross_entropy(first, torch.randint(0, 3, (12,))) + sum(one.square().mean() for one in others)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    assert bool(asked(train, "labels")) == kept
