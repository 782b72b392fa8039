"""Several ranks prove a step: all of them stop, or none does, whoever has something to split.

What would be wrong in silence: a rank that stops alone, so that the others wait for it or go on without it; a proof
that communicates, or that is made by one rank only and leaves another state there.
"""

import copy
import warnings
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import anybatch
from ranks_running import Case, assert_weights_same, counted, raised, run_cases
from sharding_models import parts, runs_on_cpu, sharded


def net() -> nn.Module:
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 3))


def batch_of(rank: int, rows: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    y = torch.randint(3, (rows,), generator=generator)
    return {"x": torch.randn(rows, 4, generator=generator), "y": y}


def mean(model: Any, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch["x"]), batch["y"])


def summed(model: Any, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch["x"]), batch["y"], reduction="sum")


def step_of(model: nn.Module, loss_fn: Any, **options: Any) -> anybatch.TrainStep:
    return anybatch.TrainStep(model, loss_fn, torch.optim.SGD(model.parameters(), lr=0.1), **options)


def passes(rank: int, world: int, *, replicated: bool = False) -> None:
    model = net()
    model = DistributedDataParallel(model) if replicated else model
    other = copy.deepcopy(net())
    torch.manual_seed(7 + rank)
    step = step_of(model, mean, micro_batch_size=3)
    with counted() as first:
        out = step(batch_of(rank, 7))
    assert out.proof is not None
    assert out.proof.exact
    assert_weights_same(model)
    torch.manual_seed(7 + rank)
    with counted() as second:
        step_of(other, mean, micro_batch_size=3, verify="off")(batch_of(rank, 7))
    assert replicated or first == second  # nothing was communicated for it
    for one, another in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(one, another)


def stops(rank: int, world: int) -> None:
    model = net()
    before = copy.deepcopy(model.state_dict())
    step = step_of(model, summed, micro_batch_size=3)
    for _ in range(2):
        error = raised(lambda: step(batch_of(rank, 7)))
        assert isinstance(error, anybatch.NotSplittable), error
    error = raised(lambda: anybatch.backward(model, summed, batch_of(rank, 7), micro_batch_size=2))
    assert isinstance(error, anybatch.NotSplittable), error
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert step_of(model, mean, micro_batch_size=3)(batch_of(rank, 7)).micro_batches == 3  # they still find one another


def stops_where_one_splits(rank: int, world: int) -> None:
    step = step_of(net(), summed, micro_batch_size=4)
    error = raised(lambda: step(batch_of(rank, 1 if rank else 9)))  # the other ranks have one sample
    assert isinstance(error, anybatch.NotSplittable), error
    assert ("rank 0" in str(error)) == bool(rank)
    assert "a sum over" in str(error)


def stops_in_one_micro_batch_each(rank: int, world: int) -> None:
    """The batch of a rank is a part of that of all, whether or not it is split."""

    def contrastive(model: Any, batch: Any) -> torch.Tensor:
        out = F.normalize(model(batch["x"]))
        return F.cross_entropy(5 * out @ out.T, torch.arange(len(out)))

    def of_all(model: Any, out: Any) -> torch.Tensor:
        return F.cross_entropy(5 * out @ out.T, torch.arange(len(out)))

    model = net().eval()
    before = copy.deepcopy(model.state_dict())
    error = raised(lambda: step_of(model, contrastive)(batch_of(rank, 7)))
    assert isinstance(error, anybatch.NotSplittable), error
    assert "Even in one micro-batch" in str(error)
    assert "the whole batch at once" not in str(error)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    coupled = anybatch.Coupled(lambda model, batch: F.normalize(model(batch["x"])), of_all)
    for loss_fn in (mean, coupled):
        proof = step_of(model, loss_fn)(batch_of(rank, 7)).proof
        assert proof is not None
        assert proof.exact
    assert step_of(model, mean)(batch_of(rank, 0 if rank else 7)).count == 7


def stops_where_one_sees_it(rank: int, world: int) -> None:
    """Only one rank has samples of unlike lengths, which show that the count is wrong."""
    x, y = torch.randn(6, 5, 4), torch.randint(3, (6, 5))
    if rank == 0:
        y[:3, 1:] = -100
    step = step_of(nn.Linear(4, 3), lambda m, b: F.cross_entropy(m(b["x"]).flatten(0, 1), b["y"].flatten()),
                   micro_batch_size=3)  # fmt: skip
    for parameter in step.model.parameters():
        torch.nn.init.zeros_(parameter)
    error = raised(lambda: step({"x": x, "y": y}))
    assert isinstance(error, anybatch.NotSplittable), error


def warns(rank: int, world: int) -> None:
    model = net()
    with pytest.warns(anybatch.AnyBatchWarning, match="a sum over"):
        out = step_of(model, summed, micro_batch_size=3, verify="warn")(batch_of(rank, 7))
    assert out.proof is not None
    assert not out.proof.exact
    assert_weights_same(model)


class Parts(nn.Module):
    """Drops out, in two units."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 3)
        self.drop = nn.Dropout(0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.last(self.drop(self.first(x).tanh()))
        return found


def passes_in_parts(rank: int, world: int, *, reshards: bool, rows: tuple[int, int]) -> None:
    """Whoever has something to split, all prove, and nothing of it stays."""
    found = []
    for verify in ("first", "off"):
        model = sharded(reshards=reshards)(Parts())
        torch.manual_seed(7 + rank)
        step = step_of(model, mean, micro_batch_size=3, verify=verify)
        out = step(batch_of(rank, rows[rank]))
        assert (out.proof is not None) == (verify == "first")
        if out.proof is not None:
            assert out.proof.exact, out.proof
            with counted() as numbers:
                step(batch_of(rank, rows[rank]))
            assert numbers["all_gather"] <= 2 + (8 * 4 if reshards else 0), numbers  # it is made once
        else:
            step(batch_of(rank, rows[rank]))
        found.append((parts(model), torch.random.get_rng_state()))
    assert found[0][0] == found[1][0]
    assert torch.equal(found[0][1], found[1][1])


def stops_in_parts(rank: int, world: int, *, reshards: bool) -> None:
    """All stop, also those that have one micro-batch or none; nothing was changed, and they find one another again."""
    for rows in ((7, 7), (9, 2), (0, 8)):
        model = sharded(reshards=reshards)(Parts())
        before = parts(model)
        step = step_of(model, summed, micro_batch_size=3)
        error = raised(lambda step=step, rows=rows: step(batch_of(rank, rows[rank])))  # type: ignore[misc]
        assert isinstance(error, anybatch.NotSplittable), (rows, error)
        assert "before fully_shard" in str(error)
        assert parts(model) == before
        batch = batch_of(rank, rows[rank])
        error = raised(partial(anybatch.backward, model, summed, batch, micro_batch_size=2))
        assert isinstance(error, anybatch.NotSplittable), (rows, error)
        assert all(p.grad is None for p in model.parameters())
        out = step_of(model, mean, micro_batch_size=3)(batch_of(rank, 7))
        assert out.proof is not None
        assert out.proof.exact


def warns_in_parts(rank: int, world: int) -> None:
    model = sharded(reshards=True)(Parts())
    with pytest.warns(anybatch.AnyBatchWarning, match="a sum, or another count"):
        out = step_of(model, summed, micro_batch_size=3, verify="warn")(batch_of(rank, 7))
    assert out.proof is not None
    assert not out.proof.exact


def bounded(model: Any, batch: Any) -> torch.Tensor:
    found: torch.Tensor = (mean(model, batch) - 0.1).abs() + 0.1
    return found


def bounded_weights(model: Any, batch: Any) -> torch.Tensor:
    losses = F.cross_entropy(model(batch["x"]), batch["y"], reduction="none").clamp(max=9)
    total: torch.Tensor = losses.mean() + 0.1 * model.first(torch.zeros(1, 4)).abs().sum()
    return total


def tells_of_bounds(rank: int, world: int, *, reshards: bool, rows: tuple[int, int]) -> None:
    """A bound that no micro-batch has crossed yet is told of on all ranks, also by those that split nothing."""
    step = step_of(sharded(reshards=reshards)(Parts()), bounded, micro_batch_size=3)
    with pytest.warns(anybatch.AnyBatchWarning, match="applies abs to a value reduced over samples"):
        out = step(batch_of(rank, rows[rank]))
    assert out.proof is not None
    assert out.proof.exact
    assert "abs" in out.proof.note
    with warnings.catch_warnings():
        warnings.simplefilter("error", anybatch.AnyBatchWarning)
        step(batch_of(rank, rows[rank]))  # once
        for healthy in (mean, bounded_weights):
            out = step_of(sharded(reshards=reshards)(Parts()), healthy, micro_batch_size=3)(batch_of(rank, 7))
            assert out.proof is not None
            assert not out.proof.note


def runs_one_size_only(rank: int, world: int) -> None:
    """What can't be run in other sizes on one rank is decided on none, and the step goes on."""

    def loss_fn(model: Any, batch: Any) -> torch.Tensor:
        if rank == 1 and len(batch["x"]) not in (3, 1):
            raise ValueError("three or one, please")
        return mean(model, batch)

    model = sharded(reshards=True)(Parts())
    out = step_of(model, loss_fn, micro_batch_size=3)(batch_of(rank, 7))
    assert out.proof is not None
    assert out.proof.outcome == "undecided"
    assert "three or one" in out.proof.note


IN_PARTS: Mapping[str, Case] = {
    **{
        f"passes, {way}, {rows}": partial(passes_in_parts, reshards=way == "sharded", rows=rows)
        for way in ("sharded", "kept")
        for rows in ((7, 7), (8, 2), (0, 7))
    },
    **{f"stops, {way}": partial(stops_in_parts, reshards=way == "sharded") for way in ("sharded", "kept")},
    **{
        f"tells of bounds, {way}, {rows}": partial(tells_of_bounds, reshards=way == "sharded", rows=rows)
        for way in ("sharded", "kept")
        for rows in ((7, 7), (2, 8))
    },
    "warns": warns_in_parts,
    "one size only": runs_one_size_only,
}


CASES: Mapping[str, Case] = {
    "passes": passes,
    "passes in DistributedDataParallel": lambda rank, world: passes(rank, world, replicated=True),
    "stops": stops,
    "stops where one rank splits": stops_where_one_splits,
    "stops in one micro-batch each": stops_in_one_micro_batch_each,
    "stops where one rank sees it": stops_where_one_sees_it,
    "warns": warns,
}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return run_cases("test_proof_ranks", 2, Path(tmp_path_factory.mktemp("ranks")))


@pytest.mark.parametrize("case", CASES)
def test_two_ranks(case: str, results: dict[str, str]) -> None:
    assert not results[case], results[case]


@pytest.fixture(scope="module")
def results_in_parts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return run_cases("test_proof_ranks", 2, Path(tmp_path_factory.mktemp("parts")), "IN_PARTS")


@runs_on_cpu
@pytest.mark.parametrize("case", IN_PARTS)
def test_two_ranks_with_a_model_in_parts(case: str, results_in_parts: dict[str, str]) -> None:
    assert not results_in_parts[case], results_in_parts[case]
