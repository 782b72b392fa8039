"""A plan lists no split that its step refuses, and all its totals are of one account."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import anybatch
from anybatch.records.plans import Plan

ROWS = 96


def pairs(model: nn.Module, batch: Any) -> Tensor:
    """Compares each sample with each other one, so that it takes bytes by the square of the samples."""
    found = F.normalize(model(batch[0]), dim=-1)
    return F.cross_entropy(8 * found @ F.normalize(batch[1], dim=-1).T, torch.arange(len(found)))


def adds_up(model: nn.Module, batch: Any) -> Tensor:
    return F.mse_loss(model(batch[0]), batch[1])


def planned(loss_fn: Any, memory: Any, **options: Any) -> Plan:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return anybatch.plan(
        model, loss_fn, (torch.randn(ROWS, 8), torch.randn(ROWS, 4)), optimizer, memory=memory, **options
    )


def rows_split(plan: Plan) -> list[int]:
    return [row.micro_batches for row in (plan.chosen, *plan.alternatives) if row.micro_batches > 1]


def test_a_plan_lists_no_split_that_its_step_refuses() -> None:
    plan = planned(pairs, "1MiB")
    assert rows_split(plan) == []
    assert plan.micro_batches == 1
    assert planned(pairs, plan.smallest_bytes).micro_batches == 1  # the smallest budget is of the whole batch, too


def test_a_budget_that_only_a_refused_split_would_fit_is_refused_with_what_the_whole_batch_takes() -> None:
    least = planned(pairs, "1MiB").smallest_bytes
    assert planned(pairs, least - 1024, verify="off").micro_batches > 1
    for budget in (least - 1024, 1024):  # in which a split would fit, and in which nothing would
        with pytest.raises(anybatch.DoesNotFit) as refused:
            planned(pairs, budget)
        assert refused.value.needed == least
        assert "in micro-batches the gradient of Sequential is not the whole batch's" in refused.value.__notes__[0]


def test_the_whole_batch_of_a_loss_over_pairs_takes_what_its_row_says() -> None:
    plan = planned(pairs, "1MiB")
    assert not plan.chosen.optimizations
    assert plan.whole_bytes == plan.peak_bytes > 3 * 4 * ROWS**2
    assert plan.smallest_bytes <= plan.peak_bytes
    assert planned(pairs, "1MiB", verify="off").whole_bytes == plan.whole_bytes


def test_a_loss_that_adds_up_is_planned_in_splits_from_small_sizes(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "anybatch"):
        plan = planned(adds_up, "1MiB")
    assert rows_split(plan)
    assert "small micro-batches predict" not in caplog.text


def test_nothing_stays_of_the_proof() -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(), nn.Linear(16, 4))
    before, state = torch.get_rng_state(), {name: value.clone() for name, value in model.state_dict().items()}
    model[0].weight.grad = given = torch.ones(16, 8)
    anybatch.plan(model, adds_up, (torch.ones(ROWS, 8), torch.ones(ROWS, 4)), memory="1MiB")
    assert torch.equal(before, torch.get_rng_state())
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert model[0].weight.grad is given
    assert model[2].weight.grad is None


def test_an_unknown_way_to_verify_is_refused() -> None:
    with pytest.raises(anybatch.errors.BatchError, match=r"verify='frist'"):
        planned(adds_up, "1MiB", verify="frist")
