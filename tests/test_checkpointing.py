"""What runs without a graph and again in its backward gives the same.

How it could be silently wrong: other random numbers, buffers updated twice or read in another state, an argument or a
parameter that changed in between, a gradient that is lost where no argument needs one.
"""

import pytest
import torch
from torch import Tensor, nn

from anybatch.memory.checkpointing import Checkpoint, NotRecomputable

WAYS = ["now", "with hooks", "without a graph"]


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.4), nn.utils.spectral_norm(nn.Linear(8, 3))
    ).double()


def through(way: str, model: nn.Module, *args: Tensor) -> tuple[Tensor, Tensor]:
    """Two outputs of a model, one of which goes on into the next call as a state would."""

    def function(x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        y = model(x) + state
        return y.square().mean(), y

    checkpoint = Checkpoint("the chunk", [*model.modules()])
    if way == "now":
        return function(*args)
    called = checkpoint if way == "with hooks" else checkpoint.without_graph
    found: tuple[Tensor, Tensor] = called(function, *args)
    return found


@pytest.mark.parametrize("way", WAYS[1:])
@pytest.mark.parametrize("is_wanted", [False, True])
def test_a_chain_of_calls_is_bitwise_the_same(way: str, is_wanted: bool) -> None:
    found = []
    for each in ("now", way):
        model = net()
        x = torch.rand(5, 4).double()
        state = begin = torch.zeros(5, 3, dtype=torch.float64, requires_grad=is_wanted)
        losses = []
        for _ in range(4):
            loss, state = through(each, model, x, state)
            losses.append(loss)
        torch.stack(losses).sum().backward()
        gradients = [p.grad for p in model.parameters()] + [begin.grad if is_wanted else None]
        found.append([*gradients, *model.buffers(), torch.rand(3)])
    # A weight that is used twice in a call gets its gradient in another order where a call is differentiated by itself.
    tolerance = 0 if way == "with hooks" else 1e-12
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=0)


@pytest.mark.parametrize("way", WAYS[1:])
def test_a_parameter_that_changed_in_between_is_refused(way: str) -> None:
    model = net()
    loss, _ = through(way, model, torch.rand(5, 4).double(), torch.zeros(5, 3, dtype=torch.float64))
    with torch.no_grad():
        next(model.parameters()).add_(1)
    with pytest.raises(NotRecomputable, match="the chunk can't be recomputed, because a parameter was changed"):
        loss.backward()


@pytest.mark.parametrize("way", WAYS[1:])
def test_without_gradient_it_runs_once(way: str) -> None:
    model = net()
    with torch.no_grad():
        loss, _ = through(way, model, torch.rand(5, 4).double(), torch.zeros(5, 3, dtype=torch.float64))
    assert not loss.requires_grad
