"""Budgets and devices in every form that a user may write, and what is refused."""

from typing import Any, get_args

import psutil
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from anybatch.errors import BatchError
from anybatch.options import check_plan
from anybatch.planning import devices
from anybatch.planning.devices import Target, budget_of, margin_of, segments_expand, target_of
from anybatch.records.plans import Confidence
from anybatch.units import format_bytes, parse_bytes

CPU = torch.device("cpu")
HERE = Target("cpu", "cpu", 0, True)
CARD = Target("24GiB", "cuda", 24 * 2**30, False)
UNITS = {
    "": 1,
    "B": 1,
    "K": 2**10,
    "G": 2**30,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
    "kB": 1000,
    "MB": 10**6,
    "GB": 10**9,
}


@given(st.integers(1, 10**15), st.sampled_from(sorted(UNITS)), st.sampled_from(["", " ", "  "]), st.booleans())
def test_whole_numbers_of_bytes_are_read_exactly(count: int, unit: str, space: str, lower: bool) -> None:
    text = f"{space}{count}{space}{unit.lower() if lower else unit}{space}"
    if count * UNITS[unit] < 2**63:
        assert parse_bytes(text) == count * UNITS[unit]
    else:
        with pytest.raises(ValueError, match="expected a number of bytes"):
            parse_bytes(text)


@given(st.integers(1, 10**6), st.integers(0, 999), st.sampled_from(["KiB", "MiB", "GiB", "MB"]))
def test_fractions_are_read(whole: int, thousandths: int, unit: str) -> None:
    exact = (whole * 1000 + thousandths) * UNITS[unit] / 1000
    assert abs(parse_bytes(f"{whole}.{thousandths:03}{unit}") - exact) <= 1


def _said_of(text: str) -> str:
    try:
        return "a number" if parse_bytes(text) >= 1 else "less than a byte"
    except ValueError as error:
        return "expected" if "expected a number of bytes" in str(error) else str(error)


@given(st.text(max_size=12))
def test_any_other_text_is_a_value_error(text: str) -> None:
    assert _said_of(text) in ("a number", "expected")


@pytest.mark.parametrize(
    "text", ["", "GiB", "-1GiB", "1e9", "0", "0GiB", "0.1B", "1 2 GiB", "8 gigabytes", "0x10", "nan"]
)
def test_what_is_no_number_of_bytes_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="expected a number of bytes"):
        parse_bytes(text)
    with pytest.raises(BatchError, match="memory="):
        budget_of(text, HERE, 0)


def test_a_number_too_long_for_anything_is_no_crash() -> None:
    assert _said_of("9" * 400 + "GiB") in ("a number", "expected")


@given(st.integers(1, 10**15))
def test_bytes_written_are_read_back_nearly(count: int) -> None:
    assert parse_bytes(format_bytes(count)) == pytest.approx(count, rel=0.06)


@given(st.integers(1, 2**60))
def test_an_int_is_bytes(count: int) -> None:
    assert budget_of(count, HERE, 10**9) == count
    assert budget_of(str(count), CARD, 0) == count
    check_plan(count, None, None)


@given(st.floats(1e-6, 1.0))
def test_a_float_is_a_share_of_the_device(share: float) -> None:
    assert budget_of(share, CARD, 10**9) == int(share * 24 * 2**30)
    check_plan(share, None, None)


@pytest.mark.parametrize(
    "memory", [0, -1, 0.0, -0.5, 1.5, 2**63, 10**400, float("nan"), float("inf"), True, False, None, [1], b"8GiB"]
)
def test_what_is_no_budget_is_refused(memory: Any) -> None:
    with pytest.raises(BatchError, match="memory="):
        budget_of(memory, HERE, 0)
    if memory is not None:
        with pytest.raises(BatchError, match="memory="):
            check_plan(memory, None, None)


@pytest.mark.parametrize(
    ("text", "share"), [("50%", 0.5), (" 12.5 % ", 0.125), ("100%", 1.0), ("0.5", 0.5), (".5", 0.5)]
)
def test_a_share_may_be_a_text(text: str, share: float) -> None:
    assert budget_of(text, CARD, 0) == budget_of(share, CARD, 0)
    check_plan(text, None, None)


@pytest.mark.parametrize("text", ["0%", "101%", "-5%", "%", "1.5", "50 percent"])
def test_what_is_no_share_is_refused(text: str) -> None:
    with pytest.raises(BatchError, match="share of the device such as '50%'"):
        budget_of(text, CARD, 0)


def test_shares_and_what_is_free_on_the_host() -> None:
    total = psutil.virtual_memory().total
    assert budget_of(1.0, HERE, 0) == total
    assert budget_of(0.25, HERE, 0) == int(0.25 * total)
    assert 0 < budget_of("free", HERE, 0) <= total
    assert budget_of("free", HERE, 10**15) >= 10**15  # what the step holds already is part of it
    assert budget_of("free", CARD, 10**15) == 24 * 2**30


def test_a_share_of_a_device_of_unknown_size_is_refused() -> None:
    for memory in ("free", 0.5):
        with pytest.raises(BatchError, match="not known"):
            budget_of(memory, target_of("cuda", CPU), 0)


@pytest.mark.parametrize("device", [None, "cpu", CPU])
def test_the_device_of_the_model_is_there(device: Any) -> None:
    assert target_of(device, CPU) == Target("cpu", "cpu", 0, True)


@pytest.mark.parametrize("name", ["h200", "H200", "NVIDIA H200", "nvidia_h200", " h200"])
def test_cards_are_known_by_their_names(name: str) -> None:
    target = target_of(name, CPU)
    assert (target.device_type, target.total, target.is_present) == ("cuda", 141 * 2**30, False)


def test_other_targets() -> None:
    assert target_of("24GiB", CPU).total == 24 * 2**30
    assert target_of("cuda:3", CPU).device_type == "cuda"
    assert target_of(torch.device("cuda"), CPU).is_present is False
    assert target_of(None, torch.device("meta")).is_present is False
    assert not target_of("cpu", torch.device("meta")).is_present


@pytest.mark.parametrize("device", ["h2000", "", "mps", 3, "gpu", 1.5, ["cpu"]])
def test_what_is_no_device_is_refused(device: Any) -> None:
    with pytest.raises(BatchError, match="device="):
        target_of(device, CPU)


def test_what_is_kept_free_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    devices._tell_margin.cache_clear()
    with caplog.at_level("INFO", logger="anybatch.planning.devices"):
        assert len({devices.usable_bytes(2**30, CARD, "predicted") for _ in range(3)}) == 1
    assert caplog.text.count("of the budget is kept free") == 1


@pytest.mark.parametrize("confidence", get_args(Confidence))
def test_less_is_kept_free_the_more_is_known(confidence: Confidence) -> None:
    worst = get_args(Confidence)[-1]
    for target in (HERE, CARD):
        assert 0 <= margin_of(target, "predicted") <= margin_of(target, confidence) <= margin_of(target, worst) < 0.5
        assert margin_of(target, confidence, expandable=True) <= margin_of(target, confidence)
    assert margin_of(HERE, "predicted") == 0


@pytest.mark.parametrize(
    ("said", "expands"),
    [("", False), ("expandable_segments:True", True), ("max_split_size_mb:64, expandable_segments: true", True),
     ("expandable_segments:False", False)],
)  # fmt: skip
def test_the_allocator_is_asked_for_by_the_environment(
    said: str, expands: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", said)
    assert segments_expand(Target("cuda:0", "cuda", 2**34, True)) is expands
    assert not segments_expand(CARD)
