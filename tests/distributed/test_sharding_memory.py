"""``memory=`` with FSDP2: micro-batches grow as far as the budget of each rank allows; the gradient stays the same."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch

import anybatch
from anybatch.backpropagation import RepeatedBackward
from anybatch.planning.observing import Observing
from anybatch.records.plans import Plan, PlanRow
from anybatch.tensors.shards import local_of
from planning_referee import Referee, alive_in
from ranks_running import Case, assert_same_everywhere, raised
from reference import assert_float64
from sharding_models import Wrap, parts, runs_on_cpu, sharded, whole_weights

pytestmark = runs_on_cpu

WIDTH, LENGTH, ROWS = 16, 6, 40


class Blocks(torch.nn.Module):
    """Two blocks that keep much more than they are given."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.first, self.last = (
            torch.nn.Sequential(
                torch.nn.Linear(WIDTH, 64), torch.nn.Tanh(), torch.nn.Linear(64, WIDTH), torch.nn.Tanh()
            )
            for _ in range(2)
        )
        self.head = torch.nn.Linear(WIDTH, 3)
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.head(self.last(self.first(x.flatten(0, 1))))
        return found


def rows_of(rank: int, seed: int = 0, rows: int = ROWS, length: int = LENGTH) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * seed + rank)
    return torch.randn(rows + 3 * rank, length, WIDTH, generator=generator, dtype=torch.float64)


def square(model: Any, x: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(x).square().mean()
    return loss


def adamw(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


class Parts(Referee):
    """Looks at the sizes of all storages after every operation, since gathered parameters shrink and grow."""

    def _meet(self, tensor: torch.Tensor) -> int:
        if tensor.dtype is not torch.uint8:  # messages between hosts
            super()._meet(local_of(tensor))
        return 0  # what comes up as an argument was empty before

    def _look(self) -> None:
        self.peak = max(self.peak, self.live_bytes())

    def live_bytes(self) -> int:
        super().live_bytes()
        found = [torch.UntypedStorage._new_with_weak_ptr(reference.cdata) for reference in self._sizes]
        return sum(storage.nbytes() for storage in found if storage is not None)


def peak_of(step: anybatch.TrainStep, batch: torch.Tensor) -> tuple[int, anybatch.StepResult]:
    alive = [local_of(tensor) for tensor in alive_in(step.model, step._optimizers, batch)]
    with Parts(alive) as referee:
        del alive
        out = step(batch)
    return referee.peak, out


BUDGET = 420_000


def exact_within_a_budget(rank: int, world: int, *, wrap: Wrap) -> None:
    """Sizes grow, no call holds more than the budget, and the weights are those of one process with both batches."""
    model, alone = wrap(Blocks()), Blocks()
    step = anybatch.TrainStep(model, square, adamw(model), memory=BUDGET, clip_norm=1.0)
    one = anybatch.TrainStep(alone, square, adamw(alone), group=False, clip_norm=1.0)
    sizes: list[float] = []
    for seed in range(8):
        peak, out = peak_of(step, rows_of(rank, seed))
        one(torch.cat([rows_of(other, seed) for other in range(world)]))
        assert_float64(whole_weights(model), list(alone.parameters()), f"the weights after step {seed}")
        assert out.plan is not None
        assert peak <= BUDGET
        assert abs(peak - out.plan.peak_bytes) <= 0.02 * peak, (peak, out.plan.peak_bytes)
        sizes.append(out.plan.micro_batch_size)
    assert sizes[0] == 2
    assert sizes == sorted(sizes)
    assert 5 <= sizes[-1] < len(rows_of(rank)), sizes
    assert sizes[-1] == sizes[-2], sizes
    assert out.plan is not None
    assert out.plan.peak_bytes > 0.75 * BUDGET
    assert step.evaluate(rows_of(rank)).plan is None
    assert step._evaluation_limit.value == sizes[-1]


def room_for_all(rank: int, world: int, *, wrap: Wrap) -> None:
    model = wrap(Blocks())
    step = anybatch.TrainStep(model, square, adamw(model), memory="1GiB")
    sizes = [step(rows_of(rank)).micro_batches for _ in range(6)]
    assert sizes[-1] == 1, sizes
    assert step(rows_of(rank, rows=60)).micro_batches in (1, 2)
    assert step(rows_of(rank, length=2 * LENGTH)).micro_batches > 10  # longer samples are measured anew


def nothing_fits(rank: int, world: int, *, wrap: Wrap) -> None:
    """On the CPU, where no allocator stops a step, this is known after one sample took too much."""
    model = wrap(Blocks())
    step = anybatch.TrainStep(model, square, adamw(model), memory=60_000 if rank else "1GiB")
    for _ in range(2):
        step(rows_of(rank))
    before = parts(model)
    error = raised(lambda: step(rows_of(rank)))
    if rank == 1:
        assert type(error) is anybatch.DoesNotFit, error
        assert (error.needed or 0) > 60_000 == error.budget
    assert isinstance(error, anybatch.AnyBatchError), error
    assert "of one sample took" in str(error)
    assert parts(model) == before
    assert step.updates == 2


@contextmanager
def known_peaks(fixed: int, of_sample: int) -> Iterator[None]:
    """Steps take what they are said to take: a buffer that gloo's thread holds for a moment shows in measured peaks."""

    def note(self: Observing, peak: int, before: int) -> None:
        NOTE(self, before + fixed + of_sample * int(self.value or 1), before)

    with mock.patch.object(Observing, "_note", note):
        yield


NOTE = Observing._note


def runs_out(rank: int, world: int, *, wrap: Wrap) -> None:
    """Memory that runs out on one rank makes its micro-batches smaller; the others keep theirs."""
    fails = [False]

    def loss_fn(model: Any, x: torch.Tensor) -> torch.Tensor:
        loss = square(model, x)
        if fails[0] and rank == 1:
            fails[0] = False
            raise torch.OutOfMemoryError("CUDA out of memory (made up)")
        return loss

    model, alone = wrap(Blocks()), Blocks()
    step = anybatch.TrainStep(model, loss_fn, adamw(model), memory=BUDGET)
    one = anybatch.TrainStep(alone, square, adamw(alone), group=False)
    sizes: list[int] = []
    for seed in range(7):
        fails[0] = seed == 5
        with known_peaks(60_000, 20_000):
            out = step(rows_of(rank, seed))
        one(torch.cat([rows_of(other, seed) for other in range(world)]))
        assert_float64(whole_weights(model), list(alone.parameters()), f"the weights after step {seed}")
        assert out.plan is not None
        sizes.append(int(out.plan.micro_batch_size))
        assert len(out.attempts) == (2 if seed == 5 else 1)
    assert_same_everywhere(step.updates)
    assert step.updates == 7
    if rank == 0:
        assert sizes == sorted(sizes), sizes
    else:
        assert sizes[5] == sizes[6] <= (sizes[4] + 2) // 2 < sizes[4], sizes


def goes_on(rank: int, world: int) -> None:
    """While it grows, and after that, a step that was saved goes on with the sizes of one that was not."""
    found = []
    for saved_after in (None, 2, 7):
        model = sharded(reshards=True)(Blocks())
        optimizer, sizes = adamw(model), []
        step = anybatch.TrainStep(model, square, optimizer, memory=BUDGET)
        with known_peaks(60_000, 20_000):
            for number in range(9):
                if number == saved_after:
                    state = step.state_dict()
                    step = anybatch.TrainStep(model, square, optimizer, memory=BUDGET)
                    step.load_state_dict(state)
                step(rows_of(rank, rows=20))
                sizes.append(step._limit.value)
                if number == saved_after:
                    assert step._follower is not None
                    assert step._follower.may_grow is (saved_after == 2)
        found.append((sizes, step.state_dict()["plan"]["growth"]))
        assert sizes[0] == 2
        assert sizes[5:] == [sizes[-1]] * 4
        assert (sizes[-1] or 0) > 2
    assert found[0] == found[1] == found[2]


def refusals(rank: int, world: int) -> None:
    model, batch = sharded(reshards=True)(Blocks()), rows_of(rank)
    optimizer = adamw(model)
    error = raised(lambda: anybatch.TrainStep(model, square, optimizer, plan=Plan(PlanRow(2, 20), samples=ROWS)))
    assert isinstance(error, anybatch.BatchError)
    assert "--shard fsdp2" in str(error)
    collating = anybatch.TrainStep(model, square, optimizer, memory="1GiB", collate=torch.stack)
    error = raised(lambda: collating(list(batch)))
    assert isinstance(error, anybatch.BatchError), error
    assert "collate=" in str(error)
    coupled = anybatch.Coupled(lambda model, x: model(x), lambda model, outputs: outputs.square().mean())
    error = raised(lambda: anybatch.TrainStep(model, coupled, optimizer, memory="1GiB")(batch))
    assert isinstance(error, anybatch.BatchError), error
    assert "Coupled" in str(error)
    error = raised(lambda: RepeatedBackward(model, square, memory="1GiB")(batch))
    assert isinstance(error, anybatch.BatchError), error
    assert "works on whole models" in str(error)


BOTH = {"kept": sharded(reshards=False), "sharded": sharded(reshards=True)}
CASES: Mapping[str, Case] = {
    **{
        f"{case.__name__}, {name}": partial(case, wrap=wrap)
        for name, wrap in BOTH.items()
        for case in (exact_within_a_budget, room_for_all, nothing_fits, runs_out)
    },
    "goes_on": goes_on,
    "refusals": refusals,
}


@pytest.mark.parametrize("case", CASES)
def test_two_ranks(case: str, results: dict[str, str]) -> None:
    assert not results[case], results[case]
