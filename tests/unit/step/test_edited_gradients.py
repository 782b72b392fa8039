"""Optimizers that change the gradient before they go on with ``super().step(closure)``."""

import pickle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import anybatch

BATCH = {"x": torch.arange(80.0).reshape(20, 4).sin(), "y": torch.arange(20) % 3}


def loss_fn(model: Any, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch["x"]), batch["y"])


class Centred(torch.optim.SGD):
    """Takes a mean of the gradient off it, as gradient centralisation does."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                p.grad -= p.grad.mean(-1, keepdim=True)
        return super().step(closure)


class Cleared(Centred):
    """Evaluates the gradient anew, where the weights have not moved."""

    def step(self, closure: Any = None) -> Any:
        self.zero_grad(set_to_none=False)
        return torch.optim.SGD.step(self, closure)


@pytest.mark.parametrize("options", [{}, {"closure": False}])
def test_an_edited_gradient_is_what_the_optimizer_steps_with(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model, plain = nn.Linear(4, 3), nn.Linear(4, 3)
    plain.load_state_dict(model.state_dict())
    optimizer = Centred(plain.parameters(), lr=0.1)
    step = anybatch.TrainStep(model, loss_fn, Centred(model.parameters(), lr=0.1), micro_batch_size=8, **options)
    for _ in range(3):
        step(BATCH)
        optimizer.zero_grad()
        loss_fn(plain, BATCH).backward()
        optimizer.step()
    torch.testing.assert_close(model.weight, plain.weight)


def test_a_gradient_that_was_cleared_is_evaluated_again() -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    before = model.weight.detach().clone()
    anybatch.TrainStep(model, loss_fn, Cleared(model.parameters(), lr=0.1), micro_batch_size=8)(BATCH)
    assert not torch.equal(model.weight, before)


def test_a_result_can_be_pickled() -> None:
    model = nn.Linear(4, 3)
    step = anybatch.TrainStep(
        model, loss_fn, torch.optim.SGD(model.parameters(), lr=0.1), micro_batch_size=8, clip_norm=1.0
    )
    out = step(BATCH)
    again = pickle.loads(pickle.dumps(out))
    assert (again.loss, again.grad_norm, again.count) == (out.loss, out.grad_norm, 20)


def test_a_text_of_a_part_of_a_byte_is_no_budget() -> None:
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(anybatch.BatchError, match="or a share of the device"):
        anybatch.TrainStep(model, loss_fn, optimizer, memory="1.5")
    anybatch.TrainStep(model, loss_fn, optimizer, memory="1.5MiB")
