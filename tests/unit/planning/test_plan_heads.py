"""A loss in chunks over a large head is among the ways that are looked at, also where all fits without."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import anybatch
from anybatch.planning.search import Search
from anybatch.records.plans import PlanRow


def loss_fn(model: Any, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch["x"]).flatten(0, 1), batch["y"].flatten())


def case_of(classes: int) -> tuple[nn.Module, dict[str, Tensor]]:
    """A model whose head is one of its blocks, and a batch."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(50, 32), nn.Linear(32, 64), nn.GELU(), nn.Linear(64, classes))
    return model, {"x": torch.randint(50, (8, 16)), "y": torch.randint(classes, (8, 16))}


def looked_at(monkeypatch: pytest.MonkeyPatch, classes: int, **options: Any) -> set[int]:
    """The numbers of chunks among all ways, with memory for the whole batch."""
    model, batch = case_of(classes)
    found: list[PlanRow] = []
    rows_of = Search.rows

    def rows(self: Search, budget: int) -> list[PlanRow]:
        found[:] = rows_of(self, budget)
        return found

    monkeypatch.setattr(Search, "rows", rows)
    plan = anybatch.plan(model, loss_fn, batch, memory="1GiB", **options)
    assert plan.whole_bytes < 2**30
    return {row.loss_chunks for row in found}


def test_of_a_large_head(monkeypatch: pytest.MonkeyPatch) -> None:
    assert looked_at(monkeypatch, 4096) == {1, 8}


def test_not_of_a_small_head_whose_logits_are_soon_there(monkeypatch: pytest.MonkeyPatch) -> None:
    assert looked_at(monkeypatch, 200) == {1}


def test_not_where_nothing_can_be_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    assert looked_at(monkeypatch, 4096, device="24GiB") == {1}


def test_not_where_it_is_not_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert looked_at(monkeypatch, 4096, allow=("recompute",)) == {1}


@pytest.mark.parametrize("share", [0.8, 0.6, 0.45])
def test_a_head_that_is_a_block_has_its_loss_in_chunks_within_the_budget(share: float) -> None:
    model, batch = case_of(4096)
    model, whole = model.double(), copy.deepcopy(model).double()
    peak = anybatch.measure(lambda: loss_fn(whole, batch).backward(), model=whole, batch=batch).peak_bytes
    whole.zero_grad()
    loss_fn(whole, batch).backward()
    step = anybatch.TrainStep(model, loss_fn, torch.optim.SGD(model.parameters(), lr=0.0), memory=int(share * peak))
    for _ in range(2):
        now = anybatch.measure(lambda: step(batch), model=model, batch=batch).peak_bytes
        assert now <= share * peak
    for mine, other in zip(model.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad, rtol=1e-10, atol=1e-14)
