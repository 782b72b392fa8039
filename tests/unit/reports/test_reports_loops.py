"""Public reports of loops that stepped at the wrong time, logged the wrong number or lost samples.

The number is that of the report in ``docs/reports.md``.
"""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import anybatch
from faults import ROW, SmallMemory, Straight, mean_square
from reference import assert_value64

Batch = dict[str, torch.Tensor]


def data(rows: int) -> Batch:
    generator = torch.Generator().manual_seed(rows)
    return {
        "x": torch.randn(rows, 3, generator=generator, dtype=torch.float64),
        "y": torch.randn(rows, 1, generator=generator, dtype=torch.float64),
    }


def squares(model: Any, batch: Batch) -> torch.Tensor:
    return F.mse_loss(model(batch["x"]), batch["y"])


def linear() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(3, 1).double()


def loader(rows: int, size: int) -> list[Batch]:
    whole = data(rows)
    return [{name: value[at : at + size] for name, value in whole.items()} for at in range(0, rows, size)]


def test_9_every_epoch_has_the_same_windows() -> None:
    batches, updates, counter = loader(14, 2), [], 0
    for _ in range(3):  # the reported loop: the counter is not reset at the end of an epoch
        found = 0
        for _ in batches:
            counter += 1
            found += counter % 4 == 0
        updates.append(found)
    assert updates == [1, 2, 2]
    for _ in range(3):
        assert [len(list(window)) for window in anybatch.windows(batches, batches=4)] == [4, 3]


def test_21_decay_and_the_step_of_adam_count_logical_batches() -> None:
    batch = data(10)
    once, twice = linear(), linear()
    whole = torch.optim.AdamW(once.parameters(), lr=0.1, weight_decay=0.5)
    squares(once, batch).backward()
    whole.step()
    optimizer = torch.optim.AdamW(twice.parameters(), lr=0.1, weight_decay=0.5)
    anybatch.TrainStep(twice, squares, optimizer, micro_batch_size=4)(batch)  # 4, 4 and 2
    assert {float(state["step"]) for state in optimizer.state.values()} == {1.0}
    for one, other in zip(once.parameters(), twice.parameters(), strict=True):
        torch.testing.assert_close(other, one, rtol=1e-10, atol=0)


def test_23_slices_of_one_batch_make_one_update() -> None:
    model, batch = linear(), data(8)
    step = anybatch.TrainStep(model, squares, torch.optim.SGD(model.parameters(), lr=0.1), micro_batch_size=3)
    out = step(batch)  # the reported loop made an update after each slice, since the loader was at its end
    assert (out.micro_batches, step.updates, step.samples) == (3, 1, 8)


@pytest.mark.parametrize("size", [None, 1])
def test_25_three_images_in_windows_of_four_are_trained_on(size: int | None) -> None:
    model, images = linear(), loader(3, 1)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    by_hand = torch.optim.SGD(model.parameters(), lr=0.1)
    for number, image in enumerate(images, 1):  # never comes to a step, and leaks into the next epoch
        (squares(model, image) / 4).backward()
        if number % 4 == 0:
            by_hand.step()
    assert all(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))
    step = anybatch.TrainStep(model, squares, by_hand, micro_batch_size=size)
    for _ in range(2):
        for window in anybatch.windows(images, batches=4):
            step(window)
    assert (step.updates, step.samples) == (2, 6)


def test_29_there_is_one_batch_size_and_the_other_changes_nothing() -> None:
    batch, weights = data(12), []
    for size in (12, 5, 1):
        model = linear()
        step = anybatch.TrainStep(model, squares, torch.optim.SGD(model.parameters(), lr=0.1), micro_batch_size=size)
        step(batch)
        weights.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    torch.testing.assert_close(torch.stack(weights), weights[0].expand(3, -1), rtol=1e-10, atol=0)


def test_33_the_number_of_updates_goes_on_after_memory_ran_out() -> None:
    model, batch = Straight(), torch.ones(20, 5)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
    step = anybatch.TrainStep(model, mean_square, optimizer, scheduler=scheduler)
    for _ in range(3):
        step(batch)
    with SmallMemory(6 * ROW):
        step(batch)
    assert (step.updates, step.samples, scheduler.last_epoch) == (4, 80, 4)
    assert {float(state["step"]) for state in optimizer.state.values()} == {4.0}


def test_34_a_retry_is_in_the_result_and_the_end_says_what_failed() -> None:
    model, batch = Straight(), torch.ones(20, 5)
    step = anybatch.TrainStep(model, mean_square, torch.optim.SGD(model.parameters(), lr=0.1))
    with SmallMemory(6 * ROW):
        out = step(batch)
    found = [(attempt.micro_batch_size, attempt.outcome) for attempt in out.attempts]
    assert found == [(20, "out of memory"), (10, "out of memory"), (5, "done")]
    before = [parameter.detach().clone() for parameter in model.parameters()]
    with SmallMemory(ROW // 8), pytest.raises(anybatch.DoesNotFit):
        step(batch)
    assert step.updates == 1
    assert all(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))


def test_35_smaller_micro_batches_are_the_same_batch() -> None:
    weights = []
    for limit in (None, 6 * ROW):
        torch.manual_seed(0)
        model = Straight().eval()  # its masks may depend on the split
        step = anybatch.TrainStep(model, mean_square, torch.optim.SGD(model.parameters(), lr=0.1))
        batch = torch.randn(20, 5, generator=torch.Generator().manual_seed(1))
        if limit is None:
            step(batch)
        else:
            with SmallMemory(limit):
                assert step(batch).micro_batches == 4
        assert (step.updates, step.samples) == (1, 20)
        weights.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    torch.testing.assert_close(weights[0], weights[1])


def test_42_a_plan_counts_the_state_that_adam_makes_in_its_first_step() -> None:
    model, batch = nn.Linear(64, 64), {"x": torch.randn(4, 64), "y": torch.randn(4, 64)}
    peaks = [
        anybatch.plan(model, squares, batch, optimizer, memory="1GiB").peak_bytes
        for optimizer in (torch.optim.SGD(model.parameters(), lr=0.1), torch.optim.Adam(model.parameters(), lr=0.1))
    ]
    numbers = sum(parameter.numel() for parameter in model.parameters())
    assert peaks[1] - peaks[0] >= 2 * 4 * numbers


def test_54_on_the_cpu_a_plan_is_for_the_batch_and_for_no_other() -> None:
    model, batch = nn.Linear(4, 4), {"x": torch.randn(6, 4), "y": torch.randn(6, 4)}
    plan = anybatch.plan(model, squares, batch, torch.optim.SGD(model.parameters(), lr=0.1), memory="1GiB")
    assert plan.micro_batch_size == 6


def test_63_the_loss_that_is_logged_is_that_of_all_samples() -> None:
    model, batch = linear(), data(11)
    pieces = [{name: value[at : at + 4] for name, value in batch.items()} for at in (0, 4, 8)]
    expected = squares(model, batch).item()
    last = squares(model, pieces[-1]).item()
    mean_of_means = sum(squares(model, piece).item() for piece in pieces) / 3
    assert abs(last - expected) > 1e-3
    assert abs(mean_of_means - expected) > 1e-3
    out = anybatch.backward(model, squares, batch, micro_batch_size=4)
    assert_value64(out.loss, expected)
