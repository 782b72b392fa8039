"""Optimizations are put on in any order, taken off in the reverse one, and leave no trace."""

import copy
import itertools
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from anybatch.errors import BatchError
from anybatch.memory.application import apply_optimizations
from anybatch.memory.checkpointing import recompute
from anybatch.memory.losschunks import chunk_loss
from anybatch.memory.offloading import offload
from anybatch.memory.places import Handle, Layered, places_of
from optimizations_models import Images, Language, assert_same, attributes, image_loss, images, outcome

OPTIMIZATIONS: dict[str, Callable[[nn.Module], Handle]] = {
    "recompute": lambda model: recompute(model, ["stem", "body.1:3", "tail"]),
    "again": lambda model: recompute(model, ["body", "stem.0:2"]),
    "offload": lambda model: offload(model, ["stem", "body.1:3", "body"]),
    "chunks": lambda model: chunk_loss(model, "last", 2),
}


@pytest.mark.parametrize("order", list(itertools.permutations(OPTIMIZATIONS))[::3])
def test_any_order(order: tuple[str, ...]) -> None:
    model, batch = Images(), images()
    before, plain = dict(attributes(model)), outcome(model, image_loss, batch)
    handles = [OPTIMIZATIONS[name](model) for name in order]
    torch.testing.assert_close(outcome(model, image_loss, batch), plain)
    for handle in reversed(handles):
        handle.remove()
        handle.remove()
        torch.testing.assert_close(outcome(model, image_loss, batch), plain)
    assert dict(attributes(model)) == before
    assert "forward" not in model.stem.__dict__


def test_what_lay_there_as_forward_comes_back() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    called = []

    def mine(x: torch.Tensor) -> torch.Tensor:
        called.append(len(x))
        return x * 2

    model[0].forward = mine
    with recompute(model, ["0"]), offload(model, ["0"]):
        assert model[0].forward is not mine
        assert torch.equal(model[0](torch.ones(3, 2)), torch.full((3, 2), 2.0))
    assert model[0].__dict__["forward"] is mine
    assert called == [3]


def test_a_forward_that_another_put_on_top_stays() -> None:
    layer = nn.Linear(2, 2)
    first = recompute(nn.ModuleList([layer]), ["0"])
    ours = layer.forward
    layer.forward = lambda x: ours(x) + 1  # type: ignore[assignment, method-assign]
    theirs = layer.forward
    second = offload(nn.ModuleList([layer]), ["0"])
    first.remove()
    assert torch.equal(layer(torch.zeros(1, 2)), layer.bias[None] + 1)
    second.remove()
    assert layer.__dict__["forward"] is theirs
    assert torch.equal(layer(torch.zeros(1, 2)), layer.bias[None] + 1)


def test_a_backward_after_the_optimization_is_off() -> None:
    model, batch = Images(), images()
    plain = outcome(model, image_loss, batch)
    for put in OPTIMIZATIONS.values():
        ours = copy.deepcopy(model)
        torch.manual_seed(11)
        with put(ours):
            loss = image_loss(ours, batch)
        loss.backward()
        torch.testing.assert_close({f"gradient {n}": p.grad for n, p in ours.named_parameters()}, _gradients(plain))


def _gradients(found: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in found.items() if name.startswith("gradient")}


def test_hooks_state_and_copies() -> None:
    model, batch = Images(), images()
    fired: list[str] = []
    for name in ("stem", "body", "last"):
        module = model.get_submodule(name)
        module.register_forward_hook(lambda *_, name=name: fired.append(name))
    with recompute(model, ["stem", "body"]), offload(model, ["stem"]):
        assert list(model.state_dict()) == list(Images().state_dict())
        image_loss(model, batch).backward()
    assert fired == ["stem", "body", "body", "last"]
    plain = Images()
    with apply_optimizations(plain, recompute=["stem"], offload=["body"], head="last", loss_chunks=2):
        image_loss(plain, batch).backward()
    again = pickle.loads(pickle.dumps(plain))
    assert_same(outcome(again, image_loss, batch), outcome(copy.deepcopy(plain), image_loss, batch))


def test_a_copy_made_while_an_optimization_is_on_is_a_model_of_its_own() -> None:
    model, batch = Images(), images()
    with recompute(model, ["stem", "body"]):
        other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(2)
    plain = Images()
    plain.load_state_dict(other.state_dict())
    torch.manual_seed(0)
    image_loss(other, batch).backward()
    torch.manual_seed(0)
    image_loss(plain, batch).backward()
    torch.testing.assert_close([p.grad for p in other.parameters()], [p.grad for p in plain.parameters()])


class Shared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(3, 3)
        self.other = self.one
        self.net = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3), nn.Linear(3, 9))
        self.blocks = nn.ModuleList([self.one])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.net(self.other(self.one(x)))
        return y


def test_a_shared_module_gets_the_optimization_once() -> None:
    model = Shared()
    assert [place.name for place in places_of(model, ["one", "other", "blocks.0", "net.0:2", "net.0:2"])] == [
        "one",
        "net.0:2",
    ]
    with recompute(model, ["one", "other"]):
        assert not isinstance(model.one.__dict__["forward"].__wrapped__, Layered)


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "unknown": ({"recompute": ["net.7"]}, "net has no module '7'"),
    "unknown root": ({"offload": ["nett"]}, "the model has no module 'nett'"),
    "a text": ({"recompute": "net.0"}, "expected a sequence of names"),
    "a number": ({"recompute": [3]}, "the name of a block is a int"),
    "a parameter": ({"recompute": ["one.weight"]}, "one has no module 'weight'"),
    "a list": ({"recompute": ["blocks"]}, "a ModuleList, which has no forward"),
    "a run of a list": ({"recompute": ["blocks.0:1"]}, "a run of children of a ModuleList"),
    "a run beyond the end": ({"offload": ["net.2:9"]}, "no run of the 4 children"),
    "an empty run": ({"offload": ["net.2:2"]}, "no run of the 4 children"),
    "runs that overlap": ({"recompute": ["net.0:2", "net.1:3"]}, "overlaps with the run"),
    "runs of two memory optimizations": ({"recompute": ["net.0:2"], "offload": ["net.1:3"]}, "overlaps with the run"),
    "a head that is none": ({"head": "net", "loss_chunks": 2}, "the head 'net' is a Sequential"),
    "a run as head": ({"head": "net.2:3", "loss_chunks": 2}, "the head 'net.2:3'"),
    "no head": ({"loss_chunks": 2}, "no head is named"),
    "no chunks": ({"head": "net.3", "loss_chunks": 0}, "loss_chunks is 0"),
    "half chunks": ({"head": "net.3", "loss_chunks": 1.5}, r"loss_chunks is 1\.5"),
    "a good one first": (
        {"recompute": ["net.0"], "offload": ["one", "what"], "head": "net.3", "loss_chunks": 2},
        "what",
    ),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_what_is_refused_changes_nothing(wrong: str) -> None:
    options, text = WRONG[wrong]
    model = Shared()
    before = dict(attributes(model))
    with pytest.raises(BatchError, match=text):
        apply_optimizations(model, **options)
    assert dict(attributes(model)) == before


def test_a_head_with_a_forward_of_its_own_is_refused() -> None:
    class Scaled(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return super().forward(input) * 2

    model = Shared()
    model.net[3] = Scaled(3, 9)
    with pytest.raises(BatchError, match=r"the head 'net\.3' is a Scaled"):
        chunk_loss(model, "net.3", 2)
    model.net[3] = nn.Linear(3, 9)
    model.net[3].forward = lambda x: x
    with pytest.raises(BatchError, match=r"the head 'net\.3' is a Linear"):
        chunk_loss(model, "net.3", 2)


def test_putting_on_does_not_depend_on_the_names_of_others() -> None:
    model = Language()
    with apply_optimizations(
        model, recompute=["layers.0"], offload=["layers.1"], head="head", loss_chunks=3
    ) as applied:
        assert "forward" in model.layers[0].__dict__
        assert "forward" not in model.layers[2].__dict__
        assert (applied.taken, applied.computed) == (0, 0)
    assert not any("forward" in module.__dict__ for module in model.modules())


def test_a_model_is_saved_while_its_loss_is_in_chunks() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 1000))
    with chunk_loss(model, "1", 8):
        again = pickle.loads(pickle.dumps(model))
    assert all(map(torch.equal, again.parameters(), model.parameters()))
