"""The noise scale over ranks: their micro-batches count as further ones, by the exact formula."""

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

import anybatch
from anybatch.scaling.noiseestimates import Estimate, estimate
from anybatch.scaling.noisescale import MicroGradients
from ranks_running import Case, assert_same_everywhere, counted, everywhere, hashed, raised, run_cases
from reference import whole_gradients
from test_ranks_exact import LOSSES, TOKENS, Batch, Net, batches_of, joined, mean_loss, several_uncut

SIZES = (2, 3)


def in_parts(batches: Sequence[Batch], sizes: Sequence[int | None]) -> list[Batch]:
    """The micro-batches of all ranks."""
    found = []
    for batch, size in zip(batches, sizes, strict=True):
        rows = len(batch["x"])
        for start in range(0, rows, size or max(1, rows)):
            found.append({name: value[start : start + (size or rows)] for name, value in batch.items()})
    return found


def truth(loss_fn: Any, batches: Sequence[Batch], sizes: Sequence[int | None], count: Any) -> Estimate:
    """From the gradient of each micro-batch, one after the other, in float64."""
    parts = [part for part in in_parts(batches, sizes) if count(part) > 0]

    def squared(batch: Batch) -> float:
        gradients, _ = whole_gradients(Net(), loss_fn, batch)
        return math.fsum(float(g.square().sum()) for g in gradients if g is not None)

    return estimate([squared(part) for part in parts], [count(part) for part in parts], squared(joined(batches)))


def rows_of(batch: Batch) -> int:
    return len(batch["x"])


def stepping(rank: int, loss: str, sizes: Sequence[int | None], *, wrap: Any = None, **options: Any) -> Any:
    loss_fn, more = LOSSES[loss]
    model = Net()
    step = anybatch.TrainStep(
        model if wrap is None else wrap(model), loss_fn, torch.optim.SGD(model.parameters(), lr=0.0),
        micro_batch_size=sizes[rank], **more, **options,
    )  # fmt: skip
    return model, step


def alone(loss: str, batches: Sequence[Batch], sizes: Sequence[int | None]) -> Estimate:
    """What one process says of the same micro-batches."""
    parts = in_parts(batches, sizes)
    (window,) = anybatch.windows(parts, batches=len(parts))
    _, step = stepping(0, loss, (None,), group=False)
    noise = anybatch.NoiseScale(step, every=1)
    step(window)
    assert noise.trace is not None
    assert noise.signal is not None
    return Estimate(noise.trace, noise.signal)


def check(
    rank: int, loss: str, rows: Sequence[int], sizes: Sequence[int | None] = SIZES, *, unit: str = "samples",
    masked: float = 0.3, keep: bool = False, **options: Any,
) -> None:  # fmt: skip
    batches = batches_of(rows, masked=masked)
    _, step = stepping(rank, loss, sizes, **options)
    noise = anybatch.NoiseScale(step, every=1, keep_gradients=keep)
    with counted() as numbers:
        step(batches[rank])
    assert numbers["all_reduce"] == 1
    assert numbers["all_gather"] == {"one Mean": 3, "several Means": 4}.get(loss, 2), numbers
    whole = several_uncut if loss == "yielded" else LOSSES[loss][0]
    expected = (
        alone(loss, batches, sizes)
        if loss == "several Means"
        else truth(whole, batches, sizes, (lambda part: int(TOKENS(part))) if unit == "items" else rows_of)
    )
    assert noise.measurements == 1
    assert noise.trace is not None
    assert noise.signal is not None
    assert abs(noise.trace - expected.trace) < 1e-9 * abs(expected.trace), (loss, noise.trace, expected)
    assert abs(noise.signal - expected.signal) < 1e-9 * abs(expected.trace), (loss, noise.signal, expected)
    assert noise.unit == unit
    assert_same_everywhere([noise.trace, noise.signal, noise.value, noise.advice])


def exact(rank: int, world: int) -> None:
    """Uneven samples, tokens and micro-batches, of one rank alone, and one micro-batch a rank."""
    for wrap in (None, DistributedDataParallel):
        for rows, sizes in (
            ((7, 9), SIZES),
            ((5, 8), (None, None)),
            ((7, 0), SIZES),
            ((0, 7), SIZES),
            ((1, 6), (4, 4)),
        ):
            check(rank, "mean", rows, sizes, wrap=wrap)
            check(rank, "tokens", rows, sizes, wrap=wrap, unit="items")
    check(rank, "one Mean", (7, 9), unit="items")
    check(rank, "several Means", (7, 9))
    check(rank, "several", (7, 9), masked=0.0)
    check(rank, "yielded", (7, 9), masked=0.0, keep=True)
    check(rank, "tokens", (4, 5), masked=0.0)


def four(rank: int, world: int) -> None:
    for loss, unit in (("mean", "samples"), ("tokens", "items")):
        check(rank, loss, (5, 0, 1, 9), (2, 1, None, 4), unit=unit)


def other_counts(rank: int, world: int) -> None:
    """Losses whose counts are in proportion on each rank, but not over all of them, have no item but the sample."""
    batches = batches_of((4, 4), masked=0.0)
    batches[1]["y"][::2] = -100

    def several(model: Any, batch: Batch) -> dict[str, torch.Tensor]:
        out = model(batch["x"])
        return {"token": F.cross_entropy(out, batch["y"]), "square": (out.sum(1) - batch["z"]).square().mean()}

    model = Net()
    step = anybatch.TrainStep(
        model, several, torch.optim.SGD(model.parameters(), lr=0.0), micro_batch_size=2,
        count={"token": TOKENS, "square": anybatch.count_samples},
    )  # fmt: skip
    noise = anybatch.NoiseScale(step, every=1)
    step(batches[rank])
    assert noise.unit == "samples"
    assert noise.measurements == 1


def scaled(rank: int, world: int) -> None:
    """A scaler changes nothing, and what overflows is left out on all ranks."""
    values: list[Any] = []
    for scaler in (None, torch.amp.GradScaler("cpu", init_scale=2.0**10)):
        _, step = stepping(rank, "mean", SIZES, scaler=scaler)
        noise = anybatch.NoiseScale(step, every=1)
        step(batches_of((7, 9))[rank])
        values.append(noise.trace)
    assert abs(values[0] - values[1]) < 1e-6 * values[0]
    batch = batches_of((7, 9))[rank]
    if rank == 1:
        batch["z"][:] = math.inf
    out = step(batch)
    assert out.skipped
    assert noise.measurements == 1


def sampled(rank: int, world: int) -> None:
    """Hooks are there on every third step only, on all ranks alike, and training stays bitwise as it is."""
    weights = []
    entered: list[int] = []
    usual = MicroGradients.__enter__
    for measures in (False, True):
        model = Net()
        step = anybatch.TrainStep(model, mean_loss, torch.optim.SGD(model.parameters(), lr=0.3), micro_batch_size=2)
        noise = anybatch.NoiseScale(step, every=3) if measures else None
        for number in range(7):

            def enter(self: MicroGradients, number: int = number) -> MicroGradients:
                entered.append(number)
                return usual(self)

            MicroGradients.__enter__ = enter  # type: ignore[method-assign]
            try:
                step(batches_of((5, 4), number)[rank])
            finally:
                MicroGradients.__enter__ = usual  # type: ignore[method-assign]
        weights.append(hashed(model.parameters()))
    assert entered == [0, 3, 6]
    assert weights[0] == weights[1]
    assert noise is not None
    assert noise.measurements == 3
    assert_same_everywhere(noise.state_dict())


def not_everywhere(rank: int, world: int) -> None:
    """A NoiseScale on one rank only says so, and trains on."""
    _, step = stepping(rank, "mean", SIZES)
    if rank == 0:
        anybatch.NoiseScale(step, every=1)
    error = raised(lambda: step(batches_of((5, 4))[rank]))
    assert everywhere(type(error).__name__) == ["AnyBatchWarning", "NoneType"], error
    assert "on every rank" in str(error) or rank == 1


def one_micro_batch(rank: int, world: int) -> None:
    """One micro-batch over all ranks shows no noise; the next batch is measured."""
    _, step = stepping(rank, "mean", (None, None))
    noise = anybatch.NoiseScale(step, every=4)
    step(batches_of((5, 0))[rank])
    assert noise.measurements == 0
    step(batches_of((5, 1))[rank])
    assert noise.measurements == 1


CASES: Mapping[str, Case] = {
    "exact": exact,
    "other counts": other_counts,
    "scaled": scaled,
    "sampled": sampled,
    "not everywhere": not_everywhere,
    "one micro-batch": one_micro_batch,
}
FOUR: Mapping[str, Case] = {"four ranks": partial(four)}


@pytest.mark.parametrize("case", CASES)
def test_two_ranks(case: str, results: dict[str, str]) -> None:
    assert not results[case], results[case]


def test_four_ranks(tmp_path: Any) -> None:
    results = run_cases("test_ranks_noise", 4, tmp_path, "FOUR")
    assert not any(results.values()), results
