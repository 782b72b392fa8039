"""A rank that dies or hangs in any phase of a step ends the others with an error, and nobody steps alone."""

import os
import signal
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import anybatch
from coupled_losses import Towers, clip, samples, towers
from ranks_forking import run_forked
from ranks_running import hashed, raised
from test_ranks_exact import Net, batches_of
from test_ranks_faults import faulty, nothing

TIMEOUT = 4.0
VICTIM = 1


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def hang() -> None:
    time.sleep(3)


class At:
    """Does something at a place of a micro-batch, counted from 1."""

    def __init__(self, place: str, number: int, deed: Callable[[], None]) -> None:
        self.place, self.number, self.deed, self.seen = place, number, deed, 0

    def __call__(self, place: str) -> None:
        self.seen += place == self.place
        if place == self.place and self.seen == self.number:
            self.deed()


class Dying(torch.optim.SGD):
    """Does something within its step."""

    deed: Callable[[], None] = staticmethod(lambda: None)

    def step(self, closure: Any = None) -> Any:
        self.deed()
        return super().step(closure)


def in_a_step(rank: int, world: int, *, place: str, number: int = 1, deed: Callable[[], None] = die) -> None:
    """The survivor's second step fails with an error, in time, and leaves weights and counters as they were."""
    fault = At(place, number, deed) if rank == VICTIM else nothing
    current: list[Any] = [nothing]
    model = Net()
    optimizer = Dying(model.parameters(), lr=0.1)

    def at(place: str) -> None:
        current[0](place)

    step = anybatch.TrainStep(DistributedDataParallel(model), faulty(at), optimizer, micro_batch_size=2)
    batch = batches_of((5, 6))[rank]
    step(batch)
    before = hashed(model.parameters())
    current[0] = fault
    usual = dist.all_reduce
    if rank == VICTIM and place == "before":
        deed()
    if rank == VICTIM and place == "all-reduce":

        def all_reduce(*arguments: Any, **options: Any) -> Any:
            deed()
            return usual(*arguments, **options)

        dist.all_reduce = all_reduce
    if rank == VICTIM and place == "optimizer":
        optimizer.deed = deed
    start = time.monotonic()
    if place == "optimizer":  # all had the gradient before, so the survivor applies it, and hears of it next
        step(batch)
        before = hashed(model.parameters())
    error = raised(lambda: step(batch))
    assert isinstance(error, anybatch.AnyBatchError), error
    assert "could not reach the others" in str(error)
    assert time.monotonic() - start < TIMEOUT + 10
    assert hashed(model.parameters()) == before
    assert step.updates == 1 + (place == "optimizer")


def in_the_proof(rank: int, world: int, *, number: int) -> None:
    """The survivor's first step, which is proved before it is split, fails with an error, and nothing is changed."""
    at = At("forward", number, die) if rank == VICTIM else nothing
    model = Net()
    step = anybatch.TrainStep(DistributedDataParallel(model), faulty(at), Dying(model.parameters()), micro_batch_size=2)
    before, start = hashed(model.parameters()), time.monotonic()
    error = raised(lambda: step(batches_of((5, 6))[rank]))
    assert isinstance(error, anybatch.AnyBatchError), error
    assert "could not reach the others" in str(error)
    assert time.monotonic() - start < TIMEOUT + 10
    assert hashed(model.parameters()) == before
    assert step.updates == 0


def in_a_coupled_loss(rank: int, world: int) -> None:
    """Also where the others wait for the gradient of their outputs."""

    def loss(model: Any, outputs: Any) -> Any:
        die()  # rank 0 computes it
        return clip(model, outputs)

    error = raised(lambda: anybatch.backward(Towers(), anybatch.Coupled(towers, loss), samples(4, rank), verify="off"))
    assert "could not reach the others" in str(error), error


PLACES = {
    "before the step": {"place": "before"},
    "forward": {"place": "forward", "number": 2},
    "backward": {"place": "backward", "number": 1},
    "last backward": {"place": "backward", "number": 3},
    "all-reduce": {"place": "all-reduce"},
    "optimizer step": {"place": "optimizer"},
}
CASES: dict[str, Callable[[int, int], None]] = {name: partial(in_a_step, **at) for name, at in PLACES.items()}  # type: ignore[arg-type]
CASES |= {f"forward {number} of the proof": partial(in_the_proof, number=number) for number in (1, 2, 3)}
HANGING: Mapping[str, Callable[[int, int], None]] = {
    "forward": partial(in_a_step, place="forward", number=2, deed=hang),
    "all-reduce": partial(in_a_step, place="all-reduce", deed=hang),
}
COUPLED: Mapping[str, Callable[[int, int], None]] = {"loss": in_a_coupled_loss}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    return run_forked("test_ranks_killed", 2, tmp_path_factory.mktemp("ranks"), "CASES", TIMEOUT)


@pytest.mark.parametrize("case", CASES)
def test_a_rank_is_killed(case: str, results: dict[str, list[str]]) -> None:
    assert results[case] == ["", "SIGKILL"], "\n".join(results[case])


def test_a_rank_is_killed_in_a_coupled_loss(tmp_path: Path) -> None:
    found = run_forked("test_ranks_killed", 2, tmp_path, "COUPLED", TIMEOUT)
    assert found["loss"] == ["SIGKILL", ""], found


def test_one_of_four_ranks_is_killed(tmp_path: Path) -> None:
    found = run_forked("test_ranks_killed", 4, tmp_path, "FOUR", TIMEOUT)
    assert found["backward"] == ["", "SIGKILL", "", ""], found


def in_backward_of_four(rank: int, world: int) -> None:
    """The rank that fails may take others with it: each ends with an error of its own."""

    def loss_fn(model: Any, batch: Any) -> Any:
        if rank == VICTIM:
            die()
        return model(batch["x"]).square().mean()

    error = raised(lambda: anybatch.backward(Net(), loss_fn, batches_of((3, 2, 0, 4))[rank]))
    assert "could not reach the others" in str(error), error


FOUR: Mapping[str, Callable[[int, int], None]] = {"backward": in_backward_of_four}


def test_a_rank_that_hangs_ends_the_others_after_the_timeout(tmp_path: Path) -> None:
    found = run_forked("test_ranks_killed", 2, tmp_path, "HANGING", 1.0)
    assert [texts[0] for texts in found.values()] == ["", ""], found
