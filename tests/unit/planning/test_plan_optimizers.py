"""The update of a plan counts what optimizers hold anywhere, what the step keeps beside it, and losses until then."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import anybatch
from anybatch.tensors.optimizers import state_tensors
from memory_steps import peak_of_call

Optimizer = torch.optim.Optimizer


class Lookahead(Optimizer):
    """Slow weights, in an attribute, that the weights go back to at every second step."""

    def __init__(self, base: Optimizer) -> None:
        self.base, self.taken = base, 0
        self.param_groups, self.defaults, self.state = base.param_groups, base.defaults, base.state
        self.slow = [[p.detach().clone() for p in group["params"]] for group in base.param_groups]
        self.averages = {p: torch.zeros_like(p) for group in base.param_groups for p in group["params"]}
        self._optimizer_step_pre_hooks = {}
        self._optimizer_step_post_hooks = {}

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.base.zero_grad(set_to_none)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.base.step()
        self.taken += 1
        for group, slow in zip(self.param_groups, self.slow, strict=True):
            for p, q in zip(group["params"], slow, strict=True):
                self.averages[p].lerp_(p, 0.1)
                if self.taken % 2 == 0:
                    q.lerp_(p, 0.5)
                    p.copy_(q)


class Eager(Optimizer):
    """Makes its state in the constructor, as Adagrad did in torch 2.6: three tensors for each parameter."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p] = {"steps": torch.zeros(()), "means": [torch.zeros_like(p) for _ in range(3)]}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.state[p]["steps"] += 1
                    for mean in self.state[p]["means"]:
                        mean.lerp_(p.grad, 0.1)
                    p.sub_(sum(self.state[p]["means"]), alpha=group["lr"])


def hooked(optimizer: Optimizer) -> Optimizer:
    """What calls the hooks of a step."""
    return optimizer.base if isinstance(optimizer, Lookahead) else optimizer


def network(out: int = 5) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 48), nn.Tanh(), nn.Linear(48, 48), nn.Tanh(), nn.Linear(48, out))


def batch_of(rows: int = 16) -> dict[str, Tensor]:
    torch.manual_seed(1)
    return {"x": torch.randn(rows, 32), "y": torch.randint(5, (rows,))}


def loss(model: Any, batch: Any) -> Any:
    return F.cross_entropy(model(batch["x"]), batch["y"])


def grouped(model: nn.Module) -> list[dict[str, Any]]:
    """Weights decay, biases do not."""
    flat = [p for p in model.parameters() if p.dim() < 2]
    return [{"params": flat}, {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.1}]


OPTIMIZERS: dict[str, Callable[[nn.Module], Optimizer]] = {
    "foreach": lambda m: torch.optim.SGD(grouped(m), lr=0.01, foreach=True),
    "foreach momentum": lambda m: torch.optim.SGD(grouped(m), lr=0.01, momentum=0.9, foreach=True),
    "foreach Adam": lambda m: torch.optim.Adam(grouped(m), foreach=True),
    "fused Adam": lambda m: torch.optim.Adam(grouped(m), fused=True),
    "Adam": lambda m: torch.optim.AdamW(grouped(m)),
    "state from the beginning": lambda m: Eager(m.parameters()),
    "Adagrad": lambda m: torch.optim.Adagrad(m.parameters()),
    "Lookahead": lambda m: Lookahead(torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9)),
    "Lookahead on Adam": lambda m: Lookahead(torch.optim.Adam(m.parameters())),
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_the_smallest_budget_is_kept_when_the_update_is_the_peak(kind: str) -> None:
    model = network()
    optimizer = OPTIMIZERS[kind](model)
    plan = anybatch.plan(model, loss, batch_of(), optimizer, memory=2**30)
    assert plan.confidence == "predicted"
    step = anybatch.TrainStep(model, loss, optimizer, memory=plan.smallest_bytes)
    peaks = [
        anybatch.measure(
            functools.partial(step, batch), model=model, optimizer=hooked(optimizer), batch=batch
        ).peak_bytes
        for batch in [batch_of() for _ in range(4)]
    ]
    assert max(peaks) <= plan.smallest_bytes


def test_losses_and_metrics_of_many_micro_batches_are_there_until_the_update() -> None:
    def with_metrics(model: Any, batch: Any) -> Any:
        out = model(batch["x"])
        return F.cross_entropy(out, batch["y"]), {"logits": out.detach()}

    model = network(200)
    optimizer = torch.optim.Adam(model.parameters(), foreach=True)
    budget = anybatch.plan(model, with_metrics, batch_of(24), optimizer, memory=2**30).smallest_bytes
    step = anybatch.TrainStep(model, with_metrics, optimizer, memory=budget)
    for _ in range(3):
        assert peak_of_call(step, batch_of(24)) <= budget


def test_tensors_of_optimizers_are_found_outside_of_their_state() -> None:
    model = network()
    optimizer = Lookahead(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    size = sum(p.numel() for p in model.parameters())
    assert sum(t.numel() for t in state_tensors(optimizer)) == 2 * size
    loss(model, batch_of()).backward()
    optimizer.step()
    assert sum(t.numel() for t in state_tensors(optimizer)) == 3 * size


def test_what_optimizers_hold_outside_of_their_state_is_left_alone_by_planning() -> None:
    model = network()
    optimizer = Lookahead(torch.optim.SGD(model.parameters(), lr=0.1))
    before = [[q.clone() for q in slow] for slow in optimizer.slow]
    anybatch.plan(model, loss, batch_of(), optimizer, memory=2**30)
    assert optimizer.taken == 0
    assert all(type(q) is Tensor for slow in optimizer.slow for q in slow)
    assert all(
        torch.equal(a, b)
        for one, two in zip(before, optimizer.slow, strict=True)
        for a, b in zip(one, two, strict=True)
    )


def test_measure_takes_a_list_of_optimizers_and_refuses_what_is_none() -> None:
    model = network()
    first, *rest = model.parameters()
    optimizers = [torch.optim.SGD([first], lr=0.1, momentum=0.9), torch.optim.Adam(rest)]

    def step() -> None:
        loss(model, batch_of()).backward()
        for optimizer in optimizers:
            optimizer.step()

    held = anybatch.measure(step, model=model, optimizer=optimizers).at_end["optimizer state"]
    assert held == first.nbytes + sum(2 * p.nbytes + 4 for p in rest)
    with pytest.raises(TypeError, match=r"got object, expected a torch\.optim\.Optimizer"):
        anybatch.measure(step, optimizer=[object()])  # type: ignore[list-item]


def test_state_in_lists_is_found() -> None:
    weight = nn.Parameter(torch.ones(4))
    optimizer = torch.optim.LBFGS([weight], max_iter=3)
    optimizer.step(lambda: _closed(optimizer, weight))
    assert sum(tensor.numel() for tensor in state_tensors(optimizer)) >= 8


def _closed(optimizer: Optimizer, weight: Tensor) -> float:
    optimizer.zero_grad()
    loss = (weight**2).sum() + weight.exp().sum()
    loss.backward()
    return float(loss.detach())
