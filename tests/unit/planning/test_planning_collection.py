"""A trace does not depend on when Python looks for garbage in cycles of references."""

import gc
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from anybatch.batch.batches import Part, Splittable
from anybatch.loss.accumulate import Settings
from anybatch.memory.meter import Recording
from anybatch.planning.memorytrace import PassTrace, Tracer
from anybatch.planning.recipe import Recipe
from anybatch.planning.subjects import Subject

ROWS = 4


class Cache:
    """Knows itself, so that references alone do not free it."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self.own = self


class Caching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(6))
        self.fails = False

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
            Cache(x.detach() * 2)
            gc.collect(0) if gc.isenabled() else None
        if self.fails:
            raise KeyError("of the model's own")
        return x


@pytest.fixture(autouse=True)
def _collects() -> Iterator[None]:
    yield
    gc.enable()
    gc.set_threshold(700)


def traced(model: nn.Module, *, fake: bool) -> PassTrace:
    settings = Settings(torch.device("cpu"))
    batch = Splittable([torch.ones(ROWS, 8)])
    subject = Subject(model, lambda model, batch: model(batch).square().mean(), settings, batch)
    part = Part(range(ROWS), ROWS)
    return Tracer(subject, (), Recording, is_fake=fake, may_probe=False).trace([part], Recipe(), split=True)


@pytest.mark.parametrize("fake", [True, False])
def test_it_counts_what_only_cycles_hold_to_the_end(fake: bool) -> None:
    found = []
    for threshold in (0, 1, 700):
        gc.set_threshold(threshold)
        trace = traced(Caching(), fake=fake)
        found.append([(one.born, one.size, one.died) for one in trace.allocations])
        held = [one for one in trace.allocations if one.died is None and one.size == ROWS * 8 * 4]
        assert len(held) >= 6
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("fake", [True, False])
@pytest.mark.parametrize("collects", [True, False])
@pytest.mark.parametrize("fails", [True, False])
def test_whether_python_collects_is_as_before(fake: bool, collects: bool, fails: bool) -> None:
    model = Caching()
    model.fails = fails
    if not collects:
        gc.disable()
    try:
        traced(model, fake=fake)
    except KeyError:
        assert fails
    assert gc.isenabled() is collects
