"""What goes wrong in silence elsewhere: ranks that drift apart, no_sync in the wrong place, hidden parameters."""

import warnings
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import anybatch
from ranks_running import Case, assert_weights_same, raised
from reference import assert_float64, gradients_of, whole_gradients
from test_ranks_exact import LOSSES, Net, batches_of, joined, mean_loss


def random_steps(rank: int, world: int) -> None:
    """200 steps of uneven data: in no step do the weights differ in a bit, and they are those of one process.

    Without momentum, which goes on where a gradient is 0 and not where there is none: a part that is used only by
    samples that do not count has the one or the other, depending on which samples share its micro-batch.
    """
    generator = torch.Generator().manual_seed(11)

    def draw(most: int) -> int:
        return int(torch.randint(0, most, (), generator=generator))

    model, alone = Net(), Net()
    steps = [
        anybatch.TrainStep(
            DistributedDataParallel(one) if group is None else one, LOSSES["tokens"][0],
            torch.optim.SGD(one.parameters(), lr=0.05), micro_batch_size=3, clip_norm=0.5, group=group,
            count=anybatch.count_tokens("y"),
        )
        for one, group in ((model, None), (alone, False))
    ]  # fmt: skip
    for number in range(200):
        rows = [draw(9) for _ in range(world)]
        rows[draw(world)] += 1
        batches = batches_of(rows, number, masked=draw(11) / 10)
        out, expected = steps[0](batches[rank]), steps[1](joined(batches))
        assert (out.skipped, out.count) == (expected.skipped, expected.count)
        assert_weights_same(model)
        assert_float64(list(model.parameters()), list(alone.parameters()), f"the weights after step {number}")
    assert (steps[0].updates, steps[0].samples) == (steps[1].updates, steps[1].samples)


def in_a_block_of_no_sync(rank: int, world: int) -> None:
    """A no_sync of the user's around the call changes nothing, and is as it was afterwards."""
    model, batches = Net(), batches_of((4, 6))
    wrapped = DistributedDataParallel(model)
    expected, _ = whole_gradients(Net(), mean_loss, joined(batches))
    with wrapped.no_sync():
        anybatch.backward(wrapped, mean_loss, batches[rank], micro_batch_size=2)
        assert wrapped.require_backward_grad_sync is False
    assert wrapped.require_backward_grad_sync is True
    assert_float64(gradients_of(model), expected)


def reentrant(rank: int, world: int) -> None:
    """A reentrant checkpoint that hides its block is warned of by torch, and named by why; else it is exact."""
    for use_reentrant in (True, False):
        model, batches = Net(), batches_of((4, 6))

        def loss_fn(model: Any, batch: Any, use_reentrant: bool = use_reentrant) -> torch.Tensor:
            inner = getattr(model, "module", model)
            hidden = checkpoint(inner.first, batch["x"], use_reentrant=use_reentrant).tanh()
            return inner.last(hidden).square().mean()  # type: ignore[no-any-return]

        if use_reentrant:
            error = raised(lambda: anybatch.backward(DistributedDataParallel(model), loss_fn, batches[rank]))  # noqa: B023
            assert isinstance(error, UserWarning | anybatch.AnyBatchError)
            assert "None of the inputs have requires_grad=True" in str(error), error
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                paths = anybatch.why(loss_fn(model, batches[rank]), model)
            assert "first.weight" in paths.stopped
            continue
        anybatch.backward(DistributedDataParallel(model), loss_fn, batches[rank], micro_batch_size=2)
        assert_float64(gradients_of(model), whole_gradients(Net(), loss_fn, joined(batches))[0])


CASES: Mapping[str, Case] = {
    "200 random steps": random_steps,
    "no_sync": in_a_block_of_no_sync,
    "reentrant checkpoint": reentrant,
}


@pytest.mark.parametrize("case", CASES)
def test_two_ranks(case: str, results: dict[str, str]) -> None:
    assert not results[case], results[case]
