"""What a training loop sets for another phase is proved again, where the split of the first one was proved.

How this could cost without need: a value that changes with each step is a new phase in each step.
"""

import copy
import functools
import gc
import weakref
from functools import partial
from types import MethodType
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import anybatch
from anybatch.checking.switches import Switches

epoch = 0


class Phased(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.phase = nn.Linear(4, 3), "first"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layer(x)
        return out - out.mean(0) if self.phase == "second" else out


def batch_of() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {"x": torch.randn(20, 4), "y": torch.randint(3, (20,))}


def mean(model: Any, batch: Any) -> Any:
    return F.cross_entropy(model(batch["x"]), batch["y"])


def coupled(model: Any, batch: Any) -> Any:
    return mean(model, batch) + model(batch["x"]).std(0).mean()


class Scheduled:
    def __init__(self) -> None:
        self.is_coupled = False

    def __call__(self, model: Any, batch: Any) -> Any:
        return (coupled if self.is_coupled else mean)(model, batch)


def made(state: dict[str, bool]) -> Any:
    def loss(model: Any, batch: Any) -> Any:
        out = model(batch["x"])
        return F.cross_entropy(out - out.mean(0) if state["is_coupled"] else out, batch["y"])

    return loss


def by_epoch(model: Any, batch: Any) -> Any:
    return (mean if epoch < 1 else coupled)(model, batch)


@pytest.mark.parametrize("kind", ["object", "global", "closure", "module"])
def test_a_phase_that_couples_the_samples_is_stopped_when_it_begins(kind: str) -> None:
    global epoch
    phase = epoch = 0
    model, scheduled = Phased() if kind == "module" else nn.Linear(4, 3), Scheduled()

    def closed(model: Any, batch: Any) -> Any:
        return (coupled if phase else mean)(model, batch)

    loss_fn: Any = {"object": scheduled, "global": by_epoch, "closure": closed, "module": mean}[kind]
    step = anybatch.TrainStep(model, loss_fn, torch.optim.SGD(model.parameters(), lr=0.1), micro_batch_size=8)
    step(batch_of())
    before = [one.detach().clone() for one in model.parameters()]
    phase = epoch = 1
    scheduled.is_coupled, model.phase = True, "second"
    with pytest.raises(anybatch.NotSplittable):
        step(batch_of())
    assert all(map(torch.equal, before, model.parameters()))


def centred(self: Any, x: torch.Tensor) -> Any:
    return nn.Linear.forward(self, x - x.mean(0))


class Plain(nn.Linear):
    def forward(self, input: torch.Tensor) -> Any:
        return super().forward(input)


@pytest.mark.parametrize("kind", ["object", "class", "numpy", "tensor"])
def test_what_is_put_in_place_of_a_forward_and_what_is_written_to_outside_is_a_phase(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    bound, weights = {"most": np.array(9.0)}, torch.ones(20)
    model = Plain(4, 3) if kind == "class" else nn.Linear(4, 3)

    def loss(model: Any, batch: Any) -> Any:
        each = F.cross_entropy(model(batch["x"]), batch["y"], reduction="none")
        most, own = float(bound["most"]), weights[batch["index"]]
        return (each * own).sum() / own.sum() if most > 1 else each.topk(3).values.mean()

    step = anybatch.TrainStep(model, loss, torch.optim.SGD(model.parameters(), lr=0.1), micro_batch_size=8)
    batch = batch_of() | {"index": torch.arange(20).roll(3)}
    for _ in range(4):
        proof = step(batch).proof
    assert proof is not None
    assert proof.update == 0
    if kind == "object":
        model.forward = MethodType(centred, model)  # type: ignore[method-assign]
    elif kind == "class":
        monkeypatch.setattr(Plain, "forward", centred)
    elif kind == "numpy":
        bound["most"] = np.array(0.5)
    else:
        weights[::2] = 4.0
    with pytest.raises(anybatch.NotSplittable):
        step(batch)


class Held:
    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def __call__(self, x: torch.Tensor) -> Any:
        return nn.Linear.forward(self.model, x)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["partial", "object"])
def test_a_forward_that_is_put_on_a_model_and_holds_it_does_not_outlive_it(kind: str) -> None:
    model = nn.Linear(4, 3)
    vars(model)["forward"] = Held(model) if kind == "object" else partial(nn.Linear.forward, model)
    anybatch.backward(model, mean, batch_of(), micro_batch_size=8)
    found = weakref.ref(model)
    del model
    gc.collect()
    assert found() is None


class Numbered(nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number


@pytest.mark.parametrize("kind", ["of other modules", "beside it", "in the loss"])
def test_many_numbers_that_a_schedule_gets_beyond_are_no_turn_each(kind: str) -> None:
    model, scheduled, switches, found = nn.Sequential(*map(Numbered, range(40))), Scheduled(), Switches(), 0
    home: Any = scheduled if kind == "in the loss" else model[0]
    if kind != "of other modules":
        vars(home).update({f"threshold {one}": float(one) for one in range(40)})
    for number in range(40):
        vars(home)["progress"] = number + 0.5
        if number == 0 or switches.are_turned(model, scheduled):
            found += 1
            switches.note(model, scheduled)
    assert found <= (8 if kind == "of other modules" else 24)


@pytest.mark.parametrize("beside", [np.longdouble(1), np.array(np.longdouble(1)), np.datetime64("2020-01-01", "ns")])
def test_a_number_of_numpy_that_python_has_no_kind_of_ends_no_look_at_what_is_beside_it(beside: Any) -> None:
    state, switches = {"beside": beside, "is_on": False}, Switches()
    loss_fn = functools.partial(told, state=state)
    switches.note(None, loss_fn)
    state["is_on"] = True
    assert switches.are_turned(None, loss_fn)


def test_numbers_in_a_tuple_or_a_set_of_the_code_are_bounds() -> None:
    def loss(model: Any, batch: Any, progress: float) -> Any:
        return mean(model, batch) if progress in (0.3, 0.55) or progress in {0.75} else None

    switches, loss_fn = Switches(), partial(loss, progress=0.0)
    switches.note(None, loss_fn)
    found = []
    for number in range(1, 100):
        loss_fn.keywords["progress"] = number / 100
        if switches.are_turned(None, loss_fn):
            found.append(number)
    assert {30, 31, 55, 56, 75, 76} <= {*found}


class Ramped(nn.Module):
    """Mixes samples far before its last operations, and before any that has a gradient, from a number on."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(20))
        self.rate, self.begins = 0.0, 0.85

    def mixed(self, x: torch.Tensor, rate: float) -> torch.Tensor:
        return x - x.mean(0) if rate > 0.85 else x

    def forward(self, x: torch.Tensor, rate: float | None = None) -> torch.Tensor:
        x = self.mixed(x, self.rate) if rate is None else x - x.mean(0) if rate > self.begins else x
        for layer in self.layers:
            x = x + layer(x).tanh()
        return x


@pytest.mark.parametrize("kind", ["module", "batch"])
def test_a_schedule_that_changes_in_each_step_is_proved_where_it_gets_beyond_a_number_of_the_code(kind: str) -> None:
    model, proved = Ramped(), set()
    is_of_batch = kind == "batch"

    def loss(model: Any, batch: Any) -> Any:
        return F.cross_entropy(model(batch["x"], batch["rate"] if is_of_batch else None), batch["y"])

    step = anybatch.TrainStep(model, loss, torch.optim.SGD(model.parameters(), lr=0.01), micro_batch_size=8)
    for number in range(30):
        model.rate = number / 30
        batch = batch_of() | {"rate": model.rate}
        if number == 26:  # 0.867
            with pytest.raises(anybatch.NotSplittable):
                step(batch)
            break
        proof = step(batch).proof
        assert proof is not None
        proved.add(proof.update)
    assert number == 26
    assert proved == {0, 1, 2, 4, 8, 16}


def test_a_number_that_changes_in_each_step_is_rarely_proved_again() -> None:
    scheduled, model, proved = Scheduled(), nn.Linear(4, 3), set()
    step = anybatch.TrainStep(model, scheduled, torch.optim.SGD(model.parameters(), lr=0.1), micro_batch_size=10)
    for number in range(33):
        scheduled.number = number  # type: ignore[attr-defined]
        proof = step(batch_of()).proof
        assert proof is not None
        proved.add(proof.update)
    assert proved == {0, 1, 2, 4, 8, 16, 32}


@pytest.mark.parametrize("kind", ["closure", "partial"])
def test_the_second_function_of_one_definition_is_looked_at_too(kind: str) -> None:
    states = [{"is_coupled": False}, {"is_coupled": False}]
    first, second = (made(state) if kind == "closure" else partial(told, state=state) for state in states)
    model = nn.Linear(4, 3)

    def both(model: Any, batch: Any) -> Any:
        return first(model, batch) + second(model, batch)

    step = anybatch.TrainStep(model, both, torch.optim.SGD(model.parameters(), lr=0.1), micro_batch_size=8)
    step(batch_of())
    step(batch_of())
    states[1]["is_coupled"] = True
    with pytest.raises(anybatch.NotSplittable):
        step(batch_of())


def told(model: Any, batch: Any, state: dict[str, bool]) -> Any:
    return made(state)(model, batch)


@pytest.mark.parametrize("home", ["batch", "loss", "list"])
def test_a_setting_that_is_no_number_is_not_another_one_in_each_step(home: str) -> None:
    scheduled, model, proved = Scheduled(), nn.Linear(4, 3), set()
    step = anybatch.TrainStep(
        model, scheduled, torch.optim.SGD(model.parameters(), lr=0.1), micro_batch_size=10, broadcast=("margin",)
    )
    for _ in range(6):
        nan = float("nan")
        scheduled.number = [nan, 1.0] if home == "list" else nan if home == "loss" else 0  # type: ignore[attr-defined]
        proof = step(batch_of() | {"margin": nan if home == "batch" else 0.0}).proof
        assert proof is not None
        proved.add(proof.update)
    assert proved == {0}


def test_a_long_chain_of_functions_behind_a_partial_is_followed_to_a_depth_only() -> None:
    state, chain = {"is_coupled": False}, partial(abs, 1)
    for _ in range(3000):
        chain = partial(lambda before, value: before(value), chain)
    loss = partial(told, state=state)
    model = nn.Linear(4, 3)
    step = anybatch.TrainStep(
        model, partial(lambda _, *given: loss(*given), chain), torch.optim.SGD(model.parameters(), 0.1),
        micro_batch_size=8,
    )  # fmt: skip
    step(batch_of())
    state["is_coupled"] = True
    with pytest.raises(anybatch.NotSplittable):
        step(batch_of())


class Teacher:
    """An average that the first call makes, as it is kept in an attribute, in an entry of a dict or in a list."""

    def __init__(self, kind: str, moves: bool) -> None:
        self.kind, self.moves = kind, moves
        self.own: Any = {"dict": {"rate": 0.5}, "list": []}.get(kind)

    def made(self, model: nn.Module) -> Any:
        fresh = copy.deepcopy(model).requires_grad_(False)
        if self.kind == "attribute":
            self.own = self.own or fresh
        elif self.kind == "dict":
            return self.own.setdefault("teacher", fresh)
        elif self.kind == "list":
            self.own[:] = self.own or [fresh]
        return self.own[0] if self.kind == "list" else self.own

    def __call__(self, model: Any, batch: Any) -> Any:
        teacher = self.made(model)
        with torch.no_grad():
            for one, other in zip(teacher.parameters(), model.parameters(), strict=True):
                one.lerp_(other, 0.5 if self.moves else 0.0)
        return (model(batch["x"]) - teacher(batch["x"].flip(1)).detach()).square().mean()


@pytest.mark.parametrize("kind", ["attribute", "dict", "list"])
def test_an_average_that_the_first_call_makes_is_seen_in_the_second_step(kind: str) -> None:
    model = nn.Linear(4, 3)
    step = anybatch.TrainStep(
        model, Teacher(kind, moves=True), torch.optim.SGD(model.parameters(), lr=1.0), micro_batch_size=8
    )
    step(batch_of())
    with pytest.raises(anybatch.NotSplittable, match="writes to"):
        step(batch_of())


@pytest.mark.parametrize("kind", ["attribute", "dict", "list"])
def test_a_teacher_that_the_first_call_makes_and_nothing_moves_costs_one_more_proof(kind: str) -> None:
    model = nn.Linear(4, 3)
    step = anybatch.TrainStep(
        model, Teacher(kind, moves=False), torch.optim.SGD(model.parameters(), lr=1.0), micro_batch_size=8
    )
    assert [step(batch_of()).proof.update for _ in range(4)] == [0, 1, 1, 1]  # type: ignore[union-attr]


class Hiding(nn.Module):
    """A model with a teacher that is none of its parameters, since it is in a list."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.layer, self.rate = nn.Linear(4, 3), rate
        self.teacher = [nn.Linear(4, 3)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        teacher, out = self.teacher[0], self.layer(x)
        with torch.no_grad():
            teacher.weight.copy_((1 - self.rate) * teacher.weight + self.rate * self.layer.weight)
        loss: torch.Tensor = (out - teacher(x).detach()).square().mean()
        return loss


def test_a_module_in_a_list_of_the_model_is_in_float64_too_and_what_moves_it_is_named() -> None:
    def loss_of(model: Any, batch: Any) -> Any:
        return model(batch["x"])

    found = anybatch.check(Hiding(0.1), loss_of, batch_of())
    assert (found.tolerance, found.dtype) == (1e-9, "float64")
    assert "teacher[0].weight" in found.reasons[0].message
    assert anybatch.check(Hiding(0.0), loss_of, batch_of()).exact
