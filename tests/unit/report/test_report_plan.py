"""A plan as sentences, tables and a page."""

import itertools
import re
from dataclasses import replace
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anybatch.records.plans import Confidence, ModuleShare, Plan, PlanRow
from anybatch.report import frontier
from anybatch.report.svg import best_of
from anybatch.report.tables import in_runs
from plan_samples import CHOSEN, EIGHTHS, HALVES, MIB, PLAN, QUARTERS, SMALLEST, WHOLE

ROWS = st.builds(
    PlanRow,
    st.integers(1, 64).map(float),
    st.integers(1, 64),
    recompute=st.sampled_from([(), ("h.0",), ("h.0", "h.1")]),
    loss_chunks=st.sampled_from([1, 4]),
    peak_bytes=st.integers(1, 100 * MIB),
    seconds=st.none() | st.floats(1e-6, 1e3),
    confidence=st.sampled_from(get_args(Confidence)),
)
PLANS = st.builds(
    Plan,
    ROWS,
    st.lists(ROWS, max_size=6).map(tuple),
    budget=st.integers(1, 1000 * MIB),
    samples=st.integers(1, 100),
    relative_time=st.booleans(),
)


def way_of(row: PlanRow) -> PlanRow:
    return replace(row, peak_bytes=0, seconds=None, confidence="predicted")


def test_ways_come_once_those_that_fit_first_the_fastest_first() -> None:
    assert frontier.rows_of(PLAN) == (CHOSEN, QUARTERS, EIGHTHS, SMALLEST, WHOLE, HALVES)
    assert frontier.rows_of(replace(PLAN, alternatives=())) == (CHOSEN,)
    predicted = replace(CHOSEN, seconds=0.001)  # the chosen one as it was before it was measured
    assert frontier.rows_of(replace(PLAN, alternatives=(predicted, QUARTERS))) == (CHOSEN, QUARTERS)


@pytest.mark.parametrize(("device", "why"), [("cpu", "but its time was"), ("h200", "leaves less room than the alloc")])
def test_what_fits_and_seems_faster_is_told_from_what_is_chosen(device: str, why: str) -> None:
    faster = replace(QUARTERS, seconds=0.057)
    plan = replace(PLAN, alternatives=(faster, WHOLE), device=device)
    rows = frontier.rows_of(plan)
    assert rows == (CHOSEN, faster, WHOLE)  # nothing that was not timed stands above what was chosen
    assert [row[0] for row in frontier.rows_table(plan, rows).rows] == ["*", "~", "!"]
    assert why in "".join(frontier.rows_notes(plan, rows))
    assert "~" not in "".join(frontier.rows_notes(PLAN, frontier.rows_of(PLAN)))


@given(PLANS)
def test_no_way_is_lost_and_the_chosen_one_is_marked_once(plan: Plan) -> None:
    rows = frontier.rows_of(plan)
    assert set(rows) <= {plan.chosen, *plan.alternatives}
    ways = [way_of(row) for row in rows]
    assert len(ways) == len(set(ways))
    assert set(ways) == {way_of(row) for row in (plan.chosen, *plan.alternatives)}
    table = frontier.rows_table(plan, rows)
    marks = [row[0] for row in table.rows]
    assert [rows[index] for index in table.marked] == [plan.chosen]
    assert [marks[index] for index in table.marked] == ["*"]
    for row, mark in zip(rows, marks, strict=True):
        assert (mark == "!") == (row.peak_bytes > plan.budget and row != plan.chosen)
        if mark == "":
            assert row.seconds is None or (plan.chosen.seconds or 0.0) <= row.seconds
    assert rows[0] == plan.chosen
    fitting = [row.seconds for row, mark in zip(rows, marks, strict=True) if mark in ("~", "")]
    known = [seconds for seconds in fitting if seconds is not None]
    assert known == sorted(known)
    assert fitting[: len(known)] == known
    assert all(len(row) == len(table.header) for row in table.rows)


def test_the_table_of_ways_has_the_numbers_of_each() -> None:
    table = frontier.rows_table(PLAN, [CHOSEN, EIGHTHS, SMALLEST])
    assert table.rows == (
        ("*", "2 of 32", "3", "-", "-", "23.0 MiB", "58.0 ms", "predicted"),
        ("", "8 of 8", "-", "1", "4", "12.0 MiB", "110.0 ms", "estimated"),
        ("", "16 of 4", "1", "-", "-", "10.0 MiB", "unknown", "estimated"),
    )


def test_times_that_are_relative_are_never_shown_as_seconds() -> None:
    plan = replace(PLAN, relative_time=True, device="h200")
    table = frontier.rows_table(plan, frontier.rows_of(plan))
    assert "relative" in table.header
    assert [row[6] for row in table.rows] == ["1.00x", "1.21x", "1.90x", "unknown", "0.86x", "0.90x"]
    assert "times are estimated, relative to the chosen one" in frontier.rows_notes(plan, [CHOSEN])
    assert "time" not in dict(frontier.facts_of(plan))
    shares = [row[3] for row in frontier.modules_table(plan, 10).rows]
    assert shares[0] == "18%"  # 10 of 55
    text = "".join(map(str, (table, frontier.facts_of(plan), frontier.modules_table(plan, 10))))
    assert not re.search(r"\d (us|ms|s)\b", text)


def test_facts_name_the_optimizations_and_what_it_takes() -> None:
    facts = dict(frontier.facts_of(PLAN))
    assert facts["recompute"] == "h.0 to h.2"
    assert facts["peak"] == "23.0 MiB predicted, 24.0 MiB allowed"
    assert facts["confidence"].startswith("predicted: ")
    other = dict(frontier.facts_of(replace(PLAN, chosen=replace(EIGHTHS, autocast="bfloat16"))))
    assert (other["offload"], other["loss"], other["autocast"]) == ("h.4", "of head in 4 chunks", "bfloat16")
    assert "recompute" not in other
    assert frontier.summary_of(PLAN) == "64 samples within 24.0 MiB on cpu: 2 micro-batches of 32, recompute 3 blocks"


@pytest.mark.parametrize(
    ("names", "text"),
    [
        (["h.0", "h.1"], "h.0, h.1"),
        (["h.0", "h.1", "h.2"], "h.0 to h.2"),
        (["h.9", "h.10", "h.11", "k.12"], "h.9 to h.11, k.12"),
        (["h.2", "h.1", "h.0"], "h.2, h.1, h.0"),
        (["net.2:5", "net.6", "a.b"], "net.2:5, net.6, a.b"),
        ([], ""),
    ],
)
def test_runs_of_numbered_names_are_written_as_one(names: list[str], text: str) -> None:
    assert ", ".join(in_runs(names)) == text


def test_shares_are_of_what_is_alive_the_largest_first() -> None:
    shares = frontier.shares_of(PLAN.at_peak)
    assert [name for name, _, _ in shares] == ["activations", "parameters", "gradients", "inputs"]
    assert sum(count for _, count, _ in shares) == PLAN.peak_bytes
    assert sum(part for _, _, part in shares) == pytest.approx(1)
    assert frontier.shares_of({}) == ()
    assert frontier.shares_table(PLAN.at_peak).rows[0] == ("activations", "12.0 MiB", "52%")


def test_modules_are_ranked_by_all_that_they_hold() -> None:
    small = replace(PLAN.modules[0], name="big.activations", activation_bytes=100 * MIB, seconds=None)
    table = frontier.modules_table(replace(PLAN, modules=(*PLAN.modules, small)), 3)
    assert [row[0] for row in table.rows] == ["big.activations", "h.9", "h.8"]
    assert table.rows[0][3] == ""
    optimized = {row[0]: row[-1] for row in frontier.modules_table(PLAN, 10).rows}
    assert (optimized["h.1"], optimized["h.3"]) == ("recompute", "-")
    runs = replace(PLAN, chosen=replace(CHOSEN, recompute=("h.2:5", "k"), offload=("h.1",)))
    runs = replace(runs, modules=(*PLAN.modules, ModuleShare("k.attention", 1, 1), ModuleShare("kk", 1, 1)))
    optimized = {row[0]: row[-1] for row in frontier.modules_table(runs, 20).rows}
    assert [name for name, verbs in optimized.items() if verbs == "recompute"] == ["h.4", "h.3", "h.2", "k.attention"]
    assert optimized["h.1"] == "offload"
    untimed = replace(PLAN, modules=(small,))
    assert "forward" not in frontier.modules_table(untimed, 3).header


# The page.


def test_the_page_is_the_same_for_the_same_plan_and_loads_nothing() -> None:
    page = frontier.plan_page(PLAN, "<train>.py", ["A note."])
    assert frontier.plan_page(PLAN, "<train>.py", ["A note."]) == page
    assert page.count("<figure") == 1
    assert page.count("<script>") == 1
    assert not re.search(r"<script[^>]|<(link|img|iframe|object|embed)\b|@import|(src|href)\s*=\s*[\"'](?!#)", page)
    assert not re.search(r"url\((?!#)", page)
    for piece in ("&lt;train&gt;.py", "A note.", "&lt;b&gt;&amp;", ">budget, 24.0 MiB</text>", PLAN.binding):
        assert piece in page
    assert page.count('class="marked"') == 1
    alternative = re.findall(r'aria-label="([^"]+)"', page)
    assert len(alternative) == 1
    assert "6 configurations" not in alternative[0]  # one has no time
    for said in (
        "5 configurations",
        "110.0 ms with 12.0 MiB",
        "50.0 ms with 40.0 MiB",
        "58.0 ms with 23.0 MiB",
        "is 24.0 MiB",
    ):
        assert said in alternative[0]
    assert re.search(r"activations</td>\s*<td>12.0 MiB</td>\s*<td>52%", page)


def test_a_budget_that_is_far_away_is_said_and_not_drawn() -> None:
    page = frontier.plan_page(replace(PLAN, budget=2**40), "train.py")
    assert ">budget, 1.0 TiB</text>" not in page
    assert "The budget, 1.0 TiB, is far to the right of this chart." in page


def test_a_plan_without_times_has_a_table_and_no_picture_of_them() -> None:
    untimed = replace(PLAN, chosen=SMALLEST, alternatives=())
    assert frontier.plan_page(untimed, "train.py").count("<figure") == 0
    assert "by category" not in frontier.plan_page(replace(untimed, at_peak={}, modules=()), "train.py")


@given(st.lists(st.tuples(st.floats(0.1, 10), st.floats(0.1, 10)), min_size=1, max_size=12))
def test_the_line_goes_along_the_ways_that_nothing_beats(dots: list[tuple[float, float]]) -> None:
    best = best_of(dots)
    for dot in dots:
        assert any(other[0] <= dot[0] and other[1] <= dot[1] for other in best)
    for first, second in itertools.pairwise(best):
        assert first[0] < second[0]
        assert first[1] > second[1]
