"""What runs without a graph and again in its backward gives the same.

How it could be silently wrong: other random numbers, buffers updated twice or read in another state, an argument or a
parameter that changed in between, a gradient that is lost where no argument needs one.
"""

import pytest
import torch
from torch import Tensor, nn

from anybatch.memory.checkpointing import Checkpoint, NotRecomputable


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.4), nn.utils.spectral_norm(nn.Linear(8, 3))
    ).double()


def through(again: bool, model: nn.Module, *args: Tensor) -> tuple[Tensor, Tensor]:
    """Two outputs of a model, one of which goes on into the next call as a state would."""

    def function(x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        y = model(x) + state
        return y.square().mean(), y

    if not again:
        return function(*args)
    found: tuple[Tensor, Tensor] = Checkpoint("the chunk", [*model.modules()])(function, *args)
    return found


@pytest.mark.parametrize("is_wanted", [False, True])
def test_a_chain_of_calls_is_bitwise_the_same(is_wanted: bool) -> None:
    found = []
    for again in (False, True):
        model = net()
        x = torch.rand(5, 4).double()
        state = begin = torch.zeros(5, 3, dtype=torch.float64, requires_grad=is_wanted)
        losses = []
        for _ in range(4):
            loss, state = through(again, model, x, state)
            losses.append(loss)
        torch.stack(losses).sum().backward()
        gradients = [p.grad for p in model.parameters()] + [begin.grad if is_wanted else None]
        found.append([*gradients, *model.buffers(), torch.rand(3)])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


def test_a_parameter_that_changed_in_between_is_refused() -> None:
    model = net()
    loss, _ = through(True, model, torch.rand(5, 4).double(), torch.zeros(5, 3, dtype=torch.float64))
    with torch.no_grad():
        next(model.parameters()).add_(1)
    with pytest.raises(NotRecomputable, match="the chunk can't be recomputed, because a parameter was changed"):
        loss.backward()


def test_without_gradient_it_runs_once() -> None:
    model = net()
    with torch.no_grad():
        loss, _ = through(True, model, torch.rand(5, 4).double(), torch.zeros(5, 3, dtype=torch.float64))
    assert not loss.requires_grad
