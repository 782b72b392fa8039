"""An optimizer that has no parameter with a gradient is refused before it steps; one that has some is not."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import anybatch


def loss_fn(model: Any, batch: torch.Tensor) -> torch.Tensor:
    mean: torch.Tensor = model(batch).square().mean()
    return mean


def test_weights_that_were_replaced_after_the_optimizer_was_made() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.1)
    for layer in (model[0], model[2]):
        assert isinstance(layer, nn.Linear)
        layer.weight, layer.bias = (nn.Parameter(layer.weight.detach().clone()), nn.Parameter(layer.bias.detach() * 2))
    stale = copy.deepcopy(optimizer.param_groups[0]["params"])
    step = anybatch.TrainStep(model, loss_fn, optimizer, micro_batch_size=3, clip_norm=1.0)
    for _ in range(2):
        with pytest.raises(anybatch.LossError, match="none of the 4 that the optimizer has"):
            step(torch.randn(8, 4))
    assert step.updates == 0
    assert not optimizer.state
    for one, other in zip(stale, optimizer.param_groups[0]["params"], strict=True):
        assert torch.equal(one, other)


def test_an_optimizer_whose_model_was_copied_beside_another_one() -> None:
    model = nn.Linear(4, 2)
    copied = copy.deepcopy(model)
    optimizers = [torch.optim.SGD(copied.parameters(), lr=0.1), torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)]
    with pytest.raises(anybatch.LossError, match="none of the 3"):
        anybatch.TrainStep(model, loss_fn, optimizers)(torch.randn(8, 4))


@pytest.mark.parametrize("whole", [True, False])
def test_what_has_one_parameter_with_a_gradient_steps(whole: bool) -> None:
    model, head = nn.Linear(4, 2), nn.Parameter(torch.ones(2))
    unused = nn.Parameter(torch.ones(3))
    optimizers = [torch.optim.SGD([unused], lr=0.1), torch.optim.SGD([head], lr=0.1)]  # the model itself is not trained

    def with_head(model: Any, batch: torch.Tensor) -> torch.Tensor:
        return F.softplus(model(batch) * head).mean()

    step = anybatch.TrainStep(model, with_head, optimizers, micro_batch_size=None if whole else 3)
    step(torch.randn(8, 4))
    assert step.updates == 1
    assert not torch.equal(head, torch.ones(2))


class Evaluating(torch.optim.SGD):
    """Evaluates the gradient itself, and does not name the argument that it needs."""

    def step(self, *args: Any) -> Any:
        assert args, "a function is needed"
        with torch.enable_grad():
            loss = args[0]()
        super().step()
        return loss


class Failing(torch.optim.SGD):
    """Takes no argument, and fails."""

    def step(self) -> Any:  # type: ignore[override]
        raise ValueError("no")


@pytest.mark.parametrize("kind", [Evaluating, Failing])
def test_an_optimizer_that_may_need_a_closure_says_so_where_it_fails(kind: type[torch.optim.SGD]) -> None:
    def step_with(**options: Any) -> anybatch.TrainStep:
        model = nn.Linear(4, 1)
        optimizer = kind(model.parameters(), lr=0.1)
        return anybatch.TrainStep(model, lambda model, x: model(x).square().mean(), optimizer, **options)

    with pytest.raises((AssertionError, ValueError)) as caught:
        step_with()(torch.ones(4, 4))
    assert any("closure=True" in note for note in getattr(caught.value, "__notes__", ())) == (kind is Evaluating)
    if kind is Evaluating:
        assert step_with(closure=True)(torch.ones(4, 4)).loss > 0
