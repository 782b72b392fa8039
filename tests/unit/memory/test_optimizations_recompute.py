"""Recomputed blocks give the same in every bit, hold less, and say so where they can't be recomputed."""

import copy
import gc
import random
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from anybatch.errors import AnyBatchError
from anybatch.loss.cutting import backward_to_leaves
from anybatch.memory.checkpointing import NotRecomputable, recompute
from anybatch.memory.offloading import offload
from optimizations_models import (
    Images,
    Language,
    LiveBytes,
    assert_same,
    image_loss,
    images,
    language_loss,
    outcome,
    peak,
    texts,
)
from optimizations_modules import Lucky, Stateful

LAYERS = ["layers.0", "layers.1", "layers.2"]


def put(*names: str) -> Callable[[nn.Module], Any]:
    return lambda model: recompute(model, names)


@pytest.mark.parametrize(
    "names",
    [LAYERS, LAYERS[1:2], ["layers.0.mixing", "layers.1.out.0:2", "norm"], ["", "layers.1", "layers.1.drop"], ["head"]],
    ids=str,
)
@pytest.mark.parametrize("twice", [False, True])
def test_a_transformer_is_bitwise_the_same(names: list[str], twice: bool) -> None:
    model, batch = Language(), texts()
    assert_same(
        outcome(model, language_loss, batch, put(*names), twice=twice),
        outcome(model, language_loss, batch, twice=twice),
    )


def test_autocast_is_replayed() -> None:
    model, batch = Language(), texts()

    def loss_fn(model: Any, batch: Any) -> Tensor:
        with torch.autocast(torch.get_default_device().type, dtype=torch.bfloat16):
            return language_loss(model, batch)

    assert_same(outcome(model, loss_fn, batch, put(*LAYERS)), outcome(model, loss_fn, batch))


class Pair(NamedTuple):
    one: Tensor
    other: Any


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(3, 3)
        self.seen: list[int] = []

    def forward(self, pair: Pair, *, more: dict[str, Any], flag: bool = False) -> Any:
        more["list"].append(1)
        same = pair.one is more["again"]
        x = self.line(pair.one) * (2.0 if same else 1.0) + more["deep"][0]["x"] + pair.other
        return Pair(x.sin(), {"mask": x > 0, "extra": [x.cos(), "text", None, flag]})


@pytest.mark.parametrize("offloaded", [[], ["block"]])
def test_nested_arguments_and_results(offloaded: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("anybatch.memory.offloading.SMALLEST", 1)

    def run(names: list[str]) -> dict[str, Any]:
        torch.manual_seed(0)
        model = nn.ModuleDict({"block": Nested()})
        inputs = [torch.rand(2, 3, requires_grad=True) for _ in range(2)]
        x = inputs[0] * 2
        more = {"list": [], "again": x, "deep": ({"x": inputs[1] * 3},)}
        with recompute(model, names), offload(model, offloaded):
            out = model["block"](Pair(x, 4), more=more, flag=True)
            (out.one.sum() + (out.other["extra"][0] * out.other["mask"]).sum()).backward()
        assert more["list"] == [1]
        return {f"gradient {i}": t.grad for i, t in enumerate([*inputs, *model.parameters()])}

    assert_same(run(["block"]), run([]))


def test_an_input_without_gradient_and_integers() -> None:
    model, batch = Language(), texts()

    def loss_fn(model: Any, batch: Any) -> Tensor:
        loss: Tensor = model.norm(model.tokens(batch["x"])).square().mean()
        return loss

    assert_same(outcome(model, loss_fn, batch, put("tokens", "norm")), outcome(model, loss_fn, batch))


@pytest.mark.parametrize("mode", ["no_grad", "inference", "eval"])
def test_without_gradient_there_is_nothing_to_do(mode: str) -> None:
    model = nn.Sequential(Lucky("nothing"))
    x = torch.rand(2, 4)
    with recompute(model, ["0"]):
        if mode == "eval":
            model.eval()
            model(x).sum().backward()
            assert model[0].calls == 2
            return
        with torch.no_grad() if mode == "no_grad" else torch.inference_mode():
            model(x)
    assert model[0].calls == 1


def test_the_forward_runs_twice_and_not_more_where_blocks_are_nested() -> None:
    inner = Lucky("nothing")
    model = nn.Sequential(nn.Sequential(inner, nn.Tanh()), nn.Linear(4, 1))
    with recompute(model, ["0"]):
        model(torch.rand(2, 4)).sum().backward()
    assert inner.calls == 2
    inner.calls = 0
    with recompute(model, ["", "0", "0.0"]):
        model(torch.rand(2, 4)).sum().backward()
    assert inner.calls <= 4


def test_a_recomputation_stops_when_it_has_what_is_needed() -> None:
    calls = []

    class Last(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            calls.append(1)
            return x + 1

    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), Last())
    with recompute(model, ["0:3"]):
        model(torch.rand(2, 4)).sum().backward()
    assert len(calls) == 1


def test_recomputed_tensors_go_as_soon_as_they_were_used() -> None:
    model = nn.Sequential(*(layer for _ in range(3) for layer in (nn.Linear(8, 8), nn.Tanh())))
    x = torch.rand(100, 8)
    with recompute(model, ["0:6"]):
        loss = model(x).sum()
        loss.backward(retain_graph=True)
        there = [t for p in model.parameters() for t in (p, p.grad) if t is not None]
        with LiveBytes([*there, x]) as live:
            base = live.current
            loss.backward(retain_graph=True)
            assert live.peak - base >= 3 * x.nbytes
            assert live.current - base < x.nbytes


def test_lazy_modules_are_recomputed_from_the_second_forward_on() -> None:
    model = nn.Sequential(nn.LazyLinear(4), nn.LazyBatchNorm1d(), Lucky("dropout"))
    with recompute(model, ["0:3"]):
        for calls in (1, 3):
            model(torch.rand(3, 5)).sum().backward()
            assert model[2].calls == calls
    assert int(model.get_buffer("1.num_batches_tracked")) == 2


def test_two_backwards_and_second_derivatives() -> None:
    def run(names: list[str]) -> list[Any]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Dropout(0.2), nn.Linear(3, 1)).double()
        x = torch.rand(4, 3, dtype=torch.float64, requires_grad=True)
        with recompute(model, names):
            loss = model(x).square().sum()
            (first,) = torch.autograd.grad(loss, x, create_graph=True)
            first.square().sum().backward(retain_graph=True)
            loss.backward()
        return [x.grad, *(p.grad for p in model.parameters())]

    for one, other in zip(run(["0:3"]), run([]), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


def test_a_part_of_the_graph_only() -> None:
    model, batch = Language(), texts()
    found = []
    for names in ([], LAYERS):
        ours = copy.deepcopy(model)
        torch.manual_seed(4)
        with recompute(ours, names):
            loss = language_loss(ours, batch)
            wanted = [ours.positions, ours.get_parameter("layers.2.norm.weight")]
            first = torch.autograd.grad(loss, wanted, retain_graph=True)
            loss.backward()
        grads = {f"gradient {n}": p.grad for n, p in ours.named_parameters()}
        found.append({"first": first[0], "second": first[1], **grads})
    assert_same(found[1], found[0])


class Forgetful(nn.Module):
    """Computes something else when it is called again."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.calls = how, 0
        self.line = nn.Linear(4, 4)
        self.cache: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.how == "cache":
            self.cache.append(self.line(x))
            x = torch.cat(self.cache)
        if self.how == "dtype" and self.calls % 2 == 0:
            wide: Tensor = self.line(x).double().sin().float()
            return wide
        if self.how == "fewer" and self.calls % 2 == 0:
            return x
        if self.how == "in place":
            x.mul_(2)
        y: Tensor = self.line(x).sin()
        return y


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ("cache", r"the block 'b' does not compute the same .*Size\(\[2, 4\]\)"),
        ("dtype", "the block 'b' does not compute the same .* torch.float64"),
        ("fewer", "the block 'b' does not compute the same .* it saved fewer tensors than the first time"),
        ("in place", "an argument of the block 'b' was changed in place"),
    ],
)
def test_what_can_not_be_recomputed_names_the_block(how: str, text: str) -> None:
    model = nn.ModuleDict({"a": nn.Linear(4, 4), "b": Forgetful(how)})
    with recompute(model, ["a", "b"]):
        loss = model["b"](model["a"](torch.rand(1, 4))).sum()
        with pytest.raises(NotRecomputable, match=text) as caught:
            backward_to_leaves([loss], [torch.ones(())])
        assert caught.value.block == "b"
        assert isinstance(caught.value, AnyBatchError)


def test_an_argument_that_is_changed_later_is_refused() -> None:
    model = nn.ModuleDict({"a": nn.Linear(4, 4)})
    x = torch.rand(2, 4)
    with recompute(model, ["a"]):
        loss = model["a"](x).sum()
        x.add_(1)
        with pytest.raises(AnyBatchError, match="an argument of the block 'a' was changed in place"):
            loss.backward()


@pytest.mark.parametrize("when", ["forward", "recomputation"])
def test_an_exception_in_the_block_leaves_everything_in_order(when: str) -> None:
    class Failing(Lucky):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            if self.calls == (1 if when == "forward" else 2):
                raise KeyError("mine")
            return y

    model, x = nn.Sequential(Stateful("in place"), Failing("all"), nn.BatchNorm1d(4)), torch.rand(3, 4)
    before = random.getstate(), np.random.get_state()[1].tolist()  # type: ignore[index]
    with recompute(model, ["0:3"]):
        with pytest.raises(KeyError, match="mine"):
            model(x).sum().backward()
        if when == "recomputation":  # the forward drew, the failed recomputation left no trace
            state = {name: value.clone() for name, value in model.named_buffers()}
            assert float(state["0.level"][0]) == 0.5
            assert int(state["2.num_batches_tracked"]) == 1
        del before
        assert model[0].level is model.get_buffer("0.level")
        model(x).sum().backward()
    assert "forward" not in model.__dict__


def test_nothing_is_held_by_cycles() -> None:
    model = nn.Sequential(Lucky("dropout"), nn.Sequential(nn.ReLU(), nn.Linear(4, 4), nn.Sigmoid()), nn.Tanh())
    kept: list[weakref.ref[Tensor]] = []

    def note(tensor: Any) -> None:
        kept.append(weakref.ref(tensor))

    for module in model.modules():
        module.register_forward_hook(lambda *args: note(args[2]))
    gc.collect()
    gc.disable()
    try:
        with recompute(model, ["", "0", "1"]):
            x = torch.rand(2, 4, requires_grad=True) * 2
            note(x)
            loss = model(x).sum()
            loss.backward()
            del x, loss
        assert [ref() for ref in kept] == [None] * len(kept)
    finally:
        gc.enable()


def test_the_peak_is_lower() -> None:
    model, batch = Language(layers=6, width=16), texts(8)
    names = [f"layers.{i}" for i in range(6)]
    whole, less = peak(model, language_loss, batch), peak(model, language_loss, batch, put(*names))
    assert less < 0.5 * whole
    convolutions, pictures = Images(), images(8)
    assert peak(convolutions, image_loss, pictures, put("stem", "body", "tail")) < 0.8 * peak(
        convolutions, image_loss, pictures
    )
