"""The noise scale from norms: unbiased for any sizes, with an interval that covers, and advice that follows from it.

How it could be silently wrong: sizes weighted wrongly (the usual formula is 2.9 times off); the mean of ratios in place
of the ratio of means; a beginning that is biased towards zero; an interval that is too narrow, or that is finite where
the signal may be zero.
"""

import json
import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import anybatch
from anybatch import NoiseScale
from anybatch.scaling.noiseestimates import Estimate, RatioOfMeans, estimate, student
from anybatch.scaling.noisescale import _Batch

UNEVEN = (3, 13, 1, 15, 8, 8, 11, 5)
TRACE, SIGNAL = 69.79, 69.79 / 13.36


def expected_norms(counts: list[int], trace: float, signal: float) -> tuple[list[float], float]:
    """The expectations of the squared norms of micro-batches and of the whole."""
    return [signal + trace / count for count in counts], signal + trace / sum(counts)


def usual(norms_sq: list[float], counts: tuple[int, ...], total_norm_sq: float) -> float:
    """The formula for equal sizes, with the mean size, as libraries have it."""
    large, small = sum(counts), sum(counts) / len(counts)
    mean = math.fsum(norms_sq) / len(norms_sq)
    signal = (large * total_norm_sq - small * mean) / (large - small)
    return (mean - total_norm_sq) / (1 / small - 1 / large) / signal


def drawn(counts: tuple[int, ...], mean: torch.Tensor, root: torch.Tensor, draws: int) -> list[Estimate]:
    """Estimates from simulated gradients: normal, with the covariance ``root root^T`` for a sample."""
    sizes = torch.tensor(counts, dtype=torch.float64)
    noise = torch.randn(draws, len(counts), len(mean), dtype=torch.float64) @ root.T
    gradients = mean + noise / sizes.sqrt()[:, None]
    whole = (gradients * (sizes / sizes.sum())[:, None]).sum(1)
    norms, totals = gradients.square().sum(2).tolist(), whole.square().sum(1).tolist()
    return [estimate(one, list(counts), total) for one, total in zip(norms, totals, strict=True)]


def test_the_vector_worked_by_hand() -> None:
    noise = NoiseScale(None)
    noise.update([25.0, 169.0], [1, 1], 80.0)
    assert (noise.trace, noise.signal) == (34.0, 63.0)
    assert noise.value == pytest.approx(0.539683, abs=5e-7)


def test_uneven_sizes_are_exact_where_the_usual_formula_is_2_9_times_off() -> None:
    norms, total = expected_norms(list(UNEVEN), TRACE, SIGNAL)
    found = estimate(norms, UNEVEN, total)
    assert found.trace == pytest.approx(TRACE, rel=1e-12)
    assert found.trace / found.signal == pytest.approx(13.36, rel=1e-12)
    assert usual(norms, UNEVEN, total) == pytest.approx(38.2, abs=0.05)


@given(
    counts=st.lists(st.integers(1, 50), min_size=2, max_size=12),
    trace=st.floats(0, 1e3),
    signal=st.floats(0, 1e3),
)
def test_estimates_are_unbiased_for_any_sizes(counts: list[int], trace: float, signal: float) -> None:
    norms, total = expected_norms(counts, trace, signal)
    found = estimate(norms, counts, total)  # linear in the norms, so their expectations give its expectation
    size = trace + signal + 1e-300
    assert abs(found.trace - trace) <= 1e-10 * size * sum(counts)
    assert abs(found.signal - signal) <= 1e-10 * size * sum(counts)


@given(number=st.integers(2, 12), size=st.integers(1, 40), seed=st.integers(0, 2**31))
def test_equal_sizes_give_the_usual_formula(number: int, size: int, seed: int) -> None:
    gradients = torch.randn(number, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) + 1
    norms, total = gradients.square().sum(1).tolist(), gradients.mean(0).square().sum().item()
    counts = (size,) * number
    found = estimate(norms, counts, total)
    large = size * number
    signal = (large * total - size * math.fsum(norms) / number) / (large - size)
    assert found.signal == pytest.approx(signal, rel=1e-9, abs=1e-9)


def test_simulated_gradients_give_their_covariance() -> None:
    mean, root = torch.linspace(-1, 1, 12, dtype=torch.float64), torch.randn(12, 12, dtype=torch.float64)
    found = torch.tensor(drawn(UNEVEN, mean, root, 4000), dtype=torch.float64)
    truth = torch.tensor([root.square().sum().item(), mean.square().sum().item()], dtype=torch.float64)
    deviation = found.std(0) / math.sqrt(len(found))
    assert ((found.mean(0) - truth).abs() < 4 * deviation).all()
    assert (deviation < 0.05 * truth).all()  # the test can tell


@pytest.mark.parametrize("strength", [1.0, 0.3])
@pytest.mark.parametrize("number", [4, 12, 60])
def test_the_interval_covers(number: int, strength: float) -> None:
    """Over 400 histories at frozen weights the interval of 90 % holds the truth in 85 to 95 %."""
    mean = strength * torch.linspace(-1, 1, 12, dtype=torch.float64)
    root = torch.diag(torch.linspace(0.5, 2, 12, dtype=torch.float64))
    truth = (root.square().sum() / mean.square().sum()).item()
    covered, widths = 0, []
    estimates = drawn(UNEVEN, mean, root, 400 * number)
    for start in range(0, len(estimates), number):
        ratio = RatioOfMeans(0.9)
        for found in estimates[start : start + number]:
            ratio.add(found)
        low, high = ratio.interval
        covered += low <= truth <= high
        widths.append(high - low)
    assert 0.85 * 400 <= covered <= 0.95 * 400, covered
    if strength == 1.0 and number == 60:
        assert sorted(widths)[200] < 2 * truth


def test_the_ends_of_the_interval_are_those_of_fieller() -> None:
    """At either end, noise less that many times the signal is as far from 0 as the quantile allows."""
    estimates = drawn(UNEVEN, torch.linspace(-1, 1, 12, dtype=torch.float64), torch.eye(12, dtype=torch.float64), 9)
    ratio = RatioOfMeans(0.8)
    for found in estimates:
        ratio.add(found)
    weights = [0.8**age for age in reversed(range(9))]
    total, squares = sum(weights), sum(w * w for w in weights)
    for end in ratio.interval:
        rests = [found.trace - end * found.signal for found in estimates]
        mean = sum(w * rest for w, rest in zip(weights, rests, strict=True)) / total
        spread = sum(w * (rest - mean) ** 2 for w, rest in zip(weights, rests, strict=True)) / (total - squares / total)
        quantile = student(total**2 / squares - 1)
        assert mean**2 == pytest.approx(quantile**2 * spread * squares / total**2, rel=1e-9)


def test_without_signal_there_is_no_upper_end() -> None:
    ratio = RatioOfMeans(0.9)
    for found in drawn(UNEVEN, torch.zeros(12, dtype=torch.float64), torch.eye(12, dtype=torch.float64), 40):
        ratio.add(found)
    assert math.isinf(ratio.interval[1])
    assert ratio.interval[0] > 64  # more than the batch, that much can be said


def test_the_average_is_the_weighted_one_from_the_first_on() -> None:
    values = [Estimate(3.0, 5.0), Estimate(7.0, -1.0), Estimate(2.0, 4.0)]
    ratio = RatioOfMeans(0.9)
    for number, value in enumerate(values, start=1):
        ratio.add(value)
        weights = [0.9 ** (number - 1 - at) for at in range(number)]
        for found, at in zip(ratio.means, (0, 1), strict=True):
            mean = sum(w * v[at] for w, v in zip(weights, values, strict=False)) / sum(weights)
            assert found == pytest.approx(mean, rel=1e-12)
    deviations = [(v[0] - ratio.means[0]) * (v[1] - ratio.means[1]) for v in values]
    expected = sum(w * d for w, d in zip((0.81, 0.9, 1.0), deviations, strict=True))
    assert ratio.state_dict()["products"][1] == pytest.approx(expected, rel=1e-12)
    assert ratio.value == ratio.means.trace / ratio.means.signal


def test_quantiles_of_student() -> None:
    table = {2: 2.920, 3: 2.353, 5: 2.015, 10: 1.812, 30: 1.697}
    for freedom, quantile in table.items():
        assert student(freedom) == pytest.approx(quantile, rel=0.01)


def test_before_the_first_measurement_nothing_is_known() -> None:
    noise = NoiseScale(None)
    assert noise.value is noise.trace is noise.signal is None
    assert noise.interval == (0.0, math.inf)
    assert noise.advice.startswith("no noise scale yet")


def fed(value: float, batch: int, micro_batches: int = 8) -> NoiseScale:
    """A noise scale that is known well."""
    noise = NoiseScale(None)
    counts = [batch // micro_batches] * micro_batches
    for factor in (0.99, 1.01, 1.0, 0.98, 1.02):
        noise.update(*_with(expected_norms(counts, value * factor, 1.0), counts))
    return noise


def _with(norms: tuple[list[float], float], counts: list[int]) -> tuple[list[float], list[int], float]:
    return norms[0], counts, norms[1]


@pytest.mark.parametrize(
    ("value", "batch", "said"),
    [
        # (1 + 40/64) / (1 + 40/512) = 1.507 times the updates, of 64/512 the size: 0.188 of the samples
        (40, 512, "; 64 (1 instead of 8 micro-batches) would take 1.5 times the updates and 0.19 of the samples"),
        (40, 64, "a batch of 64 is about as large"),
        (1000, 64, "a batch of 64 is below it; twice as large a batch would take 0.53 times as many updates"),
    ],
)  # fmt: skip
def test_advice(value: float, batch: int, said: str) -> None:
    advice = fed(value, batch).advice
    assert said in advice
    assert advice.startswith(f"noise scale about {value} samples [")


def test_advice_where_there_is_no_signal() -> None:
    noise = NoiseScale(None)
    noise.update([1.0, 1.1, 1.0, 0.9], [2, 2, 2, 2], 0.2)
    assert noise.value == math.inf
    assert "not known well enough yet: the signal is lost" in noise.advice


def test_one_measurement_is_no_ground_for_advice() -> None:
    noise = NoiseScale(None)
    noise.update([9.0, 9.0, 9.0, 9.0], [128] * 4, 8.9)
    assert noise.advice.startswith("noise scale not known well enough yet: about")


def test_a_scale_that_is_certainly_larger_is_told_without_an_upper_end() -> None:
    noise = NoiseScale(None)
    for found in drawn(UNEVEN, torch.zeros(12, dtype=torch.float64), torch.eye(12, dtype=torch.float64), 60):
        noise._ratio.add(found)
    noise._batches.append(_Batch(64.0, 8, "samples"))
    assert "a batch of 64 is below it, larger ones pay" in noise.advice


def test_what_the_interval_leaves_open_is_not_claimed() -> None:
    noise = NoiseScale(None)
    counts = [64] * 8
    for value in (20.0, 300.0, 40.0, 700.0):
        noise.update(*_with(expected_norms(counts, value, 1.0), counts))
    assert noise.value is not None
    assert noise.interval[1] > 512
    assert "past it" not in noise.advice


def test_state_survives_json() -> None:
    noise = fed(40, 512)
    again = NoiseScale(None)
    again.load_state_dict(json.loads(json.dumps(noise.state_dict())))
    for one in (noise, again):
        one.update([3.0, 4.0], [5, 7], 2.0)
    assert again.state_dict() == noise.state_dict()
    assert (again.value, again.interval, again.advice) == (noise.value, noise.interval, noise.advice)


def test_micro_batches_without_samples_are_left_out() -> None:
    one, other = NoiseScale(None), NoiseScale(None)
    one.update(torch.tensor([25.0, 0.0, 169.0]), torch.tensor([1, 0, 1]), torch.tensor(80.0))
    other.update([25.0, 169.0], [1, 1], 80.0)
    assert one.state_dict() == other.state_dict()


@pytest.mark.parametrize(
    ("norms", "counts", "total", "said"),
    [
        ([1.0], [4], 1.0, "at least two"),
        ([1.0, 2.0], [4, 0], 1.0, "at least two"),
        ([1.0, 2.0], [4], 1.0, "one of each"),
        ([1.0, -2.0], [4, 4], 1.0, "at least 0"),
        ([1.0, 2.0], [4, math.nan], 1.0, "finite"),
        ([1.0, 2.0], [4, 4], math.inf, "finite"),
        (["one", 2.0], [4, 4], 1.0, "expected numbers"),
    ],
)
def test_bad_measurements_are_refused(norms: list[float], counts: list[float], total: float, said: str) -> None:
    noise = NoiseScale(None)
    before = noise.state_dict()
    with pytest.raises(anybatch.BatchError, match=said):
        noise.update(norms, counts, total)
    assert noise.state_dict() == before


@pytest.mark.parametrize("options", [{"every": 0}, {"every": 1.5}, {"every": True}, {"decay": 1.0}, {"decay": "1"}])
def test_bad_options_are_refused(options: dict[str, object]) -> None:
    with pytest.raises(anybatch.BatchError, match="expected"):
        NoiseScale(None, **options)  # type: ignore[arg-type]


def test_a_state_of_something_else_is_refused() -> None:
    with pytest.raises(anybatch.BatchError, match="version"):
        NoiseScale(None).load_state_dict({**NoiseScale(None).state_dict(), "version": 1})


@pytest.mark.parametrize("damage", [{"countdown": None}, {"batches": [[64, 0, "samples"]]}, {"moments": {}}], ids=str)
def test_a_damaged_state_is_loaded_in_no_part(damage: dict[str, Any]) -> None:
    noise = fed(40, 512)
    before = noise.state_dict()
    with pytest.raises(anybatch.BatchError, match="Nothing was loaded"):
        noise.load_state_dict({**before, "countdown": 7, **damage})
    assert noise.state_dict() == before


def test_advice_is_of_the_usual_batch_and_not_of_the_last_of_an_epoch() -> None:
    noise = NoiseScale(None)
    for _ in range(3):
        for size in (512, 512, 512, 261):
            parts = [64] * (size // 64) + [size % 64] * bool(size % 64)
            noise.update(*_with(expected_norms(parts, 20.0, 1.0), parts))
    assert "a batch of 512 is past it" in noise.advice
    assert "of 8 micro-batches" in noise.advice
