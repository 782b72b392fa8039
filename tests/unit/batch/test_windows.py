"""Windows of several batches: nothing is lost, nothing counts twice, and a short last window is exact too."""

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import anybatch
import reference
from anybatch import BatchError

SIZES = st.lists(st.integers(1, 7), max_size=8)


class Falling(nn.Module):
    """One weight, by which every sample is multiplied."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros((), dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return -self.w * x


def mean_loss(model: Any, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).mean()  # type: ignore[no-any-return]


def unknown_length(batches: list[Any]) -> Iterator[Any]:
    """An iterable that can't say how long it is."""
    yield from batches


@pytest.mark.parametrize("loader", [list, unknown_length], ids=["list", "unknown length"])
@pytest.mark.parametrize("size", [None, 1, 3])
@pytest.mark.parametrize("window", [{"batches": 4}, {"samples": 12}, {"tokens": 12, "count": anybatch.count_samples}])
def test_a_short_last_window_moves_as_far_as_a_full_one(loader: Any, size: int | None, window: Any) -> None:
    model = Falling()
    step = anybatch.TrainStep(model, mean_loss, torch.optim.SGD(model.parameters(), lr=1.0), micro_batch_size=size)
    batches = [torch.ones(3, dtype=torch.float64) for _ in range(7)]
    positions = [0.0]
    for _ in range(2):  # epochs: nothing carries over
        for found in anybatch.windows(loader(batches), **window):
            step(found)
            positions.append(model.w.item())
    moves = [after - before for before, after in pairwise(positions)]
    assert moves == pytest.approx([1.0] * 4, rel=1e-12)  # divided by a full window it would have been 1, 0.75, 1, 0.75
    assert (step.updates, step.samples) == (4, 42)


def test_a_window_of_uneven_batches_is_a_mean_over_samples() -> None:
    model = Falling()
    batches = [torch.tensor([6.0, 6.0, 6.0]).double(), torch.tensor([2.0]).double()]
    (window,) = anybatch.windows(batches, batches=2)
    out = anybatch.backward(model, mean_loss, window)
    assert model.w.grad is not None
    assert model.w.grad.item() == pytest.approx(-5.0, rel=1e-12)  # a mean of means gives -4
    assert (out.count, out.micro_batches) == (4, 2)


def rows(batches: Any) -> list[int]:
    return [int(value) for batch in batches for value in batch["x"].tolist()]


def numbered(sizes: list[int]) -> list[dict[str, Any]]:
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    return [
        {"x": torch.arange(start, start + n), "names": [str(i) for i in range(start, start + n)], "flag": 1}
        for start, n in zip(starts, sizes, strict=True)
    ]


@given(sizes=SIZES, size=st.integers(1, 4))
def test_windows_by_batches(sizes: list[int], size: int) -> None:
    batches = numbered(sizes)
    found = list(anybatch.windows(unknown_length(batches), batches=size))
    assert [batch for window in found for batch in window] == batches
    assert all(len(window) == size for window in found[:-1])
    assert all(0 < len(window) <= size for window in found)


@given(sizes=SIZES, size=st.integers(1, 12))
def test_windows_by_samples(sizes: list[int], size: int) -> None:
    found = list(anybatch.windows(unknown_length(numbered(sizes)), samples=size))
    assert [row for window in found for row in rows(window)] == list(range(sum(sizes)))
    assert [len(rows(window)) for window in found[:-1]] == [size] * (len(found) - 1)
    for window in found:
        assert 0 < len(rows(window)) <= size
        assert all(
            batch["names"] == [str(row) for row in batch["x"].tolist()] and batch["flag"] == 1 for batch in window
        )
        assert all(len(batch["x"]) for batch in window)


@given(sizes=SIZES, limit=st.integers(1, 12))
def test_windows_by_tokens(sizes: list[int], limit: int) -> None:
    batches = numbered(sizes)
    found = list(
        anybatch.windows(unknown_length(batches), tokens=limit, count=lambda batch: torch.tensor(len(batch["x"])))
    )
    assert [batch for window in found for batch in window] == batches
    tokens = [len(rows(window)) for window in found]
    assert all(n <= limit or len(window) == 1 for n, window in zip(tokens, found, strict=True))
    for n, following in zip(tokens, found[1:], strict=False):
        assert n + len(following.batches[0]["x"]) > limit  # it was full


@pytest.mark.parametrize(("options", "consumed"), [({"batches": 2}, 2), ({"samples": 6}, 2), ({"samples": 5}, 2)])
def test_the_loader_is_not_read_ahead(options: Any, consumed: int) -> None:
    read: list[int] = []

    def loader() -> Iterator[Any]:
        for batch in numbered([3, 3, 3, 3]):
            read.append(len(batch["x"]))
            yield batch

    next(anybatch.windows(loader(), **options))
    assert len(read) == consumed


def test_leaves_that_are_not_cut() -> None:
    batches = [{"x": torch.arange(3.0), "weights": torch.ones(5)} for _ in range(2)]
    first, second = anybatch.windows(batches, samples=4, broadcast=("weights",))
    assert [len(batch["x"]) for batch in first] == [3, 1]
    assert [len(batch["x"]) for batch in second] == [2]
    assert all(len(batch["weights"]) == 5 for batch in (*first, *second))


@given(sizes=st.lists(st.integers(1, 5), min_size=1, max_size=4), size=st.integers(1, 6), by=st.integers(1, 8))
def test_cut_windows_give_the_gradient_of_the_batch_they_make(sizes: list[int], size: int, by: int) -> None:
    model = nn.Linear(2, 1).double()
    batches = [torch.randn(n, 2, dtype=torch.float64) for n in sizes]
    joined = torch.cat(batches)

    def loss_fn(model: Any, batch: torch.Tensor) -> torch.Tensor:
        return model(batch).square().mean()  # type: ignore[no-any-return]

    start = 0
    for window in anybatch.windows(batches, samples=by):
        whole = joined[start : start + by]
        expected, losses = reference.whole_gradients(model, loss_fn, whole)
        reference.clear(model)
        out = anybatch.backward(model, loss_fn, window, micro_batch_size=size)
        reference.assert_float64(reference.gradients_of(model), expected)
        reference.assert_value64(out.loss, losses["loss"])
        assert out.count == len(whole)
        start += by


def test_samples_of_a_window_are_packed_over_its_batches() -> None:
    model = nn.Linear(1, 1).double()
    samples = [[1.0, 2.0], [3.0], [4.0, 5.0, 6.0], [7.0]]
    seen: list[torch.Size] = []

    def collate(raw: list[list[float]]) -> torch.Tensor:
        return nn.utils.rnn.pad_sequence([torch.tensor(one).double() for one in raw], batch_first=True)

    def loss_fn(model: Any, batch: torch.Tensor) -> torch.Tensor:
        seen.append(batch.shape)
        return model(batch[..., None]).sum() / (batch != 0).sum()  # type: ignore[no-any-return]

    (window,) = anybatch.windows([samples[:2], samples[2:]], batches=2)
    out = anybatch.backward(
        model, loss_fn, window, collate=collate, cost=len, micro_batch_size=3, count=lambda batch: (batch != 0).sum(),
        verify="off",  # the bias sees the padding
    )  # fmt: skip
    assert out.count == 7
    assert sorted(tuple(shape) for shape in seen) == [(1, 2), (1, 3), (2, 1)]


def test_a_window_evaluates_too() -> None:
    model = nn.Linear(1, 1).double()
    step = anybatch.TrainStep(model, mean_loss, torch.optim.SGD(model.parameters(), lr=1.0), micro_batch_size=2)
    batches = [torch.ones(3, 1).double(), torch.zeros(1, 1).double()]
    (window,) = anybatch.windows(batches, batches=2)
    reference.assert_value64(step.evaluate(window).loss, mean_loss(model, torch.cat(batches)).item())


def test_an_empty_loader_gives_no_window() -> None:
    assert list(anybatch.windows([], batches=2)) == []
    assert list(anybatch.windows([], samples=2)) == []


def test_windows_kept_outside_of_the_epochs_go_through_the_loader_again() -> None:
    batches = numbered([3, 3, 3])
    for options in ({"batches": 2}, {"samples": 5}, {"tokens": 6, "count": anybatch.count_samples}):
        kept = anybatch.windows(batches, **options)
        epochs = [[rows(window) for window in kept] for _ in range(3)]
        assert epochs[0] == epochs[1] == epochs[2]
        assert sum(map(len, epochs[0])) == 9
    assert (len(anybatch.windows(batches, batches=2)), len(anybatch.windows(batches, batches=3))) == (2, 1)


def test_a_loader_that_is_used_up_is_not_trained_on_in_silence() -> None:
    kept = anybatch.windows(iter(numbered([3, 3])), batches=2)
    assert len(list(kept)) == 1
    with pytest.raises(BatchError, match=r"is exhausted; expected one that can be iterated in each epoch"):
        list(kept)


@pytest.mark.parametrize("loader", [5, None, mean_loss])
def test_windows_over_what_is_no_iterable_are_refused_where_they_are_made(loader: Any) -> None:
    with pytest.raises(BatchError, match="which is not iterable; expected a loader"):
        anybatch.windows(loader, batches=2)


def test_windows_over_what_has_items_by_number_alone_are_made() -> None:
    class Items:
        def __getitem__(self, number: int) -> Any:
            return numbered([3, 3, 3])[number]

    made: Any = Items()
    assert [rows(window) for window in anybatch.windows(made, batches=2)] == [[0, 1, 2, 3, 4, 5], [6, 7, 8]]


def test_what_next_began_a_loop_goes_on_with() -> None:
    kept = anybatch.windows(numbered([3, 3, 3]), batches=1)
    first = next(kept)
    assert [rows(window) for window in (first, *kept)] == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    assert len(list(kept)) == 3
    with pytest.raises(TypeError, match="batches="):
        len(anybatch.windows(numbered([3]), samples=2))


def test_time_first_batches_are_cut_by_their_samples() -> None:
    batches = [{"x": torch.arange(12.0).reshape(4, 3), "y": torch.arange(3)} for _ in range(2)]
    found = list(anybatch.windows(batches, samples=4, layout={"x": 1}))
    assert [[tuple(batch["x"].shape) for batch in window] for window in found] == [[(4, 3), (4, 1)], [(4, 2)]]


def test_a_loader_that_begins_again_after_its_end_is_not_asked_again() -> None:
    class Again:
        def __init__(self) -> None:
            self.at = 0

        def __iter__(self) -> Iterator[torch.Tensor]:
            return self

        def __next__(self) -> torch.Tensor:
            self.at = (self.at + 1) % 6
            if not self.at:
                raise StopIteration
            return torch.full((2, 3), float(self.at))

    windows = anybatch.windows(Again(), batches=2)
    assert [len(next(windows)) for _ in range(3)] == [2, 2, 1]
    assert next(windows, None) is None
