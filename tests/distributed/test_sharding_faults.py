"""What fails on one rank within a forward or a backward of a model in parts: nobody waits, nobody steps alone."""

import os
import signal
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import anybatch
from ranks_running import Case, assert_same_everywhere, everywhere, raised, run_cases
from reference import assert_bitwise, assert_float64, whole_gradients
from sharding_models import Wrap, gradients_of_whole, parts, runs_on_cpu, sharded, whole_weights
from test_ranks_exact import Net, batches_of, joined, mean_loss
from test_ranks_faults import Fault, back, faulty, nothing, shortage

pytestmark = runs_on_cpu

KEPT, SHARDED = sharded(reshards=False), sharded(reshards=True)
UNEQUAL = sharded(reshards=True, units=("first", "rare", "last"))  # of which some rows and some ranks skip one
BOTH = {"kept": KEPT, "sharded": SHARDED}


def out_of_memory(rank: int, world: int, *, place: str, number: int, wrap: Wrap, where: int = 1) -> None:
    """All start again, and end where ranks end that had begun with the smaller size."""
    batches = batches_of((7, 8))
    weights = []
    for size, fault in ((4, Fault(place, number, shortage()) if rank == where else nothing), (2, nothing)):
        model = wrap(Net())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        step = anybatch.TrainStep(model, faulty(fault), optimizer, micro_batch_size=size, clip_norm=1.0)
        torch.manual_seed(rank)
        out = step(batches[rank])
        assert len(out.attempts) == (2 if size == 4 else 1), out.attempts
        assert out.micro_batches == 4
        assert_same_everywhere([step.updates, step._limit.value, out.loss])
        weights.append(whole_weights(model))
    assert_bitwise(*weights)


def mean_loss_with(fault: Any) -> Any:
    """Draws nothing, so that it can be compared with one process."""

    def loss_fn(model: Any, batch: Any) -> torch.Tensor:
        fault("forward")
        out = back(model(batch["x"]), fault)
        loss: torch.Tensor = (out.sum(1) - batch["z"]).square().mean()
        return loss

    return loss_fn


def user_error(rank: int, world: int, *, place: str, number: int, wrap: Wrap) -> None:
    """It is raised as it is where it was, and told on the others; the next batch goes on."""
    fault = Fault(place, number, ValueError("a bad sample")) if rank == 1 else nothing
    model, batches = wrap(Net()), batches_of((7, 8))
    step = anybatch.TrainStep(
        model, mean_loss_with(fault), torch.optim.SGD(model.parameters(), lr=0.5), micro_batch_size=2
    )
    before = parts(model)
    error = raised(lambda: step(batches[rank]))
    assert "a bad sample" in str(error), error
    assert type(error) is ValueError if rank == 1 else isinstance(error, anybatch.AnyBatchError)
    assert parts(model) == before
    assert all(p.grad is None for p in model.parameters())
    alone = Net()
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.5)
    one = anybatch.TrainStep(alone, mean_loss, optimizer, group=False)
    step(batches[rank]), one(joined(batches))
    assert_float64(whole_weights(model), list(alone.parameters()), "the weights")


def does_not_fit(rank: int, world: int, *, wrap: Wrap) -> None:
    def loss_fn(model: Any, batch: Any) -> torch.Tensor:
        if rank == 1:
            model(batch["x"])
            raise shortage()
        return mean_loss(model, batch)

    model = wrap(Net())
    error = raised(lambda: anybatch.backward(model, loss_fn, batches_of((6, 5))[rank]))
    assert type(error) is anybatch.DoesNotFit, error
    assert "rank 1" in str(error)
    assert all(p.grad is None for p in model.parameters())


def random_faults(rank: int, world: int, *, wrap: Wrap) -> None:
    """Faults of both kinds at random places for 20 steps: the weights are those of one process."""
    generator = torch.Generator().manual_seed(3)

    def draw(most: int) -> int:
        return int(torch.randint(0, most, (), generator=generator))

    model, alone = wrap(Net()), Net()
    mine, its = (torch.optim.SGD(one.parameters(), lr=0.05) for one in (model, alone))
    current: list[Any] = [nothing]

    def of_this_step(place: str) -> None:
        current[0](place)

    loss_fn = mean_loss_with(of_this_step)
    step = anybatch.TrainStep(model, loss_fn, mine, micro_batch_size=4)
    one = anybatch.TrainStep(alone, mean_loss, its, group=False)
    for number in range(20):
        rows = [1 + draw(9) for _ in range(world)]
        place, micro_batch, is_shortage, victim = ("forward", "backward")[draw(2)], 1 + draw(4), draw(3) > 0, draw(3)
        error = shortage() if is_shortage else ValueError("a bad sample")
        current[0] = Fault(place, micro_batch, error) if rank == victim else nothing
        batches = batches_of(rows, seed=number)
        failure = raised(lambda batches=batches: step(batches[rank]))  # type: ignore[misc]
        assert len(set(everywhere(failure is None))) == 1, failure
        if failure is None:
            one(joined(batches))
        assert_float64(whole_weights(model), list(alone.parameters()), f"the weights after step {number}")
        if step._limit.value == 1:
            step._limit.value = 4
    assert (step.updates, step.samples) == (one.updates, one.samples)


def changes_gradients(rank: int, world: int, *, what: str, wrap: Wrap, where: Sequence[int] = (0, 1)) -> None:
    """A loss that zeroes or differentiates on its own, on some ranks, is refused on all of them, or changes nothing."""
    model, batches = wrap(Net()), batches_of((7, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)

    def loss_fn(model: Any, batch: Any) -> torch.Tensor:
        if what.startswith("zero_grad") and rank in where:
            optimizer.zero_grad(set_to_none=what == "zero_grad")
        batch = {**batch, "x": batch["x"].clone().requires_grad_(what == "slope")}
        loss: torch.Tensor = mean_loss_with(nothing)(model, batch)
        if what == "backward":
            loss.backward(retain_graph=True)
        if what == "slope":
            torch.autograd.grad(loss, batch["x"], retain_graph=True)
        return loss

    before = parts(model)
    step = anybatch.TrainStep(model, loss_fn, optimizer, micro_batch_size=2)
    error = raised(lambda: step(batches[rank]))
    if what == "slope" or (what != "backward" and wrap is KEPT):
        assert error is None, error
        alone = Net()
        one = anybatch.TrainStep(alone, mean_loss, torch.optim.SGD(alone.parameters(), lr=0.5), group=False)
        one(joined(batches))
        assert_float64(whole_weights(model), list(alone.parameters()), "the weights")
        return
    assert isinstance(error, anybatch.LossError if rank in where else anybatch.AnyBatchError), error
    assert ("called backward() itself" if what == "backward" else "cleared gradients") in str(error), error
    assert parts(model) == before
    assert all(p.grad is None for p in model.parameters())


def in_between(rank: int, world: int) -> None:
    """A rank runs out between two units, where the others have gathered one more already."""

    class Deep(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.first, self.last = torch.nn.Linear(4, 4), torch.nn.Linear(4, 3)
            self.double()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = self.first(x)
            fault("forward")
            out: torch.Tensor = self.last(hidden)
            return out

    for number in (1, 2):
        fault = Fault("forward", number, shortage()) if rank == 0 else nothing
        model, batches = sharded(reshards=True)(Deep()), batches_of((6, 6))
        out = anybatch.backward(model, mean_loss, batches[rank], micro_batch_size=4)
        assert len(out.attempts) == 2
        expected, _ = whole_gradients(Deep(), mean_loss, joined(batches))
        assert_float64(gradients_of_whole(model), expected)


def slow_rank(rank: int, world: int) -> None:
    def loss_fn(model: Any, batch: Any) -> torch.Tensor:
        time.sleep(0.2 * rank)
        return mean_loss(model, batch)

    model, batches = SHARDED(Net()), batches_of((6, 6))
    anybatch.backward(model, loss_fn, batches[rank], micro_batch_size=2)
    assert_float64(gradients_of_whole(model), whole_gradients(Net(), mean_loss, joined(batches))[0])


def killed(rank: int, world: int, *, wrap: Wrap) -> None:
    """A rank that dies within a forward ends the others with an error."""

    def loss_fn(model: Any, batch: Any) -> torch.Tensor:
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return mean_loss(model, batch)

    model = wrap(Net())
    start = time.monotonic()
    error = raised(lambda: anybatch.backward(model, loss_fn, batches_of((4, 4))[rank]))
    assert isinstance(error, anybatch.AnyBatchError), error
    assert "could not reach the others" in str(error)
    assert time.monotonic() - start < 35


CASES: Mapping[str, Case] = {
    **{
        f"{place} {number}, rank {where}, {name}": partial(
            out_of_memory, place=place, number=number, wrap=wrap, where=where
        )
        for name, wrap in BOTH.items()
        for place, number, where in (("forward", 1, 0), ("forward", 2, 1), ("backward", 1, 1), ("backward", 2, 0))
    },
    **{
        f"exception in {place} {number}, {name}": partial(user_error, place=place, number=number, wrap=wrap)
        for name, wrap in BOTH.items()
        for place, number in (("forward", 1), ("backward", 2), ("backward", 4))
    },
    **{f"DoesNotFit, {name}": partial(does_not_fit, wrap=wrap) for name, wrap in BOTH.items()},
    **{f"random faults, {name}": partial(random_faults, wrap=wrap) for name, wrap in BOTH.items()},
    **{
        f"{what} in the loss, {name}": partial(changes_gradients, what=what, wrap=wrap)
        for name, wrap in BOTH.items()
        for what in ("zero_grad", "zero_grad to zeros", "backward", "slope")
    },
    "random faults, a part that not all use": partial(random_faults, wrap=UNEQUAL),
    "zero_grad on one rank": partial(changes_gradients, what="zero_grad", wrap=SHARDED, where=(1,)),
    "between two units": in_between,
    "a slow rank": slow_rank,
}
KILLED: Mapping[str, Mapping[str, Case]] = {name: {"killed": partial(killed, wrap=wrap)} for name, wrap in BOTH.items()}
KILLED_KEPT, KILLED_SHARDED = KILLED["kept"], KILLED["sharded"]


@pytest.mark.parametrize("case", CASES)
def test_two_ranks(case: str, results: dict[str, str]) -> None:
    assert not results[case], results[case]


@pytest.mark.parametrize("cases", ["KILLED_KEPT", "KILLED_SHARDED"])
def test_a_rank_is_killed(cases: str, tmp_path: Path) -> None:
    text = run_cases("test_sharding_faults", 2, tmp_path, cases)["killed"]
    assert text.startswith("rank 1: did not end"), text
    assert "rank 0" not in text, text
