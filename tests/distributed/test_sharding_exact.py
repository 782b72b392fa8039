"""The gradient of a model in parts is that of the whole model and of the batches of all ranks."""

import copy
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

import anybatch
from ranks_running import Case, counted
from reference import assert_float64, assert_value64, whole_gradients
from sharding_models import Wrap, gradients_of_whole, runs_on_cpu, sharded
from test_ranks_exact import LOSSES, Net, batches_of, joined, several_uncut

pytestmark = runs_on_cpu

PARTS = ("first", "rare", "last")  # of which some rows and some ranks don't use the second
# By the names that this torch has for what fully_shard calls.
SHARDING = {
    "all_gather_single": next(n for n in ("all_gather_single", "all_gather_into_tensor") if hasattr(dist, n)),
    "reduce_scatter_single": next(n for n in ("reduce_scatter_single", "reduce_scatter_tensor") if hasattr(dist, n)),
}
KEPT, SHARDED = sharded(reshards=False), sharded(reshards=True)


def check(loss: str, rows: Sequence[int], sizes: Sequence[int | None], rank: int, wrap: Wrap, seed: int = 0) -> None:
    loss_fn, options = LOSSES[loss]
    model, batches = Net(), batches_of(rows, seed)
    whole_fn = loss_fn if loss != "yielded" else several_uncut
    expected, values = whole_gradients(copy.deepcopy(model), whole_fn, joined(batches))
    wrapped = wrap(model)
    out = anybatch.backward(wrapped, loss_fn, batches[rank], micro_batch_size=sizes[rank], **options)
    assert_float64(gradients_of_whole(model), expected, f"{loss} {rows} {sizes}")
    for name, value in values.items():
        assert_value64(out.losses[name], value)
    assert model.unused.weight.grad is None


def each_loss(rank: int, world: int, *, wrap: Wrap, rows: Sequence[int] = (11, 3), sizes: Any = (4, 2)) -> None:
    for loss in LOSSES:
        check(loss, rows, sizes, rank, wrap)


def no_row_of_its_own(rank: int, world: int, *, wrap: Wrap) -> None:
    for rows in ((7, 0), (0, 7)):
        each_loss(rank, world, wrap=wrap, rows=rows, sizes=(3, 3))


def random_draws(rank: int, world: int, *, draws: int) -> None:
    generator = torch.Generator().manual_seed(7)

    def draw(most: int) -> int:
        return int(torch.randint(0, most, (), generator=generator))

    for number in range(draws):
        rows = [draw(9) for _ in range(world)]
        rows[draw(world)] += 3
        sizes = [draw(6) or None for _ in range(world)]
        wrap = sharded(reshards=draw(2) > 0, units=[("first", "last"), PARTS, ()][draw(3)])
        check(list(LOSSES)[draw(len(LOSSES))], rows, sizes, rank, wrap, seed=number)


def collectives(rank: int, world: int) -> None:
    """Kept, each of three units is gathered once, and all gradients are reduced together.

    Sharded, all are gathered in each forward, again in the backward, and reduced there; before each of these the ranks
    tell each other, but for the units that FSDP2 reduces when a backward ends, of which they tell together.
    """
    batches = batches_of([6, 4])
    for wrap, size, found in (
        (KEPT, None, (2, 3, 1)),
        (KEPT, 1, (2, 3, 1)),
        (SHARDED, None, (2 + 8, 6, 2)),  # of the whole, of which these rows use nothing, no rank has a gradient
        (SHARDED, 2, (2 + 3 * 8, 18, 6)),  # three micro-batches on the one rank, and two on the other
    ):
        model = wrap(Net())
        anybatch.backward(model, LOSSES["mean"][0], batches[rank])  # the whole parameters are made here
        model.zero_grad()
        with counted(SHARDING) as numbers:
            anybatch.backward(model, LOSSES["mean"][0], batches[rank], micro_batch_size=size, verify="off")
        messages, gathered, reduced = found
        assert numbers["all_gather_single"] == gathered, (size, numbers)
        assert numbers["reduce_scatter_single"] == reduced, (size, numbers)
        assert numbers["all_gather"] == messages, (size, numbers)
        assert numbers["broadcast"] == 0
        assert numbers["all_reduce"] == 0, (size, numbers)


CASES: Mapping[str, Case] = {
    "kept": partial(each_loss, wrap=KEPT),
    "one unit": partial(each_loss, wrap=sharded(reshards=True, units=())),
    "sharded": partial(each_loss, wrap=SHARDED),
    "kept, no row of its own": partial(no_row_of_its_own, wrap=KEPT),
    "sharded, no row of its own": partial(no_row_of_its_own, wrap=SHARDED),
    "a part that not all use": partial(each_loss, wrap=sharded(reshards=True, units=PARTS)),
    "collectives": collectives,
    "random draws": partial(random_draws, draws=60),
}


@pytest.mark.parametrize("case", CASES)
def test_two_ranks(case: str, results: dict[str, str]) -> None:
    assert not results[case], results[case]
