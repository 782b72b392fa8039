"""Which collectives a model in parts runs: each is waited for, and none that torch's gloo does not survive.

While a collective is under way, gloo's threads read and write its buffers, which a failed pass gives back. And of
torch 2.13 the two worker threads of ``ProcessGroupGloo`` write the name of the collective that they ended to one string
without a lock. A name of up to 15 characters lies in the string itself. A longer one, such as ALLGATHER_COALESCED of
``DTensor.full_tensor``, lies on the heap, where both may free it: "malloc(): unaligned tcache chunk detected".
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

import anybatch
from ranks_running import Case, raised
from sharding_models import Wrap, gradients_of_whole, runs_on_cpu, sharded, whole_weights
from test_ranks_exact import Net, batches_of
from test_ranks_faults import Fault, nothing, shortage
from test_sharding_faults import mean_loss_with

pytestmark = runs_on_cpu

SHORT = {"allgather_", "_allgather_base_", "allreduce_", "_reduce_scatter_base_"}  # as torch calls them
NAMES = ("all_gather", "all_reduce", "all_gather_into_tensor", "all_gather_single", "reduce_scatter_tensor",
         "reduce_scatter_single")  # fmt: skip


class Collectives(TorchDispatchMode):
    """Notes the names of all collectives in its block, with their library."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: set[str] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        library, name = function.name().split("::")
        if "c10d" in library:
            self.names.add(name if library == "c10d" else f"{library}::{name}")
        return function(*args, **(kwargs or {}))


@contextmanager
def noted() -> Iterator[list[str]]:
    """Gives the collectives in its block that nobody is sure to have waited for."""
    found: list[str] = []
    before = {name: getattr(dist, name) for name in NAMES if hasattr(dist, name)}

    def noting(name: str) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            work = before[name](*args, **options)
            if work is not None:
                found.append(name)
            return work

        return call

    for name in before:
        setattr(dist, name, noting(name))
    try:
        yield found
    finally:
        for name, function in before.items():
            setattr(dist, name, function)


def stepping(rank: int, world: int, *, wrap: Wrap) -> None:
    """Steps that succeed, that begin again and that fail, and what the tests compare afterwards."""
    model, batches = wrap(Net()), batches_of((7, 8))
    errors = [None, shortage(), ValueError("a bad sample")]
    with Collectives() as seen, noted() as left:
        for place in ("forward", "backward"):
            for error in errors:
                fault: Any = Fault(place, 2, error) if error is not None and rank == 1 else nothing
                optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
                step = anybatch.TrainStep(model, mean_loss_with(fault), optimizer, micro_batch_size=4, clip_norm=1.0)
                failure = raised(lambda step=step: step(batches[rank]))  # type: ignore[misc]
                assert (failure is None) == (not isinstance(error, ValueError)), failure
        anybatch.backward(model, mean_loss_with(nothing), batches[rank])
        gradients_of_whole(model), whole_weights(model)
    assert {"allgather_", "_reduce_scatter_base_"} <= seen.names <= SHORT, seen.names
    assert not left, left


CASES: Mapping[str, Case] = {
    name: partial(stepping, wrap=sharded(reshards=reshards, units=("first", "rare", "last")))
    for name, reshards in (("kept", False), ("sharded", True))
}


@pytest.mark.parametrize("case", CASES)
def test_two_ranks(case: str, results: dict[str, str]) -> None:
    assert not results[case], results[case]
