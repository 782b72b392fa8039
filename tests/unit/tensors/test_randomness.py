"""Random state: a step draws what the loop over the same micro-batches draws; what is replayed is bitwise the same."""

import io
import random
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import anybatch
import reference
from anybatch import Mean
from anybatch.tensors.randomness import RandomState
from default_devices import forget_default_device

Batch = dict[str, torch.Tensor]


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5), nn.Tanh(), nn.Linear(8, 2), nn.Dropout(0.5))


def batch_of(rows: int = 7) -> Batch:
    return {"x": torch.randn(rows, 3), "y": torch.randint(0, 2, (rows,))}


def noisy_loss(model: Any, batch: Batch) -> torch.Tensor:
    """Draws from every generator."""
    factor = 1 + 0.1 * random.random() + 0.1 * float(np.random.rand()) + 0.1 * torch.rand(())
    return F.cross_entropy(model(batch["x"]), batch["y"]) * factor


def by_hand(model: nn.Module, batch: Batch, size: int) -> None:
    rows = len(batch["x"])
    for x, y in zip(batch["x"].split(size), batch["y"].split(size), strict=True):
        (noisy_loss(model, {"x": x, "y": y}) * (len(x) / rows)).backward()


@pytest.mark.parametrize("size", [1, 3, 7])
def test_a_step_draws_what_the_loop_over_the_same_micro_batches_draws(size: int) -> None:
    model, batch = net(), batch_of()
    state = RandomState()
    by_hand(model, batch, size)
    expected, after = reference.gradients_of(model), reference.random_state()
    reference.clear(model)
    state.restore()
    anybatch.backward(model, noisy_loss, batch, micro_batch_size=size)
    reference.assert_bitwise(reference.gradients_of(model), expected)
    assert reference.random_state() == after


def test_the_whole_batch_draws_what_plain_autograd_draws() -> None:
    model, batch = net(), batch_of()
    state = RandomState()
    noisy_loss(model, batch).backward()
    expected, after = reference.gradients_of(model), reference.random_state()
    reference.clear(model)
    state.restore()
    anybatch.backward(model, noisy_loss, batch)
    reference.assert_bitwise(reference.gradients_of(model), expected)
    assert reference.random_state() == after


def test_two_runs_with_the_same_plan_are_bitwise_equal() -> None:
    def run() -> tuple[Any, Any]:
        torch.manual_seed(3)
        random.seed(3)
        np.random.seed(3)
        model = net()
        step = anybatch.TrainStep(model, noisy_loss, torch.optim.AdamW(model.parameters()), micro_batch_size=3)
        losses = [step(batch_of()).loss for _ in range(4)]
        return reference.frozen(model.state_dict()), (losses, reference.random_state())

    assert run() == run()


class Recording(nn.Module):
    """Keeps what it gave, so that two passes can be compared."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = net()
        self.register_buffer("calls", torch.zeros(()))
        self.calls: torch.Tensor
        self.given: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        out: torch.Tensor = self.inner(x)
        self.given.append(out.detach().clone())
        return out


def counted_by_chance(model: Any, batch: Batch) -> dict[str, Mean]:
    """Two losses whose counts are only known in the forward, and differ from one draw to the next."""
    out = F.cross_entropy(model(batch["x"]), batch["y"], reduction="none")
    kept = (torch.rand(len(out)) < 0.7) & torch.from_numpy(np.random.rand(len(out)) < 0.9)
    return {
        "a": Mean((out * kept).sum(), kept.sum()),
        "b": Mean(out.sum() * (1 + random.random()), 1 + random.randrange(3)),
    }


@pytest.mark.parametrize("size", [1, 3, 7])
def test_the_forward_that_counts_is_replayed_bitwise(size: int) -> None:
    model, batch = Recording(), batch_of()
    state = RandomState()
    out = anybatch.backward(model, counted_by_chance, batch, micro_batch_size=size, count="forward")
    found, after = reference.gradients_of(model), reference.random_state()
    n = out.micro_batches
    reference.assert_bitwise(list(model.given[:n]), list(model.given[n:]))
    assert model.calls == n  # the pass that counts leaves no trace in the buffers

    state.restore()  # the same without counting in a forward: the counts are known
    reference.clear(model)
    parts = [{"x": x, "y": y} for x, y in zip(batch["x"].split(size), batch["y"].split(size), strict=True)]
    for part in parts:
        losses = counted_by_chance(model, part)
        torch.stack([losses[name].total / out.counts[name] for name in ("a", "b") if out.counts[name]]).sum().backward()
    assert reference.random_state() == after
    assert reference.distance(found, reference.gradients_of(model)) <= 1e-6 * reference.norm(found)


def test_evaluation_draws_nothing_of_its_own() -> None:
    model = net()
    step = anybatch.TrainStep(
        model, lambda model, batch: F.cross_entropy(model(batch["x"]), batch["y"]),
        torch.optim.SGD(model.parameters(), lr=0.1), micro_batch_size=2,
    )  # fmt: skip
    batch = batch_of()
    before = reference.random_state()
    assert step.evaluate(batch).loss == step.evaluate(batch).loss
    assert reference.random_state() == before
    assert all(module.training for module in model.modules())


# Saved and put back.


def draw() -> tuple[Any, ...]:
    """One draw from each generator; the normal ones leave a second number behind in the state."""
    return (
        random.random(),
        random.gauss(0, 1),
        np.random.rand(),
        np.random.randn(),
        torch.rand(()).item(),
        torch.randn(3).tolist(),
    )


def through_a_file(state: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


RESTORES: dict[str, Callable[[RandomState], None]] = {
    "restore": lambda state: state.restore(),
    "state_dict": lambda state: RandomState.load_state_dict(state.state_dict()),
    "a file": lambda state: RandomState.load_state_dict(through_a_file(state.state_dict())),
}


@pytest.mark.parametrize("restore", RESTORES.values(), ids=RESTORES)
def test_every_generator_goes_on_from_where_it_was(restore: Any) -> None:
    draw()
    random.gauss(0, 1)
    np.random.randn()  # a normal number is left over in both
    state, before = RandomState(), reference.random_state()
    first = [draw() for _ in range(3)]
    for _ in range(2):  # it can be done again
        restore(state)
        assert reference.random_state() == before
        assert [draw() for _ in range(3)] == first


def test_without_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "numpy.random")
    state = RandomState()
    first = torch.rand(3)
    state.restore()
    assert torch.equal(torch.rand(3), first)
    assert "numpy" not in state.state_dict()


def test_who_loads_numpy_has_drawn_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "numpy.random")
    state, loaded = RandomState(), np.random.RandomState()
    monkeypatch.setitem(sys.modules, "numpy.random", loaded)
    assert state.moved() == (False, False)
    loaded.rand()
    assert state.moved() == (False, True)


def test_a_state_holds_tensors_and_plain_values_only() -> None:
    def plain(value: Any) -> bool:
        if isinstance(value, dict):
            return all(isinstance(key, str) and plain(item) for key, item in value.items())
        if isinstance(value, list | tuple):
            return all(plain(item) for item in value)
        return type(value) in (int, float, str, bool, type(None), torch.Tensor)

    model = net()
    step = anybatch.TrainStep(
        model, noisy_loss, torch.optim.AdamW(model.parameters()), micro_batch_size=3, autocast=torch.float16
    )
    step(batch_of())
    assert plain(RandomState().state_dict())
    assert plain(step.state_dict())


@pytest.mark.parametrize("autocast", [None, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("stop", range(4))
def test_a_run_that_was_stopped_goes_on_bitwise(autocast: torch.dtype | None, stop: int) -> None:
    batches = [batch_of(rows) for rows in (7, 7, 4, 7)]

    def build(seed: int) -> tuple[nn.Module, torch.optim.Optimizer, anybatch.TrainStep]:
        torch.manual_seed(seed)
        model = net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        return model, optimizer, anybatch.TrainStep(
            model, noisy_loss, optimizer, micro_batch_size=3, clip_norm=0.1, autocast=autocast
        )  # fmt: skip

    model, optimizer, step = build(1)
    saved = None
    for index, batch in enumerate(batches):
        if index == stop:
            saved = through_a_file((model.state_dict(), optimizer.state_dict(), step.state_dict()))
        step(batch)
    expected = reference.everything(model, optimizer, step)
    assert saved is not None
    model, optimizer, step = build(2)
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    step.load_state_dict(saved[2])
    for batch in batches[stop:]:
        step(batch)
    now = reference.everything(model, optimizer, step)
    reference.assert_unchanged({**now, "which gradients": 0}, {**expected, "which gradients": 0})
    assert (step.updates, step.samples) == (4, 25)


def test_forwards_run_again_and_elsewhere_after_a_default_device_was_taken_back(request: pytest.FixtureRequest) -> None:
    """torch 2.6 fails then when it is asked for the default device."""
    request.addfinalizer(forget_default_device)
    torch.set_default_device("cpu")
    torch.set_default_device(None)
    model, batch = nn.Linear(3, 2).double(), {"x": torch.randn(6, 3, dtype=torch.float64)}
    expected = torch.autograd.grad(model(batch["x"]).tanh().prod(0).sum(), list(model.parameters()))
    loss = anybatch.Coupled(lambda model, batch: model(batch["x"]).tanh(), lambda model, codes: codes.prod(0).sum())
    anybatch.backward(model, loss, batch, micro_batch_size=2)
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-10, atol=1e-14)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    devices = ["cpu", "cpu"]
    step = anybatch.TrainStep(
        model, lambda model, batch: model(batch["x"]).pow(2).mean(), optimizer, micro_batch_size=2, devices=devices
    )
    assert step(batch).micro_batches == 3


def test_states_that_differ_in_a_normal_number_left_over_only() -> None:
    """The words and the position are the same, so that looking at them alone would not tell these states apart."""
    np.random.seed(3)
    np.random.randn()
    random.seed(3)
    random.gauss(0, 1)
    left_over = RandomState()
    expected = np.random.randn(), random.gauss(0, 1)
    used_up = RandomState()
    after = np.random.randn(), random.gauss(0, 1)
    for _ in range(2):
        left_over.restore()
        assert (np.random.randn(), random.gauss(0, 1)) == expected
        used_up.restore()
        assert (np.random.randn(), random.gauss(0, 1)) == after


def test_another_bit_generator_behind_the_functions_of_numpy() -> None:
    module: Any = np.random  # its stub does not know these two
    before = module.get_bit_generator()
    try:
        module.set_bit_generator(np.random.PCG64(4))
        state = RandomState()
        first = np.random.rand(3).tolist()
        state.restore()
        assert np.random.rand(3).tolist() == first
    finally:
        module.set_bit_generator(before)
