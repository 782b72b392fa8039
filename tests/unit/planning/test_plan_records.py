"""Plans and memories are plain facts: they come back from JSON as they went, and damaged ones are refused."""

import json
import math
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anybatch.errors import PlanMismatch
from anybatch.records.memory import CATEGORIES, Memory
from anybatch.records.plans import VERSION, Confidence, ModuleShare, Plan, PlanRow
from plan_samples import PLAN

NAMES = st.text(min_size=1, max_size=12)
BYTES = st.integers(0, 2**60)
SECONDS = st.none() | st.floats(0, 1e6)
NAME_LISTS = st.lists(NAMES, max_size=4).map(tuple)


def _row(*given: Any, loss: tuple[str, int], **options: Any) -> PlanRow:
    head, loss_chunks = loss
    options |= {"head": head, "loss_chunks": loss_chunks}
    return PlanRow(*given, **options)


HEADS = st.just(("", 1)) | st.tuples(NAMES, st.integers(2, 64))
ROWS = st.builds(
    _row,
    st.integers(1, 10**9) | st.floats(0.01, 1e9),
    st.integers(1, 10**6),
    recompute=NAME_LISTS,
    offload=NAME_LISTS,
    loss=HEADS,
    autocast=st.sampled_from(["", "bfloat16", "float16"]),
    peak_bytes=BYTES,
    seconds=SECONDS,
    confidence=st.sampled_from(get_args(Confidence)),
)
PLANS = st.builds(
    Plan,
    ROWS,
    st.lists(ROWS, max_size=3).map(tuple),
    budget=BYTES,
    samples=st.integers(0, 10**6),
    device=NAMES,
    whole_bytes=BYTES,
    smallest_bytes=BYTES,
    at_peak=st.dictionaries(st.sampled_from(CATEGORIES), BYTES),
    binding=st.text(max_size=20),
    modules=st.lists(st.builds(ModuleShare, NAMES, BYTES, BYTES, SECONDS), max_size=3).map(tuple),
    relative_time=st.booleans(),
    shapes=st.dictionaries(NAMES, st.lists(st.integers(0, 10**6), max_size=3).map(tuple), max_size=3),
    fingerprint=st.dictionaries(NAMES, st.text(max_size=10), max_size=3),
)


@given(PLANS)
def test_a_plan_comes_back_from_json_as_it_went(plan: Plan) -> None:
    text = json.dumps(plan.to_dict(), allow_nan=False)
    assert Plan.from_dict(json.loads(text)) == plan
    assert Plan.from_dict(plan.to_dict()) == plan


@given(PLANS)
def test_every_plan_has_words(plan: Plan) -> None:
    for thing in (plan, plan.chosen, *plan.alternatives):
        assert str(thing).strip()
    assert plan.confidence in str(plan)


@pytest.mark.parametrize(
    ("earlier", "now"), [("exact", "predicted"), ("bounded", "estimated"), ("unknown", "estimated")]
)
def test_the_words_of_earlier_plans_are_read(earlier: str, now: str) -> None:
    values = Plan(PlanRow(2, 3, peak_bytes=5)).to_dict()
    values["chosen"]["confidence"] = earlier
    assert Plan.from_dict(values).confidence == now


def test_a_plan_comes_back_from_a_file(tmp_path: Path) -> None:
    PLAN.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == PLAN
    assert Plan.load(str(tmp_path / "plan.json")) == PLAN


@given(ROWS)
def test_a_row_says_what_it_trades(row: PlanRow) -> None:
    assert PlanRow.from_dict(row.to_dict()) == row
    assert ("recompute" in row.optimizations) == bool(row.recompute)
    assert ("offload" in row.optimizations) == bool(row.offload)
    assert ("chunks" in row.optimizations) == (row.loss_chunks > 1)
    assert (row.optimizations == "") == (
        not row.recompute and not row.offload and row.loss_chunks == 1 and not row.autocast
    )


def test_what_a_plan_gives_is_not_what_it_holds() -> None:
    values = PLAN.to_dict()
    values["at_peak"]["parameters"] = 0
    values["fingerprint"].clear()
    values["chosen"]["recompute"].append("h.9")
    assert PLAN.at_peak["parameters"] > 0
    assert PLAN.fingerprint
    assert len(PLAN.chosen.recompute) == 3


@pytest.mark.parametrize("fault", [{"version": VERSION + 1}, {"version": None}, {"kind": "certificate"}])
def test_another_version_is_refused(fault: dict[str, Any]) -> None:
    with pytest.raises(PlanMismatch, match="Plan again"):
        Plan.from_dict({**PLAN.to_dict(), **fault})


@pytest.mark.parametrize("values", [None, [], "plan", 3, {}])
def test_what_is_no_plan_is_refused(values: Any) -> None:
    with pytest.raises(PlanMismatch):
        Plan.from_dict(values)


@pytest.mark.parametrize("content", ["", "{", "[1, 2]", "\x00\xff", '{"version": 1}', "null"])
def test_a_damaged_file_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "plan.json"
    path.write_bytes(content.encode("latin1"))
    with pytest.raises(PlanMismatch):
        Plan.load(path)


@pytest.mark.parametrize("name", [name for name in PLAN.to_dict() if name not in ("version", "kind")])
def test_a_plan_without_one_of_its_parts_is_refused(name: str) -> None:
    values = PLAN.to_dict()
    del values[name]
    with pytest.raises(PlanMismatch, match="damaged"):
        Plan.from_dict(values)


@pytest.mark.parametrize(
    "damage",
    [
        {"micro_batch_size": "16"},
        {"micro_batch_size": 0},
        {"micro_batch_size": -4},
        {"micro_batch_size": math.nan},
        {"micro_batch_size": None},
        {"micro_batches": 0},
        {"recompute": "layers"},
        {"recompute": [1]},
        {"recompute": None},
        {"offload": 3},
        {"loss_chunks": 0},
        {"loss_chunks": 8, "head": ""},
        {"peak_bytes": "much"},
        {"peak_bytes": -1},
        {"autocast": "int8"},
        {"confidence": "sure"},
    ],
    ids=str,
)
def test_a_row_that_nothing_can_follow_is_refused(damage: dict[str, Any]) -> None:
    values = PLAN.to_dict()
    values["chosen"] = {**values["chosen"], **damage}
    with pytest.raises(PlanMismatch):
        Plan.from_dict(values)


@pytest.mark.parametrize("name", ["chosen", "alternatives", "modules", "shapes", "fingerprint", "at_peak"])
@pytest.mark.parametrize("value", [None, 3, "text"])
def test_a_part_of_another_kind_is_refused(name: str, value: Any) -> None:
    with pytest.raises(PlanMismatch):
        Plan.from_dict({**PLAN.to_dict(), name: value})


@pytest.mark.parametrize("name", sorted(PLAN.fingerprint))
def test_a_fingerprint_that_differs_is_named(name: str) -> None:
    here = {**PLAN.fingerprint, name: "something else"}
    with pytest.raises(PlanMismatch, match=name) as caught:
        PLAN.check_fingerprint(here)
    assert caught.value.changed == {name: (PLAN.fingerprint[name], "something else")}


def test_the_same_fingerprint_passes() -> None:
    PLAN.check_fingerprint(dict(PLAN.fingerprint))
    PLAN.check_fingerprint({**PLAN.fingerprint, "what a newer version asks": "anything"})


@given(BYTES, BYTES, st.dictionaries(st.sampled_from(CATEGORIES), BYTES))
def test_every_memory_has_words_and_plain_values(peak: int, end: int, at_peak: dict[str, int]) -> None:
    memory = Memory(peak, end, at_peak, operation="mm")
    assert str(memory)
    assert json.loads(json.dumps(memory.to_dict()))["at_peak"] == at_peak
    assert Memory(**memory.to_dict()) == memory
