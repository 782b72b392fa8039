"""Asking why changes nothing: weights, gradients, buffers, attributes, hooks, modes and random state stay."""

import contextlib
import random
from typing import Any, cast

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules import module as hooks
from torch.overrides import _get_current_function_mode_stack
from torch.utils.checkpoint import checkpoint

import anybatch
from anybatch import LossError

X = torch.linspace(-1.0, 1.0, 24).reshape(8, 3)


class Restless(nn.Module):
    """Changes everything that a forward can change."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 4)
        self.norm = nn.BatchNorm1d(4)
        self.drop = nn.Dropout(0.5)
        self.register_buffer("seen", torch.zeros(()))
        self.calls = 0
        self.last: Any = None

    def forward(self, x: torch.Tensor) -> Any:
        self.calls += 1
        h = self.drop(self.norm(self.layer(x)))
        self.last = h
        self.extra = self.calls
        cast(torch.Tensor, self.seen).add_(1)
        self.register_buffer("made", torch.ones(1))
        self.layer.weight.data.clamp_(-0.1, 0.1)
        with torch.no_grad():
            self.layer.bias.add_(1.0)
        self.eval()
        random.random()
        np.random.rand()
        return cast(torch.Tensor, h)


def state_of(net: nn.Module) -> list[tuple[str, int, bytes, int]]:
    tensors = [*net.named_parameters(), *net.named_buffers()]
    return [(name, id(t), t.detach().numpy().tobytes(), t.data_ptr()) for name, t in tensors]


def test_nothing_is_changed() -> None:
    net: Any = Restless()
    net(X).sum().backward()
    net.train()
    gradients = {name: (p.grad, cast(torch.Tensor, p.grad).clone()) for name, p in net.named_parameters()}
    before, attributes = state_of(net), [dict(vars(module)) for module in net.modules()]
    generators = (torch.get_rng_state(), random.getstate(), np.random.get_state(legacy=False))
    assert not anybatch.why(lambda: net(X).square().mean(), net).stopped
    assert state_of(net) == before
    assert [dict(vars(module)) for module in net.modules()] == attributes
    for name, parameter in net.named_parameters():
        assert parameter.grad is gradients[name][0]
        assert torch.equal(cast(torch.Tensor, parameter.grad), gradients[name][1])
    assert torch.equal(generators[0], torch.get_rng_state())
    assert generators[1] == random.getstate()
    assert str(generators[2]) == str(np.random.get_state(legacy=False))


def test_a_step_of_an_optimizer_is_taken_back_from_the_weights() -> None:
    net: Any = nn.Linear(3, 2)
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1, foreach=each) for each in (False, True)]
    before = state_of(net)

    def step() -> Any:
        loss = net(X).square().mean()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        return cast(torch.Tensor, loss)

    assert not anybatch.why(step, net).stopped
    assert state_of(net) == before
    assert net.weight.grad is None


def test_a_graph_that_waits_for_its_backward_is_not_disturbed() -> None:
    net: Any = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    waiting = net(X).sum()
    expected = torch.autograd.grad(waiting, list(net.parameters()), retain_graph=True)
    anybatch.why(lambda: net(X).sum(), net)
    again = torch.autograd.grad(waiting, list(net.parameters()))
    assert all(torch.equal(one, other) for one, other in zip(expected, again, strict=True))


def test_a_finished_loss_can_still_go_backward() -> None:
    net: Any = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    loss = net(X).exp().mean()
    assert len(anybatch.why(loss, net).reached) == 4
    loss.backward()
    assert net[0].weight.grad is not None


@pytest.mark.parametrize("fails", [False, True])
def test_hooks_and_modes_come_off(fails: bool) -> None:
    net: Any = nn.Sequential(nn.Linear(3, 4), nn.Tanh())
    before = state_of(net)
    calls = len(hooks._global_forward_hooks), len(hooks._global_forward_pre_hooks)

    def loss() -> Any:
        result = net(X)
        with torch.no_grad():
            net[0].weight.zero_()
        if fails:
            raise KeyError("the user's own")
        return cast(torch.Tensor, result.sum())

    if fails:
        with pytest.raises(KeyError, match="the user's own"):
            anybatch.why(loss, net)
    else:
        anybatch.why(loss, net)
    assert (len(hooks._global_forward_hooks), len(hooks._global_forward_pre_hooks)) == calls
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in net.modules())
    assert _get_current_function_mode_stack() == []
    assert torch.is_grad_enabled()
    assert state_of(net) == before


def test_the_loss_is_what_it_would_have_been() -> None:
    net: Any = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.GELU(), nn.Linear(4, 2))
    seen: list[torch.Tensor] = []

    def loss() -> Any:
        seen.append(F.mse_loss(net(X), torch.zeros(8, 2)))
        return seen[-1]

    anybatch.why(loss, net)
    assert torch.equal(seen[0], loss())


def test_a_reentrant_checkpoint_that_is_looked_into_draws_no_numbers_of_the_others() -> None:
    net: Any = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 8), nn.Dropout(0.5))
    seen: list[torch.Tensor] = []

    def loss() -> Any:
        h = checkpoint(net[1:3], net[0](X), use_reentrant=True)
        seen.append(net[3](h).square().sum())
        return seen[-1]

    assert not anybatch.why(loss, net).stopped
    assert torch.equal(seen[0], loss())


def test_a_parameter_that_gets_other_memory_and_is_then_written_to() -> None:
    net = nn.Linear(3, 2)
    before = state_of(net)

    def loss() -> Any:
        net.weight.data = torch.ones(2, 3)
        with torch.no_grad():
            net.weight.add_(1)
        return net(X).sum()

    anybatch.why(loss, net)
    assert state_of(net) == before


def test_a_crash_in_a_module_leaves_the_name_of_none_behind() -> None:
    net: Any = nn.ModuleDict({"bad": nn.Linear(7, 2), "good": nn.Linear(3, 2)})

    def loss() -> Any:
        with contextlib.suppress(RuntimeError):
            net["bad"](X)
        return cast(torch.Tensor, net["good"](X).detach().sum() + torch.zeros((), requires_grad=True))

    stop = anybatch.why(loss, net).stopped["good.weight"]
    assert (stop.op, stop.module) == ("detach", "")


def test_what_is_refused() -> None:
    net: Any = nn.Linear(3, 2)
    with pytest.raises(LossError, match=r"got float as the loss; expected a tensor.*Pass a function"):
        anybatch.why(net(X).sum().item(), net)
    with pytest.raises(LossError, match="got str as the loss"):
        anybatch.why(lambda: "loss", net)
    with pytest.raises(TypeError, match="got int as the model"):
        anybatch.why(net(X).sum(), 3)
    with pytest.raises(TypeError, match="got 'a': int as the model"):
        anybatch.why(net(X).sum(), {"a": 3})
    with pytest.raises(LossError, match="without parameters"):
        anybatch.why(net(X).sum(), nn.ReLU())
    lazy = nn.LazyLinear(2)
    with pytest.raises(LossError, match="lazy parameters"):
        anybatch.why(lambda: lazy(X).sum(), lazy)
    assert isinstance(lazy, nn.LazyLinear)
