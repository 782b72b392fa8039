"""A loss that becomes one of other operations has the next batch proved, whatever it goes by."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import anybatch

BEGINS = 11
Batch = dict[str, torch.Tensor]


def batch_of() -> Batch:
    torch.manual_seed(0)
    return {"x": torch.randn(20, 4), "y": torch.randint(3, (20,)), "w": torch.ones(20)}


def mean(model: Any, batch: Batch) -> Any:
    return F.cross_entropy(model(batch["x"]), batch["y"])


def coupled(model: Any, batch: Batch) -> Any:
    return mean(model, batch) + model(batch["x"]).std(0).mean()


def step_of(loss_fn: Callable[[Any, Any], Any]) -> tuple[nn.Linear, torch.optim.Optimizer, anybatch.TrainStep]:
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    return model, optimizer, anybatch.TrainStep(model, loss_fn, optimizer, micro_batch_size=8)


@pytest.mark.parametrize("goes_by", ["counter", "rate", "state"])
def test_a_term_that_begins_late_is_refused_in_the_batch_after(goes_by: str) -> None:
    number = [0]

    def loss_fn(model: Any, batch: Batch) -> Any:
        seen = {"counter": number[0], "rate": BEGINS * (optimizer.param_groups[0]["lr"] < 0.01)}
        state = optimizer.state.get(model.weight, {})
        return (coupled if seen.get(goes_by, int(state.get("step", 0))) >= BEGINS else mean)(model, batch)

    model, optimizer, step = step_of(loss_fn)
    for number[0] in range(BEGINS):
        step(batch_of())
    number[0], optimizer.param_groups[0]["lr"] = BEGINS, 0.001
    step(batch_of())
    before = model.weight.detach().clone()
    with pytest.raises(anybatch.NotSplittable):
        step(batch_of())
    assert torch.equal(model.weight, before)
    assert step.updates == BEGINS + 1


def test_a_term_of_each_sample_may_begin_late() -> None:
    numbers, calls = [0], list[int]()

    def loss_fn(model: Any, batch: Batch) -> Any:
        calls.append(numbers[0])
        loss = mean(model, batch)
        return loss + model(batch["x"]).square().mean() if numbers[0] % 4 == 3 else loss

    model, _, step = step_of(loss_fn)
    plain = nn.Linear(4, 3)
    plain.load_state_dict(model.state_dict())
    optimizer = torch.optim.Adam(plain.parameters(), lr=0.01)
    for numbers[0] in range(24):
        step(batch_of())
        optimizer.zero_grad()
        loss_fn(plain, batch_of()).backward()
        optimizer.step()
    torch.testing.assert_close(model.weight, plain.weight)
    assert calls.count(23) == 4  # three micro-batches and the plain loop: nothing is proved by then


def test_a_phase_of_an_object_in_a_list_is_seen() -> None:
    class Phase:
        weight = 0.0

    phases = [Phase()]
    phases[0].weight = 0.0

    def loss_fn(model: Any, batch: Batch) -> Any:
        return mean(model, batch) + phases[0].weight * model(batch["x"]).std(0).mean()

    _, _, step = step_of(loss_fn)
    for _ in range(3):
        step(batch_of())
    phases[0].weight = 0.1
    with pytest.raises(anybatch.NotSplittable):
        step(batch_of())


def test_the_first_batch_whose_mask_is_not_full_is_proved() -> None:
    def weighted(model: Any, batch: Batch) -> Any:
        losses = F.cross_entropy(model(batch["x"]), batch["y"], reduction="none")
        return (losses * batch["w"]).sum() / batch["w"].sum()

    _, _, step = step_of(weighted)
    with pytest.warns(anybatch.AnyBatchWarning, match="is 1 in this batch"):
        step(batch_of())
    step(batch_of())
    with pytest.raises(anybatch.NotSplittable, match="sum"):
        step(batch_of() | {"w": torch.rand(20)})
    model, optimizer, _ = step_of(weighted)
    step = anybatch.TrainStep(model, weighted, optimizer, micro_batch_size=8, count=lambda batch: batch["w"].sum())
    step(batch_of())
    step(batch_of() | {"w": torch.rand(20)})
