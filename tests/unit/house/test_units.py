"""Bytes and seconds as text, and the small pieces that everything is counted with."""

import json
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import anybatch
from anybatch import Mean, count_samples, count_tokens
from anybatch.batch.batches import pack_by_cost, sizes_of
from anybatch.units import format_bytes, format_seconds


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (1536, "1.5 KiB"), (-2048, "-2.0 KiB"), (2**20, "1.0 MiB"),
        (389 * 2**20, "389.0 MiB"), (8 * 2**30, "8.0 GiB"), (2**40, "1.0 TiB"), (5 * 2**50, "5.0 PiB"),
        (2**61, "2048.0 PiB"),
    ],
)  # fmt: skip
def test_bytes(count: int, text: str) -> None:
    assert format_bytes(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 us"), (1e-6, "1 us"), (0.00042, "420 us"), (0.034, "34.0 ms"), (1, "1.0 s"), (99.94, "99.9 s"),
     (100, "1 min 40 s"), (150, "2 min 30 s"), (3600, "60 min 0 s")],
)  # fmt: skip
def test_seconds(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


@given(st.floats(0, 2**60, allow_nan=False))
def test_bytes_are_never_written_with_more_than_1024_of_a_unit(count: float) -> None:
    number, unit = format_bytes(count).split()
    assert float(number) <= 1024
    assert unit in ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


@given(st.integers(1, 200), st.one_of(st.none(), st.integers(1, 250)))
def test_sizes(rows: int, size: int | None) -> None:
    found = sizes_of(rows, size)
    assert sum(found) == rows
    assert all(n == min(size or rows, rows) for n in found[:-1])
    assert 0 < found[-1] <= min(size or rows, rows)


@given(st.lists(st.floats(0.5, 50), min_size=1, max_size=30), st.floats(0, 200))
def test_packs(costs: list[float], slack: float) -> None:
    limit = max(costs) + slack
    packs = pack_by_cost(costs, limit)
    assert sorted(i for pack in packs for i in pack) == list(range(len(costs)))
    assert all(
        pack == sorted(pack) and len(pack) * max(costs[i] for i in pack) <= limit * (1 + 1e-12) for pack in packs
    )
    for pack, following in pairwise(packs):
        assert min(costs[i] for i in pack) >= max(costs[i] for i in following)  # like is padded with like
        assert (len(pack) + 1) * max(costs[i] for i in pack) > limit  # and no room is left
    assert pack_by_cost(costs, None) == [list(range(len(costs)))]
    assert sorted(i for pack in pack_by_cost(costs, 0.25, "alone") for i in pack) == list(range(len(costs)))


def test_means() -> None:
    assert Mean(3.0, 2).value == 1.5
    assert Mean(0.0, 0).value == 0.0
    joined = Mean(torch.tensor(3.0), torch.tensor(2)) + Mean(1.0, 2)
    assert joined.value == 1.0
    assert json.loads(json.dumps(joined.to_dict())) == {"total": 4.0, "count": 4.0, "value": 1.0}
    with pytest.raises(TypeError):
        Mean(1.0, 1) + 1.0  # type: ignore[operator]
    with pytest.raises(AttributeError):
        Mean(1.0, 1).total = 2.0  # type: ignore[misc]


def test_count_tokens() -> None:
    labels = torch.tensor([[5, -100, 7], [1, 2, -100]])
    batch = {"deep": [{"labels": labels}], "x": torch.zeros(2, 1)}
    assert int(count_tokens("deep.0.labels")(batch)) == 4
    assert int(count_tokens("deep.0.labels", shift=1)(batch)) == 2
    assert int(count_tokens("deep.0.labels", ignore_index=7)(batch)) == 5
    assert int(count_tokens("", shift=3)(labels)) == 0
    assert int(count_tokens("")(labels[0])) == 2
    assert int(count_tokens("labels")({"labels": labels.to(torch.uint8)})) == 6


def test_count_samples() -> None:
    assert count_samples(torch.zeros(5, 3)) == 5
    assert count_samples({"x": torch.zeros(5, 3), "names": list("abcde")}) == 5
    assert count_samples(["a", "b"]) == 2


def test_results_are_plain_values_once_they_are_read() -> None:
    model = torch.nn.Linear(3, 1)
    step = anybatch.TrainStep(
        model, lambda model, batch: (model(batch).mean(), {"per sample": batch, "m": Mean(torch.tensor(3), 2)}),
        torch.optim.SGD(model.parameters(), lr=0.1), micro_batch_size=2, clip_norm=float("inf"),
    )  # fmt: skip
    out = step(torch.ones(5, 3))
    facts = json.loads(json.dumps(out.to_dict()))
    assert facts["losses"] == {"loss": out.loss}
    assert (facts["counts"], facts["metrics"], facts["micro_batches"]) == ({"loss": 5}, {"m": 1.5}, 3)
    assert facts["grad_norm"] == pytest.approx(2.0)
    assert facts["attempts"] == [
        {"micro_batch_size": 2, "micro_batches": 3, "samples": 5, "outcome": "done", "where": ""}
    ]
    assert "loss=" in repr(out)
    assert "micro_batches=3" in repr(out)
    assert type(out.count) is int
