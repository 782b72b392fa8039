"""Several devices in one process: random numbers that do not depend on who runs what, nor when."""

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.checkpoint import checkpoint

import anybatch
from anybatch.update.overdevices import seeds_for
from device_models import TWO, batch_of, cross_entropy, devices_of, small, step_of
from reference import RELATIVE_FLOAT64, assert_bitwise, assert_float64, gradients_of, random_state


def rate(model: torch.nn.Sequential, value: float) -> None:
    """Sets how much is dropped."""
    dropout: Any = model[2]
    dropout.p = value


def drawing(kind: str) -> Any:
    """A loss that draws from one generator of the host; what it drew is in the metrics."""

    def loss_fn(model: Any, batch: Any) -> Any:
        rows = len(batch["x"])
        drawn = {
            "torch": lambda: torch.rand(rows).double(),
            "python": lambda: torch.tensor([random.random() for _ in range(rows)]),
            "numpy": lambda: torch.from_numpy(np.random.rand(rows)),
        }[kind]()
        each = torch.nn.functional.cross_entropy(model(batch["x"]), batch["y"], reduction="none")
        return (each * drawn).mean(), {"drawn": drawn}

    return loss_fn


@pytest.mark.parametrize("kind", ["torch", "python", "numpy"])
def test_draws_from_the_host_are_seen_and_are_the_same_each_time(kind: str) -> None:
    runs = []
    for _ in range(2):
        torch.manual_seed(2)
        step = step_of(small(), drawing(kind), devices=TWO, micro_batch_size=2)
        runs.append([step(batch_of(9, seed=i)).metrics["drawn"] for i in range(3)])
        assert devices_of(step).drew_on_host == {True: True}
    assert all(torch.equal(one, other) for one, other in zip(*runs, strict=True))
    everything = torch.cat(runs[0])
    assert len(everything.unique()) == len(everything)  # no micro-batch and no step gets the numbers of another


def test_a_model_without_draws_leaves_the_generators_alone() -> None:
    step = step_of(small(), devices=TWO, micro_batch_size=2)
    before = random_state()
    for _ in range(3):
        step(batch_of(9))
    assert random_state() == before
    assert devices_of(step).drew_on_host == {True: False}


def test_a_model_that_draws_moves_the_generator_once_a_step_whatever_the_split() -> None:
    states = []
    for size in (1, 4):
        torch.manual_seed(0)
        step = step_of(small(dropout=0.5), devices=TWO, micro_batch_size=size)
        step(batch_of(9))
        states.append(random_state())
    assert states[0] == states[1]


def test_a_model_that_begins_to_draw_later_runs_that_batch_again() -> None:
    torch.manual_seed(0)
    model = small(dropout=0.0)
    step = step_of(model, devices=TWO, micro_batch_size=2)
    step(batch_of(9))
    assert devices_of(step).drew_on_host == {True: False}
    rate(model, 0.5)
    state, weights = step.state_dict(), {k: v.clone() for k, v in model.state_dict().items()}
    step(batch_of(9))
    found = gradients_of(model)
    assert devices_of(step).drew_on_host == {True: True}
    model.load_state_dict(weights)
    again = step_of(model, devices=TWO, micro_batch_size=2)  # which looks from the beginning
    again.load_state_dict(state)
    again(batch_of(9))
    assert_bitwise(found, gradients_of(model))
    rate(model, 0.0)
    step(batch_of(9))
    assert devices_of(step).drew_on_host == {True: False}


def test_a_batch_that_runs_again_counts_once_in_running_statistics() -> None:
    norm, dropout = torch.nn.BatchNorm1d(4).double(), torch.nn.Dropout(0.0)
    step = step_of(torch.nn.Sequential(norm, dropout, torch.nn.Linear(4, 3).double()), devices=TWO, batch_norm="ghost")
    step(batch_of(8))
    dropout.p = 0.5
    step(batch_of(8))
    assert devices_of(step).drew_on_host == {True: True}
    assert norm.num_batches_tracked is not None
    assert int(norm.num_batches_tracked) == 2


def test_a_checkpoint_recomputes_with_the_same_masks() -> None:
    class Recomputed(torch.nn.Module):
        def __init__(self, recompute: bool) -> None:
            super().__init__()
            self.inner, self.recompute = small(dropout=0.5), recompute

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if not self.recompute:
                return self.inner(x)  # type: ignore[no-any-return]
            return checkpoint(self.inner, x, use_reentrant=False)  # type: ignore[no-any-return]

    found = []
    for recompute in (True, False):
        model = Recomputed(recompute)
        torch.manual_seed(1)
        step = step_of(model, devices=TWO, micro_batch_size=2)
        for i in range(3):
            step(batch_of(9, seed=i))
        found.append(gradients_of(model))
    assert_bitwise(*found)


def test_masks_per_sample_are_those_of_one_device() -> None:
    found, states = [], []
    for devices in (None, TWO):
        model = small(dropout=0.5)
        torch.manual_seed(4)
        step = step_of(model, devices=devices, micro_batch_size=2, dropout="per-sample")
        for i in range(2):
            step(batch_of(9, seed=i))
        found.append(gradients_of(model))
        states.append(random_state())
    assert_float64(found[0], found[1])
    assert states[0] == states[1]


def test_a_forward_that_counts_sees_the_random_numbers_of_the_one_that_learns() -> None:
    def loss_fn(model: Any, batch: Any) -> Any:
        chosen = (torch.rand(len(batch["x"])) < 0.5).double()
        each = torch.nn.functional.cross_entropy(model(batch["x"]), batch["y"], reduction="none")
        return {"chosen": anybatch.Mean((each * chosen).sum(), chosen.sum()), "all": each.mean()}

    step = step_of(small(), loss_fn, devices=TWO, micro_batch_size=3, count="forward")
    for i in range(3):  # other numbers would not add up to the count, which is checked
        step(batch_of(20, seed=i))


def test_a_collate_that_draws_gives_the_same_batches_to_both_passes() -> None:
    def collate(samples: list[Any]) -> dict[str, torch.Tensor]:
        kept = [one for one in samples if random.random() < 0.5] or samples[:1]
        return {"x": torch.stack([x for x, _ in kept]), "y": torch.stack([y for _, y in kept])}

    def loss_fn(model: Any, batch: Any) -> Any:
        each = torch.nn.functional.cross_entropy(model(batch["x"]), batch["y"], reduction="none")
        return {"a": anybatch.Mean(each.sum(), len(each)), "b": anybatch.Mean(each.square().sum(), len(each))}

    batch = batch_of(12)
    samples = list(zip(batch["x"], batch["y"], strict=True))
    step = step_of(small(), loss_fn, devices=TWO, micro_batch_size=3, count="forward", collate=collate)
    for _ in range(3):
        step(samples)


def test_evaluating_does_not_draw_where_training_does() -> None:
    model = small(dropout=0.5)
    step = step_of(model, devices=TWO)
    step(batch_of(8))
    step.evaluate(batch_of(8))
    assert devices_of(step).drew_on_host == {True: True, False: False}
    assert step.evaluate(batch_of(8)).loss == pytest.approx(
        cross_entropy(model.eval(), batch_of(8)).item(), rel=RELATIVE_FLOAT64
    )


def test_seeds_of_neighbouring_batches_differ() -> None:
    torch.manual_seed(0)
    first = seeds_for(50)
    torch.randint(2**62, ())
    assert not set(first) & set(seeds_for(50))
