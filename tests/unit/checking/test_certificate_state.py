"""State that a loss keeps in Python: named where the gradient depends on it, and put back in any case."""

import collections
import itertools
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import anybatch
from anybatch import check
from anybatch.tensors.sideeffects import SideEffects

Batch = dict[str, Any]
Case = tuple[nn.Module, Callable[[Any, Any], Any], Callable[[], Any]]  # and what is as before afterwards

CALLS = 0
REGISTRY: dict[str, int] = {"calls": 0}


def vectors() -> Batch:
    generator = torch.Generator().manual_seed(0)
    return {"x": torch.randn(12, 4, generator=generator), "y": torch.arange(12) % 3}


def cross_entropy(model: Any, batch: Batch) -> torch.Tensor:
    return F.cross_entropy(model(batch["x"]), batch["y"])


def warmed(loss: torch.Tensor, calls: float) -> torch.Tensor:
    return loss * min(1.0, calls / 10)


class Warmup(nn.Module):
    def __init__(self, calls: int = 0) -> None:
        super().__init__()
        self.head = nn.Linear(4, 3)
        self.calls = calls

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return warmed(self.head(x), self.calls)


class Schedule:
    calls = 0

    def __init__(self) -> None:
        self.steps = 0

    def __call__(self, model: Any, batch: Batch) -> torch.Tensor:
        self.steps += 1
        return warmed(cross_entropy(model, batch), self.steps)

    def of_class(self, model: Any, batch: Batch) -> torch.Tensor:
        Schedule.calls += 1
        return warmed(cross_entropy(model, batch), Schedule.calls)


class Slotted:
    __slots__ = ("calls",)

    def __init__(self) -> None:
        self.calls = 0


def of_attribute() -> Case:
    model = Warmup()
    return model, cross_entropy, lambda: model.calls


def of_submodule() -> Case:
    model = Warmup()
    return nn.Sequential(nn.Tanh(), model), cross_entropy, lambda: model.calls


def of_object() -> Case:
    schedule = Schedule()
    return nn.Linear(4, 3), schedule, lambda: schedule.steps


def of_class() -> Case:
    return nn.Linear(4, 3), Schedule().of_class, lambda: Schedule.calls


def of_variable() -> Case:
    calls = 0

    def loss_fn(model: Any, batch: Batch) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return warmed(cross_entropy(model, batch), calls)

    return nn.Linear(4, 3), loss_fn, lambda: calls


def of_container(container: Any, key: Any) -> Case:
    def loss_fn(model: Any, batch: Batch) -> torch.Tensor:
        container[key] += 1
        return warmed(cross_entropy(model, batch), container[key])

    return nn.Linear(4, 3), loss_fn, lambda: container[key]


def of_holder(holder: Any) -> Case:
    def loss_fn(model: Any, batch: Batch) -> torch.Tensor:
        holder.calls += 1
        return warmed(cross_entropy(model, batch), holder.calls)

    return nn.Linear(4, 3), loss_fn, lambda: holder.calls


def of_global() -> Case:
    def loss_fn(model: Any, batch: Batch) -> torch.Tensor:
        global CALLS
        CALLS += 1
        return warmed(cross_entropy(model, batch), CALLS)

    return nn.Linear(4, 3), loss_fn, lambda: CALLS


def of_function_called() -> Case:
    def beta() -> int:
        REGISTRY["calls"] += 1
        return REGISTRY["calls"]

    return nn.Linear(4, 3), lambda model, batch: warmed(cross_entropy(model, batch), beta()), lambda: REGISTRY["calls"]


def of_default() -> Case:
    def loss_fn(model: Any, batch: Batch, cache: dict[str, int] = {"calls": 0}) -> torch.Tensor:  # noqa: B006
        cache["calls"] += 1
        return warmed(cross_entropy(model, batch), cache["calls"])

    return nn.Linear(4, 3), loss_fn, lambda: (loss_fn.__defaults__ or ())[0]["calls"]


def of_function_attribute() -> Case:
    def loss_fn(model: Any, batch: Batch) -> torch.Tensor:
        state.calls += 1
        return warmed(cross_entropy(model, batch), state.calls)

    state: Any = loss_fn
    state.calls = 0
    return nn.Linear(4, 3), loss_fn, lambda: state.calls


def of_coupled() -> Case:
    calls = [0]

    def encode(model: Any, batch: Batch) -> torch.Tensor:
        calls[0] += 1
        return warmed(model(batch["x"]), calls[0])

    return nn.Linear(4, 3), anybatch.Coupled(encode, lambda m, out: out.square().mean()), lambda: calls[0]


def of_generator() -> Case:
    calls = [0]

    def loss_fn(model: Any, batch: Batch) -> Any:
        calls[0] += 1
        yield "loss", warmed(cross_entropy(model, batch), calls[0])

    return nn.Linear(4, 3), loss_fn, lambda: calls[0]


COUNTERS: dict[str, tuple[Callable[[], Case], str]] = {
    "an attribute": (of_attribute, "self.calls"),
    "an attribute of a submodule": (of_submodule, "self.calls"),
    "an object that is the loss": (of_object, "self.steps"),
    "a class": (of_class, "Schedule.calls"),
    "a variable": (of_variable, "calls"),
    "a list": (lambda: of_container([0], 0), "container[0]"),
    "a dictionary": (lambda: of_container({"n": 0}, "n"), "container['n']"),
    "a Counter": (lambda: of_container(collections.Counter(n=0), "n"), "container['n']"),
    "a namespace": (lambda: of_holder(SimpleNamespace(calls=0)), "self.calls"),
    "an object with slots": (lambda: of_holder(Slotted()), "self.calls"),
    "an array": (lambda: of_container(np.zeros(1), 0), "container"),
    "a tensor": (lambda: of_container(torch.zeros(1), 0), "container"),
    "a global": (of_global, "CALLS"),
    "a function that is called": (of_function_called, "REGISTRY['calls']"),
    "a default": (of_default, "cache['calls']"),
    "an attribute of the function": (of_function_attribute, "loss_fn.calls"),
    "the encode of a coupled loss": (of_coupled, "calls[0]"),
    "a generator of losses": (of_generator, "calls[0]"),
}


@pytest.mark.parametrize("kind", COUNTERS)
def test_what_a_loss_counts_is_named_and_put_back(kind: str) -> None:
    make, code = COUNTERS[kind]
    model, loss_fn, state = make()
    before = float(state())
    certificate = check(model, loss_fn, vectors())
    assert [(reason.code, reason.where) for reason in certificate.reasons] == [("state", code)], certificate
    assert certificate.error > 0.01
    assert float(state()) == before
    assert {note.code for note in certificate.notes} <= {"lower-precision"}


@pytest.mark.parametrize("kind", [kind for kind in COUNTERS if "coupled" not in kind])
def test_a_step_names_it_before_it_splits_and_leaves_it_as_it_was(kind: str) -> None:
    make, code = COUNTERS[kind]
    model, loss_fn, state = make()
    before = float(state())
    with pytest.raises(anybatch.NotSplittable) as error:
        anybatch.backward(model, loss_fn, vectors(), micro_batch_size=4)
    assert f"`{code}`" in str(error.value)
    assert float(state()) == before


def test_how_often_it_was_counted_is_said_with_the_class_it_belongs_to() -> None:
    (reason,) = check(Warmup(), cross_entropy, vectors()).reasons
    assert "`self.calls` of Warmup was counted 3 times in one step of 3 micro-batches" in reason.message


def logged() -> Case:
    history: list[float] = []
    seen = {"calls": 0}

    def loss_fn(model: Any, batch: Batch) -> torch.Tensor:
        loss = cross_entropy(model, batch)
        history.append(float(loss.detach()))
        seen["calls"] += 1
        if seen["calls"] % 100 == 0:
            history.clear()
        return loss

    return nn.Linear(4, 3), loss_fn, lambda: (list(history), dict(seen))


def cached() -> Case:
    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(4, 3)
            self.length = 0
            self.table: torch.Tensor | None = None
            self.by_shape: dict[Any, torch.Tensor] = {}

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.table is None or self.length < len(x):
                self.length = len(x)
                self.table = torch.arange(4, dtype=x.dtype).cos()
            bias = self.by_shape.setdefault(x.shape[1:], torch.ones(4, dtype=x.dtype))
            result: torch.Tensor = self.head(x * self.table + bias)
            return result

    model = Table()
    return model, cross_entropy, lambda: (model.length, model.table, dict(model.by_shape))


@pytest.mark.parametrize("make", [logged, cached])
def test_what_makes_no_difference_is_not_blamed(make: Callable[[], Case]) -> None:
    model, loss_fn, state = make()
    before = state()
    certificate = check(model, loss_fn, vectors())
    assert certificate.exact
    assert not certificate.notes
    assert state() == before


def test_a_warm_up_that_is_over_is_a_note_for_it_matters_at_another_value() -> None:
    certificate = check(Warmup(calls=50), cross_entropy, vectors())
    assert certificate.exact
    assert [(note.code, note.where) for note in certificate.notes] == [("state", "self.calls")]


def test_beside_another_fault_the_state_is_named_too() -> None:
    calls = [0]

    def summed(model: Any, batch: Batch) -> torch.Tensor:
        calls[0] += 1
        return warmed(F.cross_entropy(model(batch["x"]), batch["y"], reduction="sum"), calls[0])

    assert [reason.code for reason in check(nn.Linear(4, 3), summed, vectors()).reasons] == ["sum", "state"]


def carried_by_hand() -> tuple[list[torch.Tensor], Callable[[Any, Any], Any]]:
    hidden = [torch.zeros(12, 3)]

    def loss_fn(model: Any, batch: Batch) -> torch.Tensor:
        hidden[0] = torch.tanh(model(batch["x"]) + hidden[0][: len(batch["x"])])
        return hidden[0].mean()

    return hidden, loss_fn


def test_a_hidden_state_that_is_kept_outside_of_the_loss_is_named() -> None:
    hidden, loss_fn = carried_by_hand()
    before = hidden[0]
    certificate = check(nn.Linear(4, 3), loss_fn, vectors())
    assert [(reason.code, reason.where) for reason in certificate.reasons] == [("state", "hidden[0]")]
    assert hidden[0] is before


def test_a_counter_that_nobody_can_put_back_is_named_and_is_no_random_number() -> None:
    calls = itertools.count(1)
    certificate = check(nn.Linear(4, 3), lambda m, b: warmed(cross_entropy(m, b), next(calls) / 50), vectors())
    assert [(reason.code, reason.where) for reason in certificate.reasons] == [("state", "calls")]


def test_what_is_drawn_by_a_generator_of_its_own_is_random_and_no_state() -> None:
    for draw in (random.Random(0).random, np.random.default_rng(0).random):

        def scaled(model: Any, batch: Batch, draw: Any = draw) -> Any:
            return cross_entropy(model, batch) * draw()

        certificate = check(nn.Linear(4, 3), scaled, vectors())
        assert certificate.exact
        assert [note.code for note in certificate.notes] == ["random"]
    generator = np.random.default_rng(0)
    state = str(generator.bit_generator.state)

    def loss_fn(model: Any, batch: Batch) -> torch.Tensor:
        return cross_entropy(
            model, {**batch, "x": batch["x"] + torch.from_numpy(generator.random((len(batch["x"]), 1)))}
        )

    assert [reason.code for reason in check(nn.Linear(4, 3), loss_fn, vectors()).reasons] == ["random"]
    assert str(generator.bit_generator.state) == state


def test_side_effects_of_a_run_that_nothing_else_follows_are_found_and_undone() -> None:
    model = Warmup()
    model.history = collections.deque([1.0], maxlen=3)  # type: ignore[assignment]
    model.best = {"loss": float("nan")}  # type: ignore[assignment]
    model.seen = {1, 2}  # type: ignore[assignment]
    kept: Any = model
    deque, mapping, seen = kept.history, kept.best, kept.seen
    effects = SideEffects([model, cross_entropy])
    model(torch.zeros(2, 4))
    deque.append(2.0)
    mapping["loss"], mapping["new"] = 1.0, 2.0
    seen.add(3)
    kept.late, kept.history = "late", None
    names = {effect.place.code for effect in effects.found()}
    assert {"self.calls", "self.history", "self.best['loss']", "self.best['new']", "self.seen", "self.late"} <= names
    effects.restore()
    assert effects.found() == []
    assert (model.calls, list(deque), seen, hasattr(model, "late")) == (0, [1.0], {1, 2}, False)
    assert list(mapping) == ["loss"]
    assert kept.history is deque


class Adversarial:
    """A loss that trains a critic of its own."""

    def __init__(self, kind: Callable[..., torch.optim.Optimizer]) -> None:
        self.critic = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        self.optimizer = kind(self.critic.parameters(), lr=0.05)

    def __call__(self, model: Any, batch: Any) -> Any:
        made = model(batch["x"])
        self.optimizer.zero_grad()
        (self.critic(made.detach()).mean() - self.critic(batch["x"]).mean()).backward()
        self.optimizer.step()
        return -self.critic(made).mean()


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam])
def test_a_loss_that_trains_a_net_itself_gets_a_certificate_with_the_cause(kind: Any) -> None:
    torch.manual_seed(0)
    model, loss_fn, batch = nn.Linear(4, 4), Adversarial(kind), {"x": torch.randn(12, 4)}
    nets = [*model.parameters(), *loss_fn.critic.parameters()]
    before = [one.detach().clone() for one in nets]
    certificate = anybatch.check(model, loss_fn, batch, micro_batch_size=4)
    assert not certificate.exact
    assert certificate.reasons[0].code == "weight"
    assert "itself trains another network" in certificate.reasons[0].message
    assert all(map(torch.equal, before, nets))
    assert all(one.grad is None for one in nets)
    assert not loss_fn.optimizer.state


def test_a_carried_state_is_left_alone_and_makes_no_difference() -> None:
    def chunk_loss(model: Any, chunk: Any, state: Any) -> Any:
        output, new = model(chunk["x"], state)
        return output.square().mean(), new

    torch.manual_seed(0)
    model, batch = nn.GRU(3, 4, batch_first=True), {"x": torch.randn(6, 4, 3)}
    start = lambda model, batch: torch.zeros(1, len(batch["x"]), 4)  # noqa: E731
    loss_fn = anybatch.OverTime(chunk_loss, start, chunk=2, carry=True)
    anybatch.backward(model, loss_fn, batch)
    before = loss_fn.carried
    assert before is not None
    assert anybatch.check(model, loss_fn, batch).exact
    assert loss_fn.carried is before


class ByItsAverage(nn.Module):
    """Divides a loss by its own average, which it moves before or not at all."""

    def __init__(self, moves: bool) -> None:
        super().__init__()
        self.head, self.moves, self.average = nn.Linear(4, 3), moves, nn.Buffer(torch.ones(()))

    def forward(self, batch: Batch) -> torch.Tensor:
        loss = F.cross_entropy(self.head(batch["x"]), batch["y"])
        if self.moves:
            with torch.no_grad():
                self.average.lerp_(loss.detach(), 0.1)
        return loss / self.average


def test_an_average_of_the_loss_that_it_moves_is_told_as_a_buffer_before_any_count() -> None:
    certificate = check(ByItsAverage(moves=True), lambda model, batch: model(batch), vectors())
    assert (certificate.reasons[0].code, certificate.reasons[0].where) == ("buffer", "average")
    assert check(ByItsAverage(moves=False), lambda model, batch: model(batch), vectors()).exact


def test_a_buffer_that_is_moved_and_not_read_is_not_blamed_for_a_count_that_nobody_knows() -> None:
    model = nn.ModuleDict({"head": nn.Linear(4, 3), "seen": nn.BatchNorm1d(4)})

    def loss_fn(model: Any, batch: Batch) -> torch.Tensor:
        model["seen"].num_batches_tracked.add_(1)
        losses = F.cross_entropy(model["head"](batch["x"]), batch["y"], reduction="none")
        weights: torch.Tensor = batch["x"][:, 0].exp()
        found: torch.Tensor = (losses * weights).sum() / weights.sum()
        return found

    reason = check(model, loss_fn, vectors()).reasons[0]
    assert (reason.code, reason.where) == ("count", "loss")
