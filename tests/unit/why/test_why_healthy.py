"""Trainings that are as they should be: what is reached is told, and what is cut on purpose is told as a fact."""

import copy
from collections.abc import Iterator
from itertools import pairwise
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import anybatch
from anybatch import Mean

X = torch.linspace(-1.0, 1.0, 24).reshape(8, 3)


def mlp(*sizes: int) -> nn.Sequential:
    pairs = pairwise(sizes)
    return nn.Sequential(*[layer for a, b in pairs for layer in (nn.Linear(a, b), nn.Tanh())])


def test_a_plain_model_is_reached_whole() -> None:
    net: Any = mlp(3, 4, 2)
    paths = anybatch.why(lambda: net(X).sum(), net)
    assert not paths.stopped
    assert set(paths.reached) == set(dict(net.named_parameters()))
    assert not paths.outside
    assert not paths.terms
    assert not paths.notes


def test_gan_steps() -> None:
    nets: Any = nn.ModuleDict({"generator": mlp(3, 4, 3), "critic": mlp(3, 4, 1)})
    paths = anybatch.why(lambda: F.softplus(nets["critic"](nets["generator"](X).detach())).mean(), nets)
    assert {name.split(".")[0] for name in paths.reached} == {"critic"}
    assert {stop.op for stop in paths.stopped.values()} == {"detach"}
    assert not anybatch.why(lambda: -nets["critic"](nets["generator"](X)).mean(), nets).stopped


def test_straight_through() -> None:
    nets: Any = nn.ModuleDict({"encoder": mlp(3, 4), "decoder": mlp(4, 3)})
    codes = torch.linspace(-1, 1, 20).reshape(5, 4)

    def loss() -> Any:
        h = nets["encoder"](X)
        quantised = codes[torch.cdist(h, codes).argmin(-1)]
        quantised = h + (quantised - h).detach()
        return (nets["decoder"](quantised) - X).square().mean() + (h - quantised.detach()).square().mean()

    paths = anybatch.why(loss, nets)
    assert not paths.stopped
    assert len(paths.terms) == 2
    assert not paths.constants


def test_a_teacher_that_is_cut_on_purpose() -> None:
    student = mlp(3, 4)
    teacher = copy.deepcopy(student)

    def loss() -> Any:
        with torch.no_grad():
            target = teacher(X)
        return (student(X) - target).square().mean()

    paths = anybatch.why(loss, {"student": student, "teacher": teacher})
    assert paths.reached == ("student.0.weight", "student.0.bias")
    stop = paths.stopped["teacher.0.weight"]
    assert (stop.op, stop.module) == ("no_grad", "teacher.0")


def test_lora() -> None:
    class Adapted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base = nn.Linear(3, 3).requires_grad_(False)
            self.a, self.b = nn.Parameter(torch.ones(3, 1)), nn.Parameter(torch.zeros(1, 3))

        def forward(self, x: torch.Tensor) -> Any:
            return cast(torch.Tensor, self.base(x)) + x @ self.a @ self.b

    net: Any = nn.Sequential(Adapted(), nn.Tanh(), Adapted())
    paths = anybatch.why(lambda: net(X).sum(), net)
    assert paths.reached == ("0.a", "0.b", "2.a", "2.b")  # though the gradient of a is zero at first
    assert {stop.op for stop in paths.stopped.values()} == {"requires_grad"}


def test_stochastic_depth_names_the_block_that_is_left_out() -> None:
    blocks = nn.ModuleList(mlp(3, 3) for _ in range(3))

    def loss() -> Any:
        h = X
        for index, block in enumerate(blocks):
            h = h + block(h) if index != 1 else h
        return h.sum()

    paths = anybatch.why(loss, blocks)
    assert {(name, stop.op, stop.module) for name, stop in paths.stopped.items()} == {
        ("1.0.weight", "unused", "1"),
        ("1.0.bias", "unused", "1"),
    }


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints(reentrant: bool) -> None:
    net: Any = mlp(3, 4, 4, 2)

    def loss() -> Any:
        h = net[1](net[0](X))
        return cast(torch.Tensor, checkpoint(net[2:], F.dropout(h, 0.5), use_reentrant=reentrant)).sum()

    assert not anybatch.why(loss, net).stopped


def test_a_reentrant_checkpoint_that_is_first_read_without_gradients() -> None:
    net: Any = mlp(3, 4, 4)

    def loss() -> Any:
        h = checkpoint(net[2:], net[1](net[0](X)), use_reentrant=True)
        with torch.no_grad():
            h.norm()
        return h.sum()

    assert not anybatch.why(loss, net).stopped


def test_tied_parameters_have_both_names() -> None:
    net: Any = nn.Sequential(nn.Embedding(7, 3), nn.Linear(3, 7, bias=False))
    net[1].weight = net[0].weight
    ids = torch.tensor([1, 2, 3])
    assert anybatch.why(lambda: net(ids).sum(), net).reached == ("0.weight", "1.weight")
    stopped = anybatch.why(lambda: net(ids).detach().sum() * X.sum(), net).stopped
    assert {name: stop.op for name, stop in stopped.items()} == {"0.weight": "detach", "1.weight": "detach"}


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> Any:
        ctx.save_for_backward(weight)
        return x * weight

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        (weight,) = ctx.saved_tensors
        return gradient * weight, gradient


def test_a_function_of_the_users_own() -> None:
    net: Any = mlp(3, 3)
    net.scale = nn.Parameter(torch.ones(8, 3))
    paths = anybatch.why(lambda: cast(Any, Doubled).apply(net(X), net.scale).sum(), net)
    assert not paths.stopped


def test_writing_in_place_and_parts_of_tensors() -> None:
    net: Any = mlp(3, 4)

    def loss() -> Any:
        result = torch.zeros(8, 6)
        result[:, 1:5] = net(X)
        result.mul_(2).relu_()
        return result.flatten()[::2].sum()

    assert not anybatch.why(loss, net).stopped


def test_recurrent_attention_and_normalisation() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(4)
            self.rnn = nn.LSTM(4, 4, batch_first=True)
            self.block = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)

        def forward(self, x: torch.Tensor) -> Any:
            h, _ = self.rnn(self.norm(x.flatten(0, 1)).view_as(x))
            return cast(torch.Tensor, self.block(h))

    net: Any = Mixed()
    x = torch.linspace(0, 1, 40).reshape(2, 5, 4)
    assert not anybatch.why(lambda: net(x).sum(), net).stopped


def test_the_shape_of_a_tensor_is_not_its_value() -> None:
    nets: Any = nn.ModuleDict({"used": mlp(3, 4), "shape": mlp(3, 4)})

    def loss() -> Any:
        like = nets["shape"](X)
        first, _ = torch.broadcast_tensors(nets["used"](X).view_as(like), like)
        return (first + torch.zeros_like(like) + like.new_ones(()) * like.size(0)).sum()

    stops = anybatch.why(loss, nets).stopped
    assert set(stops) == {"shape.0.weight", "shape.0.bias"}
    assert {stop.op for stop in stops.values()} == {"left out"}


def test_a_number_for_the_log_is_no_path() -> None:
    net: Any = nn.ModuleDict({"used": mlp(3, 4), "idle": mlp(3, 4)})
    log: list[float] = []

    def loss() -> Any:
        value: torch.Tensor = net["used"](X).square().mean()
        log.append(value.item())
        return value

    stopped = anybatch.why(loss, net).stopped
    assert {stop.op for stop in stopped.values()} == {"unused"}


def test_losses_of_every_kind() -> None:
    net: Any = nn.ModuleDict({"a": mlp(3, 4), "b": mlp(3, 4)})

    def one_by_one() -> Iterator[Any]:
        for name, part in net.items():
            yield name, part(X).mean()

    def loss(name: str) -> Any:
        return net[name](X).sum()

    for whole in (
        lambda: {"a": loss("a"), "b": Mean(loss("b"), 8)},
        lambda: ({"a": loss("a"), "b": loss("b")}, {"accuracy": Mean(3, 8)}),
        one_by_one,
    ):
        paths = anybatch.why(whole, net)
        assert not paths.stopped
        assert [term.op for term in paths.terms] == ["a", "b"]
        assert [term.parameters for term in paths.terms] == [2, 2]


def test_a_function_that_goes_backward_itself() -> None:
    net: Any = mlp(3, 4)

    def step() -> Any:
        net.zero_grad()
        loss = cast(torch.Tensor, checkpoint(net, X, use_reentrant=False)).square().mean()
        loss.backward()
        return loss

    assert not anybatch.why(step, net).stopped
    assert all(parameter.grad is None for parameter in net.parameters())


def test_autocast_and_double_backward() -> None:
    net: Any = mlp(3, 4, 1)

    def penalty() -> Any:
        x = X.clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            y = net(x).float()
        (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return (slope.norm(dim=1) - 1).square().mean()

    paths = anybatch.why(penalty, net)
    assert "2.weight" in paths.reached
    assert paths.outside == ("float32[8, 3]",)


def test_layers_in_a_plain_list_are_outside_of_the_model() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = [nn.Linear(3, 4, bias=False)]
            self.head = nn.Linear(4, 1)

        def forward(self, x: torch.Tensor) -> Any:
            return cast(torch.Tensor, self.head(self.layers[0](x)))

    net: Any = Net()
    paths = anybatch.why(lambda: net(X).sum(), net)
    assert paths.reached == ("head.weight", "head.bias")
    assert paths.outside == ("float32[4, 3]",)
