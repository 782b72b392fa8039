"""Forwards and losses that move weights of their own: planning leaves no trace, checks say so, restarts warn."""

import copy
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import anybatch
from anybatch.planning.planner import Planner


class MovedAverage(nn.Module):
    """Moves an average of its encoder in each forward, as MoCo does: a proof refuses to split it."""

    def __init__(self, how: str = "write") -> None:
        super().__init__()
        self.how = how
        self.q = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 8))
        self.k = copy.deepcopy(self.q).requires_grad_(False)
        for parameter in self.k.parameters():
            parameter.data.mul_(2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            for parameter, own in zip(self.k.parameters(), self.q.parameters(), strict=True):
                if self.how == "assign":
                    parameter.data = parameter.data * 0.99 + own.data * 0.01
                else:
                    written = parameter if self.how == "write" else parameter.data
                    written.mul_(0.99).add_(own, alpha=0.01)
            target = self.k(x)
        return self.q(x), target


class Decayed(nn.Module):
    """Writes to a weight that is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(16, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            self.q.weight.mul_(0.9)
        return self.q(x), torch.zeros(())


def agreement(model: nn.Module, batch: Tensor) -> Tensor:
    found, target = model(batch)
    return F.mse_loss(found, target.expand_as(found))


def looking(model: nn.Module, batch: Tensor) -> Tensor:
    loss = agreement(model, batch)
    return loss * 2 if loss.item() > 0 else loss


class Centred:
    """A loss that is a plain object and moves a centre, by a write or by a new tensor."""

    def __init__(self, *, writes: bool) -> None:
        self.writes, self.centre, self.seen = writes, torch.zeros(8), 0

    def __call__(self, model: nn.Module, batch: Tensor) -> Tensor:
        found = model(batch)
        loss: Tensor = (found - self.centre).square().mean()
        moved = 0.9 * self.centre + 0.1 * found.detach().mean(0)
        if self.writes:
            self.centre.copy_(moved)
        else:
            self.centre = moved
        self.seen += 1
        return loss

    def method(self, model: nn.Module, batch: Tensor) -> Tensor:
        loss: Tensor = self(model, batch)
        return loss


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)


def state_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return all(torch.equal(one[name], other[name]) for name in one)


def trained_by_hand(model: nn.Module, loss_fn: Callable[[Any, Any], Tensor], batch: Tensor) -> float:
    optimizer = optimizer_of(model)
    optimizer.zero_grad()
    loss = loss_fn(model, batch)
    loss.backward()
    optimizer.step()
    return float(loss.detach())


MODELS: dict[str, Callable[[], nn.Module]] = {
    "in place": MovedAverage,
    "through .data": lambda: MovedAverage("data"),
    "another tensor": lambda: MovedAverage("assign"),
    "a trained weight": Decayed,
}


@pytest.mark.parametrize("loss_fn", [agreement, looking])
@pytest.mark.parametrize("name", MODELS)
def test_planning_leaves_weights_that_the_forward_writes_as_they_were(name: str, loss_fn: Any) -> None:
    torch.manual_seed(0)
    model, batch = MODELS[name](), torch.randn(64, 16)
    before, homes = state_of(model), [parameter.data_ptr() for parameter in model.parameters()]
    anybatch.plan(model, loss_fn, batch, optimizer_of(model), memory="1GiB")
    assert same(before, model.state_dict())
    assert homes == [parameter.data_ptr() for parameter in model.parameters()]


@pytest.mark.parametrize("loss_fn", [agreement, looking])
@pytest.mark.parametrize("name", MODELS)
def test_a_step_in_one_micro_batch_is_the_plain_one(name: str, loss_fn: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    defaults = Planner.__init__.__kwdefaults__
    assert defaults is not None
    monkeypatch.setitem(defaults, "patience", 0.5)  # measured often enough the largest micro-batch is the fastest
    torch.manual_seed(0)
    model, batch = MODELS[name](), torch.randn(64, 16)
    other = copy.deepcopy(model)
    expected = trained_by_hand(other, loss_fn, batch)
    result = anybatch.TrainStep(model, loss_fn, optimizer_of(model), memory="1GiB")(batch)
    assert result.micro_batches == 1
    assert result.loss == expected
    assert same(other.state_dict(), model.state_dict())


@pytest.mark.parametrize("writes", [False, True])
@pytest.mark.parametrize("is_method", [False, True])
def test_planning_leaves_what_an_object_of_the_loss_keeps(writes: bool, is_method: bool) -> None:
    torch.manual_seed(0)
    model, batch = nn.Linear(16, 8), torch.randn(1, 16)  # no plan splits it, however long its runs take
    other, hand, loss = copy.deepcopy(model), Centred(writes=writes), Centred(writes=writes)
    expected = trained_by_hand(other, hand, batch)
    step = anybatch.TrainStep(model, loss.method if is_method else loss, optimizer_of(model), memory="1GiB")
    assert step(batch).loss == expected
    assert torch.equal(loss.centre, hand.centre)
    assert loss.seen == 1
    assert same(other.state_dict(), model.state_dict())


def test_planning_leaves_a_teacher_in_the_closure_and_variables_of_it() -> None:
    torch.manual_seed(0)
    model, batch = nn.Linear(16, 8), torch.randn(64, 16)
    teacher, average, largest = copy.deepcopy(model), torch.zeros(8), torch.zeros(())

    def distilled(model: nn.Module, batch: Tensor) -> Tensor:
        nonlocal average
        found = model(batch)
        with torch.no_grad():
            for parameter, own in zip(teacher.parameters(), model.parameters(), strict=True):
                parameter.lerp_(own + 1, 0.1)
            average = 0.9 * average + 0.1 * found.mean(0)
            torch.maximum(largest, found.abs().max(), out=largest)
        return F.mse_loss(found, teacher(batch).detach() + average)

    before, first = state_of(teacher), average
    anybatch.plan(model, distilled, batch, optimizer_of(model), memory="1GiB")
    assert same(before, teacher.state_dict())
    assert average is first
    assert float(largest) == 0.0


def test_budgets_hold_while_copies_of_written_weights_are_there() -> None:
    torch.manual_seed(0)
    model, batch = MovedAverage(), torch.randn(512, 16)
    optimizer = optimizer_of(model)
    whole = anybatch.measure(lambda: trained_by_hand(copy.deepcopy(model), agreement, batch), model=model).peak_bytes
    budget = whole // 2
    step = anybatch.TrainStep(model, agreement, optimizer, memory=budget, verify="off")
    assert anybatch.measure(lambda: step(batch), model=model, optimizer=optimizer).peak_bytes <= budget


def test_check_names_the_weights() -> None:
    torch.manual_seed(0)
    certificate = anybatch.check(MovedAverage(), agreement, torch.randn(40, 16))
    assert not certificate.exact
    assert [(one.code, one.where) for one in certificate.reasons] == [("weight", "k.0.weight")]


@pytest.mark.parametrize("largest", [32, 16])
def test_a_restart_warns_of_weights_that_are_not_put_back(largest: int) -> None:
    told = "wrote to 4 weights in place, not rolled back"
    torch.manual_seed(0)
    model, batch = MovedAverage("write"), torch.randn(64, 16)

    def fragile(model: nn.Module, batch: Tensor) -> Tensor:
        loss = agreement(model, batch)
        if len(batch) > largest:
            raise torch.OutOfMemoryError("CUDA out of memory, on purpose")
        return loss

    with pytest.warns(anybatch.AnyBatchWarning, match=told) as found:
        anybatch.TrainStep(model, fragile, optimizer_of(model), verify="off")(batch)
    assert len(found) == 1
    with pytest.warns(anybatch.AnyBatchWarning, match=told) as found:
        anybatch.backward(model, fragile, batch, verify="off")
    assert len(found) == 1
    plain = nn.Linear(16, 8)
    anybatch.plan(MovedAverage(), agreement, batch, memory="1GiB")  # without a warning, which would be an error here
    step = anybatch.TrainStep(plain, lambda model, batch: model(batch).square().mean(), optimizer_of(plain))
    step(batch)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_restart_of_a_model_that_writes_to_no_weights_warns_of_none(
    dtype: torch.dtype, caplog: pytest.LogCaptureFixture
) -> None:
    model, batch = nn.Linear(16, 8).to(dtype), torch.randn(64, 16, dtype=dtype)

    def fragile(model: nn.Module, batch: Tensor) -> Tensor:
        if len(batch) > 16:
            raise torch.OutOfMemoryError("CUDA out of memory, on purpose")
        loss: Tensor = model(batch).square().mean()
        return loss

    for optimizer in (optimizer_of(model), torch.optim.LBFGS(model.parameters(), max_iter=2)):
        with caplog.at_level(logging.WARNING):
            assert len(anybatch.TrainStep(model, fragile, optimizer)(batch).attempts) == 3
        assert "starts again" in caplog.text
