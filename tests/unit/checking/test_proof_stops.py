"""Losses that may not be split are stopped at the first batch that would be, whatever they are written with.

Each case is one line of the table in docs/exactness.md. What would be wrong in silence: a split whose gradient is not
the whole batch's; a loss that is stopped but has moved something by then; a cause that does not belong to the case.
"""

import contextlib
import copy
import random
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import anybatch
from diagonals import diagonals

ROWS = 12


class Case(NamedTuple):
    """A step that may not be split, and words of the cause that is to be named."""

    model: nn.Module
    loss_fn: Callable[[Any, Any], Any]
    batch: Any
    cause: str = ""
    options: Mapping[str, Any] = {}
    state: Callable[[], Any] = lambda: None


@pytest.fixture(autouse=True)
def _seeded() -> None:
    random.seed(0)
    torch.manual_seed(0)


def net(inputs: int = 6, outputs: int = 3) -> nn.Module:
    return nn.Sequential(nn.Linear(inputs, 16), nn.Tanh(), nn.Linear(16, outputs))


def rows(classes: int = 3) -> dict[str, torch.Tensor]:
    return {"x": torch.randn(ROWS, 6), "y": torch.randint(classes, (ROWS,))}


def plain(model: Any, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch["x"]), batch["y"])


def contrastive() -> Case:
    def loss_fn(model: Any, batch: Any) -> torch.Tensor:
        a, b = F.normalize(model(batch["x"]), dim=1), F.normalize(model(batch["z"]), dim=1)
        return F.cross_entropy(a @ b.T / 0.1, torch.arange(len(a)))

    return Case(net(), loss_fn, {"x": torch.randn(ROWS, 6), "z": torch.randn(ROWS, 6)}, "does not add up")


def summed() -> Case:
    return Case(net(), lambda m, b: F.cross_entropy(m(b["x"]), b["y"], reduction="sum"), rows(), "a sum over")


def weighted() -> Case:
    weight = torch.tensor([1.0, 2.0, 6.0])
    return Case(net(), lambda m, b: F.cross_entropy(m(b["x"]), b["y"], weight=weight), rows(), "class weights")


def tokens(count: Any = anybatch.count_samples, shift: int = 0) -> Case:
    labels = torch.randint(5, (ROWS, 30))
    for row in range(ROWS):
        labels[row, 2 + 2 * row :] = -100

    def loss_fn(model: Any, batch: Any) -> torch.Tensor:
        logits = model(batch["x"])[:, : 30 - shift]
        return F.cross_entropy(logits.flatten(0, 1), batch["labels"][:, shift:].flatten())

    batch = {"x": torch.randn(ROWS, 30, 6), "labels": labels}
    return Case(net(6, 5), loss_fn, batch, "averaged over", {"count": count})


def unshifted() -> Case:
    return tokens(anybatch.count_tokens("labels"), shift=1)


def tuple_of_samples() -> Case:
    batch = (tuple(torch.randn(9, 6) for _ in range(4)), tuple(torch.randint(3, (9,)) for _ in range(4)))

    def loss_fn(model: Any, batch: Any) -> torch.Tensor:
        found = [F.cross_entropy(model(x.cumsum(0)), y) for x, y in zip(*batch, strict=True)]
        return torch.stack(found).mean()

    return Case(net(), loss_fn, batch)


class TimeFirst(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.head = nn.LSTM(4, 6), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.rnn(x)[0])  # type: ignore[no-any-return]


class TimeFirstAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.head = nn.MultiheadAttention(4, 2), nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.attention(x, x, x)[0])  # type: ignore[no-any-return]


def time_first(kind: type[nn.Module]) -> Case:
    batch = {"x": torch.randn(ROWS, 5, 4), "y": torch.randint(3, (ROWS, 5))}
    return Case(
        kind(), lambda m, b: F.cross_entropy(m(b["x"]).flatten(0, 1), b["y"].flatten()), batch, "batch_first=False"
    )


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(6, 4)
        self.experts = nn.ModuleList(nn.Linear(6, 3) for _ in range(4))


def top_one_experts() -> Case:
    def loss_fn(model: Any, batch: Any) -> torch.Tensor:
        score, chosen = model.gate(batch["x"]).softmax(-1).max(-1)
        total = torch.zeros(())
        for number, expert in enumerate(model.experts):
            own = chosen == number
            if own.any():  # a mean over the samples of each expert
                losses = F.cross_entropy(expert(batch["x"][own]), batch["y"][own], reduction="none")
                total = total + (losses * score[own]).mean()
        return total

    return Case(Experts(), loss_fn, rows())


def missing_labels() -> Case:
    two = nn.ModuleDict({"a": nn.Linear(6, 3), "b": nn.Linear(6, 3)})
    batch = {"x": torch.randn(ROWS, 6), "a": torch.randint(3, (ROWS,)), "b": torch.full((ROWS,), -100)}
    batch["b"][[2, 7, 9]] = torch.tensor([0, 2, 1])

    def loss_fn(model: Any, batch: Any) -> torch.Tensor:
        has = batch["b"] >= 0
        loss = F.cross_entropy(model["a"](batch["x"]), batch["a"])
        return loss + F.cross_entropy(model["b"](batch["x"][has]), batch["b"][has]) if has.any() else loss

    return Case(two, loss_fn, batch)


class Warmup(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net, self.steps = net(), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.steps += 1
        return self.net(x) * min(1.0, self.steps / 10)  # type: ignore[no-any-return]


def counter_in_the_model() -> Case:
    model = Warmup()
    return Case(model, plain, rows(), state=lambda: model.steps)


STEPS = {"done": 0}


def counter_in_a_global() -> Case:
    STEPS["done"] = 0

    def loss_fn(model: Any, batch: Any) -> torch.Tensor:
        STEPS["done"] += 1
        return plain(model, batch) * min(1.0, STEPS["done"] / 10)

    return Case(net(), loss_fn, rows(), state=lambda: dict(STEPS))


def counter_in_a_closure() -> Case:
    steps = 0

    def loss_fn(model: Any, batch: Any) -> torch.Tensor:
        nonlocal steps
        steps += 1
        return plain(model, batch) * min(1.0, steps / 10)

    return Case(net(), loss_fn, rows(), state=lambda: steps)


class Centre(nn.Module):
    centre: torch.Tensor

    def __init__(self, *, in_place: bool) -> None:
        super().__init__()
        self.register_buffer("centre", torch.zeros(3))
        self.in_place = in_place

    def forward(self, z: torch.Tensor) -> torch.Tensor:
        loss = (z - self.centre).square().mean()
        moved = 0.5 * self.centre + 0.5 * z.detach().mean(0)
        if self.in_place:
            self.centre.copy_(moved)
        else:
            self.centre = moved
        return loss


def centre(in_place: bool) -> Case:
    criterion = Centre(in_place=in_place)
    return Case(net(), lambda m, b: criterion(m(b["x"])), rows(), "centre", state=lambda: 1 * criterion.centre)


def queue() -> Case:
    held: deque[torch.Tensor] = deque([torch.randn(4, 3)], maxlen=2)

    def loss_fn(model: Any, batch: Any) -> torch.Tensor:
        z = model(batch["x"])
        loss = (z @ torch.cat([*held]).T).logsumexp(1).mean()
        held.append(z.detach())
        return loss  # type: ignore[no-any-return]

    return Case(net(), loss_fn, rows(), state=lambda: [one.clone() for one in held])


def boxes() -> Case:
    samples = [
        {"image": torch.randn(6), "boxes": torch.randn(1 + row % 4, 3)} for row in range(ROWS)
    ]  # a mean over all boxes, of which samples have unlike numbers

    def loss_fn(model: Any, batch: Any) -> torch.Tensor:
        found = [(model(one["image"]) - one["boxes"]).square().sum(1) for one in batch]
        return torch.cat(found).mean()

    return Case(net(), loss_fn, samples, options={"collate": list})


def state_outside() -> Case:
    cell = nn.GRUCell(6, 6)
    hidden: list[Any] = [None]

    def loss_fn(model: Any, batch: Any) -> torch.Tensor:
        before = hidden[0]
        if before is None or len(before) != len(batch["x"]):
            before = torch.zeros(len(batch["x"]), 6) if before is None else before[:1].expand(len(batch["x"]), -1)
        hidden[0] = model(batch["x"], before).detach()
        return model(batch["x"], before).square().mean()  # type: ignore[no-any-return]

    return Case(cell, loss_fn, rows(), state=lambda: hidden[0])


def clamped() -> Case:
    model = net()
    for parameter in model.parameters():
        parameter.register_hook(lambda gradient: gradient.clamp(-0.001, 0.001))
    return Case(model, plain, rows(), "hook")


CASES: dict[str, Callable[[], Case]] = {
    "contrastive": contrastive, "summed": summed, "class weights": weighted, "tokens": tokens,
    "tokens without a shift": unshifted, "tuple of samples": tuple_of_samples,
    "time-first LSTM": lambda: time_first(TimeFirst), "time-first attention": lambda: time_first(TimeFirstAttention),
    "top-1 experts": top_one_experts, "missing labels": missing_labels, "counter in the model": counter_in_the_model,
    "counter in a global": counter_in_a_global, "counter in a closure": counter_in_a_closure,
    "centre, written to": lambda: centre(True), "centre, replaced": lambda: centre(False), "queue": queue,
    "boxes in lists of dicts": boxes, "state kept outside": state_outside, "clamped gradients": clamped,
}  # fmt: skip


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> Case:
    return CASES[request.param]()


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


@pytest.mark.parametrize(("case", "size"), diagonals([*CASES], [2, 4, 5]), indirect=["case"])
def test_a_step_stops_before_anything_is_changed(case: Case, size: int) -> None:
    optimizer = torch.optim.SGD(case.model.parameters(), lr=0.1)
    step = anybatch.TrainStep(case.model, case.loss_fn, optimizer, micro_batch_size=size, **case.options)
    weights, state = copy.deepcopy(case.model.state_dict()), case.state()
    drawn = torch.get_rng_state(), random.getstate()
    for _ in range(2):  # and again if it is tried again
        with pytest.raises((anybatch.NotSplittable, anybatch.BatchError)) as caught:
            step(case.batch)
        assert case.cause in str(caught.value)
    assert all(torch.equal(value, weights[name]) for name, value in case.model.state_dict().items())
    assert same(case.state(), state)
    assert torch.equal(torch.get_rng_state(), drawn[0])
    assert random.getstate() == drawn[1]
    assert step.updates == 0
    assert all(parameter.grad is None for parameter in case.model.parameters())


def test_backward_stops_and_leaves_the_gradient_that_was_there(case: Case) -> None:
    for parameter in case.model.parameters():
        parameter.grad = torch.ones_like(parameter)
    state = case.state()
    with pytest.raises((anybatch.NotSplittable, anybatch.BatchError)):
        anybatch.backward(case.model, case.loss_fn, case.batch, micro_batch_size=4, **case.options)
    assert all(bool((parameter.grad == 1).all()) for parameter in case.model.parameters() if parameter.grad is not None)
    assert same(case.state(), state)


def test_the_whole_batch_is_not_looked_at(case: Case) -> None:
    with contextlib.suppress(anybatch.BatchError):  # of samples in tuples, whose layout has to be said in any case
        assert anybatch.backward(case.model, case.loss_fn, case.batch, **case.options).proof is None
