"""Blocks that write to an object among their arguments, such as a cache of keys and values, are recomputed as they ran.

What would be wrong: the second forward finds in the cache what the first one put there, and attends to it twice.
"""

from typing import Any

import pytest
import torch
from torch import nn

import anybatch
from anybatch.memory.checkpointing import recompute


class Layer:
    """Keys and values of one layer."""

    def __init__(self) -> None:
        self.keys: torch.Tensor | None = None


class Cache:
    """Keys of all layers, which grow with each call."""

    def __init__(self, layers: int) -> None:
        self.layers, self.seen = [Layer() for _ in range(layers)], {"calls": 0}

    def update(self, keys: torch.Tensor, number: int) -> torch.Tensor:
        layer = self.layers[number]
        layer.keys = keys if layer.keys is None else torch.cat([layer.keys, keys], 1)
        self.seen["calls"] += 1
        found: torch.Tensor = layer.keys * self.seen["calls"]
        return found


class Block(nn.Module):
    """Attends to what the cache has."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number, self.query, self.key = number, nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor, cache: Cache | None = None) -> torch.Tensor:
        keys: torch.Tensor = self.key(x)
        keys = keys if cache is None else cache.update(keys, self.number)
        found: torch.Tensor = x + (self.query(x) @ keys.mT).softmax(-1) @ keys
        return found


class Model(nn.Module):
    """Makes a cache in each forward, or goes on with one that it is given."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(map(Block, range(4)))

    def forward(self, x: torch.Tensor, given: torch.Tensor | None = None) -> torch.Tensor:
        cache = Cache(4)
        for layer in cache.layers if given is not None else ():
            layer.keys = given
        for number, block in enumerate(self.blocks):
            x = block(x, cache) if number % 2 else block(x, cache=cache)
        return x


def gradients(model: nn.Module) -> list[torch.Tensor]:
    return [one.grad.clone() for one in model.parameters() if one.grad is not None]


@pytest.mark.parametrize("blocks", [["blocks.0"], ["blocks.1", "blocks.3"], [f"blocks.{n}" for n in range(4)]])
@pytest.mark.parametrize("prefix", [False, True])
def test_a_cache_is_as_it_was(blocks: list[str], prefix: bool) -> None:
    model, x = Model().double(), torch.randn(5, 7, 6, dtype=torch.float64)
    given = (torch.randn(5, 2, 6, dtype=torch.float64),) if prefix else ()
    model(x, *given).square().sum().backward()
    wanted = gradients(model)
    model.zero_grad()
    with recompute(model, blocks):
        loss: Any = model(x, *given).square().sum()
        loss.backward(retain_graph=True)
        assert all(map(torch.equal, gradients(model), wanted))
        loss.backward()
    assert all(torch.equal(one, 2 * other) for one, other in zip(gradients(model), wanted, strict=True))


def test_a_budget_holds_a_model_that_keeps_a_cache() -> None:
    def loss_fn(model: Any, batch: Any) -> Any:
        return (model(batch["x"]) - batch["y"]).square().mean()

    batch = {name: torch.randn(32, 24, 6, dtype=torch.float64) for name in ("x", "y")}
    model, other = Model().double(), Model().double()
    step = anybatch.TrainStep(model, loss_fn, torch.optim.SGD(model.parameters(), lr=1e-4), memory="600KiB")
    optimizer = torch.optim.SGD(other.parameters(), lr=1e-4)
    for _ in range(3):
        out, loss = step(batch), loss_fn(other, batch)
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()
        for one, wanted in zip(model.parameters(), other.parameters(), strict=True):
            assert torch.allclose(one, wanted, rtol=1e-10)
    assert out.plan is not None
    assert out.micro_batches > 1 or out.plan.recompute


class Known(nn.Module):
    """Treats the object that it was made with, and what that holds, in another way than an equal one."""

    def __init__(self, own: Cache) -> None:
        super().__init__()
        self.own, self.scales = [own], {own.layers[0]: 3.0}
        self.linear = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor, cache: Cache) -> torch.Tensor:
        x = self.linear(x)
        if cache is self.own[0]:
            x = x.sin()
        found: torch.Tensor = x.square() * self.scales.get(cache.layers[0], 1.0)
        return found


def test_an_object_is_the_same_object_the_second_time() -> None:
    cache, x = Cache(2), torch.randn(5, 6, dtype=torch.float64)
    model = nn.ModuleDict({"block": Known(cache)}).double()
    block = model["block"]
    block(x, cache).square().sum().backward()
    wanted = gradients(model)
    model.zero_grad()
    with recompute(model, ["block"]):
        block(x, cache).square().sum().backward()
    assert all(map(torch.equal, gradients(model), wanted))
