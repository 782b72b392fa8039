"""Buffers, parameters and random numbers of recomputed blocks are as after one forward."""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import anybatch
from anybatch.errors import AnyBatchError
from anybatch.memory.checkpointing import recompute
from optimizations_models import (
    Images,
    assert_same,
    image_loss,
    images,
    in_double,
    outcome,
    peak,
)
from optimizations_modules import Lucky, Stateful, square


def put(*names: str) -> Callable[[nn.Module], Any]:
    return lambda model: recompute(model, names)


class Spectral(nn.Module):
    """Both kinds of spectral normalisation: a vector that each forward in training mode goes on iterating."""

    def __init__(self) -> None:
        super().__init__()
        self.old = nn.Sequential(nn.utils.spectral_norm(nn.Linear(6, 6)), nn.Tanh())
        self.new = nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(6, 6)), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.new(self.old(self.new(self.old(x))))
        return y


@pytest.mark.parametrize("names", [["old", "new"], ["old.0", "new.0"], [""]], ids=str)
def test_a_forward_that_depends_on_a_buffer_it_changes(names: list[str]) -> None:
    model, batch = Spectral().double(), {"x": torch.randn(5, 6, dtype=torch.float64)}

    def loss_fn(model: Any, batch: Any) -> Tensor:
        loss: Tensor = model(batch["x"]).square().mean()
        return loss

    assert_same(outcome(model, loss_fn, batch, put(*names)), outcome(model, loss_fn, batch))


@pytest.mark.parametrize(
    ("how", "size"),
    [("in place", 20_000), ("replaced", 20_000), ("a view", 20_000), ("nothing", 20_000), ("data", 1000)],
)
def test_buffers_end_as_after_one_forward(how: str, size: int) -> None:
    model, batch = nn.Sequential(Stateful(how, size), Stateful(how, size)), {"x": torch.rand(3, 4)}
    for names in (["0", "1"], ["0:2"], ["", "1"]):
        assert_same(outcome(model, square, batch, put(*names), twice=True), outcome(model, square, batch, twice=True))


def test_the_buffer_itself_is_not_written_to_in_the_backward() -> None:
    model, x = Stateful("in place"), torch.rand(3, 4)
    with recompute(model, [""]):
        loss = model(x).square().mean()
        weight = torch.ones(20_000, requires_grad=True)
        other = (weight * model.level).sum()  # saves the buffer in the version that it has now
        before = model.level
        loss.backward()
        other.backward()
    assert model.level is before


def test_a_large_buffer_that_stays_is_not_kept() -> None:
    model = nn.Sequential(*(Stateful("nothing", 100_000) for _ in range(4)))
    batch = {"x": torch.rand(3, 4)}
    assert peak(model, square, batch, put("0", "1", "2", "3")) < 2 * 400_000


@pytest.mark.parametrize("what", ["buffer", "parameter", "replaced parameter"])
def test_state_that_changed_between_forward_and_backward_is_refused(what: str) -> None:
    model, x = Stateful("nothing"), torch.rand(3, 4)
    with recompute(nn.ModuleList([model]), ["0"]):
        loss = model(x).square().mean()
        if what == "replaced parameter":
            model.weight = nn.Parameter(torch.rand(4))
        with torch.no_grad():
            if what == "buffer":
                model.level.add_(1)
            elif what == "parameter":
                model.weight.add_(1)
        with pytest.raises(AnyBatchError, match=r"the block '0' can't be recomputed, because .* was changed"):
            loss.backward()


def test_a_forward_that_changes_a_parameter_is_refused() -> None:
    class Normalised(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            with torch.no_grad():
                self.weight.div_(self.weight.norm())
            return super().forward(input)

    model = nn.Sequential(Normalised(3, 3))
    with recompute(model, ["0"]), pytest.raises(AnyBatchError, match="'0' can't be recomputed, because a parameter"):
        model(torch.rand(2, 3))


@pytest.mark.parametrize("how", ["torch", "python", "numpy", "all", "dropout"])
def test_random_numbers_are_drawn_again(how: str) -> None:
    model, batch = nn.Sequential(Lucky(how), Lucky(how)), {"x": torch.rand(3, 4)}
    states = []
    for chosen in (put("0", "1"), put("0:2"), None):
        random.seed(5), np.random.seed(5)
        np.random.randn()  # the next normal number is there already
        found = outcome(model, square, batch, chosen, twice=True)
        states.append(found | {"drawn": torch.tensor([random.random(), np.random.rand()])})
    assert_same(states[0], states[2])
    assert_same(states[1], states[2])


def test_numpy_is_seen_even_where_earlier_calls_did_not_draw() -> None:
    class Late(Lucky):
        def forward(self, x: Tensor) -> Tensor:
            self.how = "numpy" if x.shape[0] == 3 else "nothing"
            return super().forward(x)

    found = []
    for names in ([], ["0"]):
        np.random.seed(5)
        torch.manual_seed(1)
        model = nn.Sequential(Late("nothing"))
        with recompute(model, names):
            for rows in (2, 3):
                model(torch.ones(rows, 4)).square().mean().backward()
        found.append({n: p.grad for n, p in model.named_parameters()} | {"drawn": torch.tensor(np.random.rand())})
    assert_same(found[1], found[0])


@pytest.mark.parametrize(
    "names",
    [
        ["stem", "body", "tail"],
        ["body"],
        ["stem.0:2", "body.0:3"],
        ["stem.1", "body.1", "tail.1"],
        ["", "body", "tail"],
    ],
    ids=str,
)
@pytest.mark.parametrize("twice", [False, True])
def test_batch_norm_is_updated_once(names: list[str], twice: bool) -> None:
    model, batch = Images(), images()
    assert_same(
        outcome(model, image_loss, batch, put(*names), twice=twice), outcome(model, image_loss, batch, twice=twice)
    )


@pytest.mark.parametrize("policy", ["refuse", "ghost", "frozen"])
@pytest.mark.parametrize("names", [["stem", "body", "tail"], ["stem.1", "body.1", "tail.1"], [""]], ids=str)
def test_batch_norm_under_a_step(policy: Any, names: list[str]) -> None:
    size = None if policy == "refuse" else 4
    batch = images()
    found = []
    for chosen in ([], names):
        torch.manual_seed(3)
        model = Images()
        step = anybatch.TrainStep(
            model, image_loss, torch.optim.SGD(model.parameters(), lr=0.1), micro_batch_size=size, batch_norm=policy
        )
        for _ in range(2):
            with recompute(model, chosen):
                step(batch)
        found.append({"loss": torch.rand(1), **{n: t.clone() for n, t in model.state_dict().items()}})
    assert_same(found[1], found[0])


def test_batch_norm_that_runs_again_after_its_first_backward() -> None:
    def two(model: Any, batch: Any) -> Any:
        yield "one", F.cross_entropy(model(batch["x"]), batch["y"])
        yield "other", F.cross_entropy(model(batch["x"] * 2), batch["y"])

    found = []
    for names in ([], ["tail", "stem.0:2"]):
        torch.manual_seed(3)
        model = Images()
        with recompute(model, names):
            anybatch.backward(model, two, images())
        found.append(dict(model.named_buffers()))
    assert_same(found[1], found[0])


def test_a_whole_batch_norm_is_exact_in_double() -> None:
    model, batch = Images().double(), in_double(images())
    assert_same(outcome(model, image_loss, batch, put("stem", "body.0:3")), outcome(model, image_loss, batch))
