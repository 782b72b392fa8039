"""Norms around a step: each figure against a plain computation, and what a healthy step must not show."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from anybatch.doctor.recording.numbering import Numbering
from anybatch.doctor.samples.norms import NormSampler
from anybatch.records.samples import Norms


def setting(model: nn.Module, entries: int | None = None) -> tuple[NormSampler, Numbering]:
    numbering = Numbering(lambda fact: None)
    numbering.root(model)
    return NormSampler(numbering) if entries is None else NormSampler(numbering, entries=entries), numbering


def mlp(seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 3))


def backward(model: nn.Module, rows: int = 6) -> None:
    model.zero_grad()
    model(torch.linspace(-1, 1, rows * 5).reshape(rows, 5)).pow(2).mean().backward()


def sampled(sampler: NormSampler, optimizer: Any, count: int = 0) -> Norms:
    sampler.before(optimizer)
    optimizer.step()
    return sampler.after(optimizer, count)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_figures_are_those_of_a_plain_computation(dtype: torch.dtype) -> None:
    model = mlp().to(dtype)
    model.zero_grad()
    model(torch.ones(4, 5, dtype=dtype)).pow(2).mean().backward()
    sgd = torch.optim.SGD(model.parameters(), lr=0.5)
    before = [p.detach().clone() for p in model.parameters()]
    grads = [p.grad.detach().clone() for p in model.parameters() if p.grad is not None]
    norms = sampled(setting(model)[0], sgd)
    for i, p in enumerate(model.parameters()):
        assert norms.parameters[i] == i
        assert norms.grad[i] == pytest.approx(float(grads[i].double().norm()), rel=1e-3)
        assert norms.weight[i] == pytest.approx(float(before[i].double().norm()), rel=1e-3)
        assert norms.update[i] == pytest.approx(float((p.detach() - before[i]).double().norm()), rel=1e-2)
        assert norms.unchanged[i] == pytest.approx(float((p.detach() == before[i]).double().mean()), abs=0.02)
        assert norms.grad_zeros[i] == pytest.approx(float((grads[i] == 0).double().mean()), abs=0.02)
    assert norms.since == norms.silent == norms.equal_grad_rows == ()
    assert norms.state_moved == (None,) * 4


def test_entries_stand_for_large_tensors() -> None:
    torch.manual_seed(0)
    model = nn.Linear(500, 400, bias=False)
    sampler, _ = setting(model, entries=1000)
    model(torch.randn(8, 500)).pow(2).mean().backward()
    assert model.weight.grad is not None
    before, grad = model.weight.detach().clone(), model.weight.grad.clone()
    norms = sampled(sampler, torch.optim.SGD(model.parameters(), lr=0.1))
    assert norms.grad[0] == pytest.approx(float(grad.norm()), rel=1e-5)
    assert norms.weight[0] == pytest.approx(float(before.norm()), rel=1e-5)
    assert norms.update[0] == pytest.approx(float((model.weight.detach() - before).norm()), rel=0.05)
    after = sampler._plans[next(iter(sampler._plans))].buckets[0].after
    assert after is not None
    assert after.numel() < 1 << 17


def test_a_state_that_moves_without_its_weight_is_told() -> None:
    class Copying(torch.optim.AdamW):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            kept = [p.detach().clone() for group in self.param_groups for p in group["params"]]
            super().step(closure)
            with torch.no_grad():
                for p, value in zip((p for g in self.param_groups for p in g["params"]), kept, strict=True):
                    p.copy_(value)

    model = mlp()
    sampler, _ = setting(model)
    optimizer = Copying(model.parameters(), lr=0.1)
    for _ in range(3):
        backward(model)
        norms = sampled(sampler, optimizer)
        assert norms.state_moved == (True,) * 4
        assert norms.unchanged == (1.0,) * 4
        assert norms.update == (0.0,) * 4


def test_a_state_that_stands_still_is_told() -> None:
    model = mlp()
    sampler, _ = setting(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.9)
    backward(model)
    sampled(sampler, optimizer)
    sampled(sampler, optimizer)
    sampler.before(optimizer)
    assert sampler.after(optimizer).state_moved == (False,) * 4


@pytest.mark.parametrize("fused", [False, True])
def test_a_healthy_optimizer_moves_weights_and_states(fused: bool) -> None:
    model = mlp()
    sampler, _ = setting(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=fused)
    for number in range(3):
        backward(model)
        norms = sampled(sampler, optimizer, number)
        assert norms.number == number
        assert norms.state_moved == (True,) * 4
        assert max(norms.unchanged) < 0.5


def test_a_write_outside_of_steps_is_told_and_whether_it_was_silent() -> None:
    model = mlp()
    sampler, numbering = setting(model)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    backward(model)
    sampled(sampler, sgd)
    model[0].weight.data.mul_(0.9)
    with torch.no_grad():
        model[2].bias.add_(1.0)
    norms = sampled(sampler, sgd)
    assert [numbering.name(n) for n in norms.since] == ["0.weight", "2.bias"]
    assert [numbering.name(n) for n in norms.silent] == ["0.weight"]
    assert sampled(sampler, sgd).since == ()


def test_a_step_that_was_not_looked_at_is_no_write_outside() -> None:
    model = mlp()
    sampler, _ = setting(model)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    backward(model)
    sampled(sampler, sgd)
    sgd.step()
    assert sampled(sampler, sgd, count=2).since == ()
    sgd.step()
    assert len(sampled(sampler, sgd, count=3).since) == 4  # which shows that the number was needed


def test_what_no_optimizer_has_is_looked_at_too() -> None:
    model = mlp()
    sampler, numbering = setting(model)
    sgd = torch.optim.SGD(model[0].parameters(), lr=0.1)
    backward(model)
    norms = sampled(sampler, sgd)
    assert {numbering.name(n) for n in norms.parameters} == {"0.weight", "0.bias", "2.weight", "2.bias"}
    assert norms.since == ()
    with torch.no_grad():
        model[2].weight.add_(1.0)
    assert [numbering.name(n) for n in sampled(sampler, sgd).since] == ["2.weight"]


def test_equal_rows_of_gradients_are_told() -> None:
    model = mlp()
    nn.init.constant_(model[0].weight, 0.3)
    nn.init.constant_(model[0].bias, 0.1)
    nn.init.constant_(model[2].weight, 0.2)
    sampler, numbering = setting(model)
    backward(model)
    norms = sampled(sampler, torch.optim.SGD(model.parameters(), lr=0.1))
    assert "0.weight" in [numbering.name(n) for n in norms.equal_grad_rows]
    healthy = mlp()
    nn.init.zeros_(healthy[2].weight)  # a head that begins at zero has rows of a gradient that differ
    sampler, _ = setting(healthy)
    backward(healthy)
    assert sampled(sampler, torch.optim.SGD(healthy.parameters(), lr=0.1)).equal_grad_rows == ()


@pytest.mark.parametrize("cell", [nn.LSTM, nn.GRU])
@pytest.mark.parametrize("alike", [True, False])
def test_equal_rows_of_each_gate_are_told(cell: Any, alike: bool) -> None:
    torch.manual_seed(0)
    model = nn.ModuleDict({"cell": cell(4, 16), "head": nn.Linear(16, 3)})
    for parameter in model.parameters() if alike else model["head"].parameters():
        nn.init.constant_(parameter, 0.1)
    sampler, numbering = setting(model)
    states, _ = model["cell"](torch.randn(5, 8, 4))
    F.cross_entropy(model["head"](states[-1]), torch.arange(8) % 3).backward()
    found = sampled(sampler, torch.optim.SGD(model.parameters(), lr=0.1)).equal_grad_rows
    assert ("cell.weight_ih_l0" in [numbering.name(n) for n in found]) == alike


def test_missing_sparse_and_bad_gradients() -> None:
    model: Any = nn.ModuleDict({"e": nn.Embedding(10, 4, sparse=True), "a": nn.Linear(4, 2), "b": nn.Linear(4, 2)})
    sampler, numbering = setting(model)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    model["a"](model["e"](torch.tensor([1, 1, 3]))).sum().backward()
    norms = sampled(sampler, sgd)
    found = {numbering.name(n): i for i, n in enumerate(norms.parameters)}
    assert norms.grad[found["b.weight"]] is None
    assert norms.grad_zeros[found["b.weight"]] is None
    assert norms.unchanged[found["b.weight"]] == 1.0
    assert norms.grad[found["e.weight"]]
    assert norms.grad_zeros[found["e.weight"]] == pytest.approx(0.8)
    assert 0.0 < norms.unchanged[found["e.weight"]] < 1.0


def test_a_closure_makes_its_gradients_within_the_step() -> None:
    model = mlp()
    sampler, _ = setting(model)
    lbfgs = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=2)

    def closure() -> torch.Tensor:
        lbfgs.zero_grad()
        loss: torch.Tensor = model(torch.ones(4, 5)).pow(2).mean()
        loss.backward()
        return loss

    sampler.before(lbfgs)
    lbfgs.step(closure)
    norms = sampler.after(lbfgs)
    assert None not in norms.grad
    assert min(norms.update) > 0
    assert norms.weight[0] != norms.update[0]


def test_a_single_entry_that_moved_in_a_large_tensor_is_no_standstill() -> None:
    model = nn.Embedding(1000, 8)
    sampler, _ = setting(model)
    model(torch.tensor([8])).sum().backward()
    norms = sampled(sampler, torch.optim.SGD(model.parameters(), lr=0.1))
    assert norms.update[0] > 0
    assert 0.99 < norms.unchanged[0] < 1.0


def test_parameters_that_are_added_or_replaced_are_followed() -> None:
    model = mlp()
    sampler, _ = setting(model)
    sgd = torch.optim.SGD(model[0].parameters(), lr=0.1)
    backward(model)
    sampled(sampler, sgd)
    sgd.add_param_group({"params": list(model[2].parameters())})
    norms = sampled(sampler, sgd)
    assert len(norms.parameters) == 4
    assert min(norms.update) > 0
    model.double()
    backward_double = model(torch.ones(2, 5, dtype=torch.float64)).sum()
    model.zero_grad()
    backward_double.backward()
    assert len(sampled(sampler, sgd).parameters) == 4


def test_a_run_is_bitwise_the_same_with_the_norms_taken() -> None:
    results = []
    for look in (False, True):
        model = mlp()
        sampler, _ = setting(model)
        adam = torch.optim.AdamW(model.parameters(), lr=0.01)
        torch.manual_seed(3)
        versions = []
        for _ in range(4):
            model.zero_grad()
            model(torch.randn(6, 5)).pow(2).mean().backward()
            sampled(sampler, adam) if look else adam.step()
            versions.append([(p._version, p.grad._version if p.grad is not None else -1) for p in model.parameters()])
        results.append(([p.detach().clone() for p in model.parameters()], versions, torch.random.get_rng_state()))
    assert all(torch.equal(a, b) for a, b in zip(results[0][0], results[1][0], strict=True))
    assert results[0][1] == results[1][1]
    assert torch.equal(results[0][2], results[1][2])


@pytest.mark.parametrize("shapes", ["ab", "aba", "abcab", "abba", "a"])
def test_each_figure_is_that_of_its_own_parameter_however_shapes_alternate(shapes: str) -> None:
    torch.manual_seed(0)
    sizes = {"a": (3, 2), "b": (4,), "c": (90, 80)}  # those of c are not copied whole
    model = nn.ParameterList([torch.randn(sizes[one]) * (n + 1) for n, one in enumerate(shapes)])
    sampler, _ = setting(model)
    sgd = torch.optim.SGD(model.parameters(), lr=0.5)
    for missing in (None, 0):
        for number, parameter in enumerate(model):
            parameter.grad = None if number == missing else torch.randn(parameter.shape) * (number + 7)
        grads = [None if one.grad is None else float(one.grad.norm()) for one in model]
        weights = [float(one.detach().norm()) for one in model]
        found = sampled(sampler, sgd)
        assert found.weight == pytest.approx(weights)
        assert found.grad == pytest.approx(grads)
        update = [0.0 if one is None else one / 2 for one in grads]
        assert found.update == pytest.approx(update, rel=0.1)  # estimated where not all was copied
        assert [share == 1.0 for share in found.unchanged] == [one is None for one in grads]
