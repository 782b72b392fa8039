"""A diagnosis in words, and in the terminal."""

import io
import os
import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from anybatch.records.diagnoses import Cell, Diagnosis
from anybatch.records.events import Ended
from anybatch.records.findings import Finding, Place
from anybatch.records.runs import Run
from anybatch.report import diagnosis as words
from anybatch.report.diagnosis import cells_table, modules_joined
from anybatch.report.diagnosis_terminal import show
from diagnosis_samples import CRASH, FAULTY, FLAT, HEALTHY, MISSING, NOTE, run_of

NAMES = st.sampled_from("ABCDE")
FINDINGS = st.lists(
    st.builds(
        Finding,
        st.just("It is wrong."),
        name=NAMES,
        consequence_of=st.just("") | NAMES,
        severity=st.sampled_from(["error", "warning", "info"]),
    ),
    max_size=12,
).map(tuple)


def shown(diagnosis: Diagnosis, run: Run, width: int = 80, **options: object) -> str:
    console = Console(file=io.StringIO(), width=width, **options)  # type: ignore[arg-type]
    show(diagnosis, run, console)
    file = console.file
    assert isinstance(file, io.StringIO)
    return file.getvalue()


def flat(text: str) -> str:
    return " ".join(text.split())


def count(knots: tuple[words.Knot, ...]) -> int:
    return sum(1 + count(knot.follows) for knot in knots)


# The verdict.


@pytest.mark.parametrize(
    ("diagnosis", "verdict", "mood"),
    [
        (HEALTHY, "healthy: nothing found in 200 steps", "healthy"),
        (replace(HEALTHY, steps=1), "healthy: nothing found in 1 step", "healthy"),
        (replace(HEALTHY, findings=(NOTE,)), "healthy: no error and no warning in 200 steps (1 note)", "healthy"),
        (Diagnosis(), "nothing to judge: no optimizer stepped", "unknown"),
        (replace(HEALTHY, exit_code=3), "the script ended with exit code 3; nothing found in 200 steps", "error"),
        (replace(HEALTHY, exit_code=0), "healthy: nothing found in 200 steps", "healthy"),
        (replace(FAULTY, findings=(replace(FLAT, consequence_of=""),)), "1 warning: The loss stays where", "warning"),
        (FAULTY, "1 error: head.weight and head.bias get gradients and are in no group", "error"),
        (replace(HEALTHY, reason="the loss fell"), "healthy: nothing found in 200 steps; the loss fell", "healthy"),
        (
            replace(HEALTHY, verdict="undecided", reason="the loss did not fall", findings=(NOTE,)),
            "no error and no warning in 200 steps, but the loss did not fall (1 note)",
            "unknown",
        ),
        (
            replace(HEALTHY, verdict="undecided", reason="it was interrupted", exit_code=130),
            "nothing found in 200 steps, but it was interrupted",
            "unknown",
        ),
        (replace(FAULTY, findings=(NOTE, MISSING, MISSING)), "2 errors: head.weight", "error"),
    ],
)
def test_the_verdict_comes_in_one_sentence(diagnosis: Diagnosis, verdict: str, mood: str) -> None:
    assert words.verdict_of(diagnosis, Run([])).startswith(verdict)
    assert words.mood_of(diagnosis, Run([])) == mood


def test_a_run_that_crashed_is_never_called_healthy() -> None:
    crashed = run_of(3, facts=(CRASH,))
    assert words.verdict_of(HEALTHY, crashed) == (
        "the script crashed: The hidden state carries the graph of the batch before"
    )
    unexplained = run_of(3, facts=(replace(CRASH, name="", message="", cause="", fix="", text="no\nway"),))
    assert words.verdict_of(HEALTHY, unexplained) == "the script crashed: RuntimeError: no"
    assert words.mood_of(HEALTHY, crashed) == words.mood_of(HEALTHY, unexplained) == "error"


def test_a_crash_that_nothing_explains_is_told_once() -> None:
    crash = replace(CRASH, name="", message="", cause="", fix="", tensor="", text="shape '[3]' is invalid. Try another")
    evidence = {"error": "RuntimeError", "text": crash.text, "code": crash.code}
    said = Finding(f"The script ended with {crash.text}", name="UNCLASSIFIED", severity="info", evidence=evidence)
    text = flat(shown(Diagnosis((said,), steps=3, exit_code=1), run_of(3, facts=(crash,))))
    assert text.count("is invalid") == 1
    assert "note" not in text.lower()
    assert "train.py:33" in text


def test_the_evidence_of_a_crash_does_not_repeat_its_traceback() -> None:
    evidence = {"error": "E", "text": "t", "code": "c()", "shape": [3], "origin_file": "/a/b.py", "origin_line": 3,
                "origin_code": "x += 1", "raised_at": "/a/b.py:9"}  # fmt: skip
    assert words.evidence_of(Finding("m", evidence=evidence)) == (
        ("shape", "3"), ("from", "x += 1"), ("raised at", "b.py:9"),
    )  # fmt: skip
    assert words.evidence_of(Finding("m", evidence={"code": "c()"})) == (("code", "c()"),)


def test_the_evidence_says_of_how_many_something_is_told() -> None:
    evidence = {"not_cleared": 2, "of": 4, "steps": 9}
    assert words.evidence_of(Finding("m", evidence=evidence)) == (("not cleared", "2 of 4"), ("steps", "9"))


def test_a_fix_is_code_or_a_sentence() -> None:
    long = " ".join(["remove the softmax before it"] * 5)
    told = shown(replace(FAULTY, findings=(replace(MISSING, fix=long),)), run_of())
    assert max(map(len, told.splitlines())) <= 80
    assert "   fix         remove the softmax" in told
    assert "   fix\n       f(" in shown(replace(FAULTY, findings=(replace(MISSING, fix=f"f({'1, ' * 50})"),)), run_of())


def test_a_long_list_ends_with_a_whole_entry() -> None:
    norms = {f"{index}.long.linear.weight": 1.25e-17 * index for index in range(1, 9)}
    told = flat(shown(replace(FAULTY, findings=(replace(MISSING, evidence={"gradients": norms}),)), run_of()))
    assert re.search(r"gradients (\d\.long\.linear\.weight [\d.]+e-1[67], )+\.\.\.", told), told


@pytest.mark.parametrize(
    ("names", "others", "expected"),
    [
        ("0 1 2 4", "", "0 to 2, 4"),
        ("0 1", "", "0, 1"),
        ("a.1.x a.2.x a.3.y", "a.4", "a.1.x, a.2.x, a.3.y"),
        ("a.1.x a.2.x a.3.x b.3.x b.4.x b.5.x", "a.4 b.4", "a.1.x to a.3.x, b.3.x to b.5.x"),
        ("1.1 1.2 2.2 3.2 4.2", "1.3 2.3 3.3 4.3", "1.1, 1.2 to 4.2"),
        ("0.a 0.b 1.a 1.b 2.a 2.b", "", "0.* to 2.* (2 each)"),
        ("0.a 0.b 1.a 1.b 2.a 2.b 2.c", "", "0.* (2), 1.* (2), 2.* (3)"),
        (
            " ".join(f"n{index}" for index in range(20)),
            "",
            "n0, n1, n2, n3, n4, n5, n6, n7, n8, n9, n10, n11, and 8 more",
        ),
    ],
)
def test_numbered_names_in_a_row_are_the_first_and_the_last(names: str, others: str, expected: str) -> None:
    assert modules_joined(names.split(), [*names.split(), *others.split()]) == expected


@pytest.mark.parametrize(
    ("message", "first"),
    [
        ("model.head is in no group. It stays.", "model.head is in no group"),
        ("The ratio is 0.28. That is a lot", "The ratio is 0.28"),
        (f"The scale is wrong: Normal(loc: {'x' * 160})", f"The scale is wrong: Normal(loc: {'x' * 160})"),
        (f"It is {'x' * 99}: and so it vanishes", f"It is {'x' * 99}: and so it vanishes"),
        ("See e.g. layer.3. \nMore.", "See e.g. layer.3"),
        ("", ""),
    ],
)
def test_the_verdict_ends_where_the_first_sentence_ends(message: str, first: str) -> None:
    diagnosis = Diagnosis((Finding(message, severity="error"),), steps=1)
    assert words.verdict_of(diagnosis, Run([])) == f"1 error: {first}"


# Findings and what follows from them.


@given(FINDINGS)
def test_no_finding_is_lost_and_none_comes_twice(findings: tuple[Finding, ...]) -> None:
    diagnosis = Diagnosis(findings, steps=1)
    knots = words.knots_of(diagnosis)
    assert count(knots) == len(findings)
    grave, notes = words.grave_and_notes(diagnosis)
    assert count(grave) + count(notes) == len(findings)
    assert all(one.severity == "info" for knot in notes for one in [knot.finding, *(k.finding for k in knot.follows)])
    text = flat(shown(diagnosis, Run([])))
    assert text.startswith("this run: ")


def test_what_follows_hangs_under_its_root_and_two_that_follow_from_each_other_are_shown() -> None:
    (knot, note) = words.knots_of(FAULTY)
    assert (knot.finding, [one.finding for one in knot.follows], note.finding) == (MISSING, [FLAT], NOTE)
    circle = replace(MISSING, consequence_of="LOSS_FLAT"), FLAT
    assert count(words.knots_of(Diagnosis(circle))) == 2
    lost = Diagnosis((replace(FLAT, consequence_of="NOT_THERE"),))
    assert [one.finding.name for one in words.knots_of(lost)] == ["LOSS_FLAT"]


def test_an_error_that_follows_from_a_note_is_no_note() -> None:
    diagnosis = Diagnosis((NOTE, replace(MISSING, consequence_of=NOTE.name)), steps=3)
    grave, notes = words.grave_and_notes(diagnosis)
    assert [knot.finding.name for knot in grave] == [NOTE.name]
    assert not notes
    assert "suggestion" in shown(diagnosis, Run([]))


# What changes.


def test_modules_of_which_the_same_is_true_share_a_row_and_the_odd_ones_stand_out() -> None:
    frozen = Cell(3, "pooler", ("pooler.weight",), numel=5, frozen=True)
    shrinks = Cell(1, "encoder.layers.0", ("w",), numel=7, shrinking=True)
    table = cells_table(replace(FAULTY, cells=(shrinks, *FAULTY.cells[1:], frozen)))
    assert table.rows == (
        ("changing", "changing", "82,560", "encoder.layers.1 to encoder.layers.5"),
        ("shrinking", "changing", "7", "encoder.layers.0"),
        ("changing", "unchanged", "1,290", "head: in no optimizer"),
        ("unchanged", "unchanged", "5", "pooler: frozen"),
    )
    assert table.marked == {1, 2}
    assert cells_table(HEALTHY).rows == (("changing", "changing", "100,362", "encoder.* (6), head"),)


def test_a_module_in_two_cells_is_told_by_its_parameters() -> None:
    two = Cell(1, "fc", ("fc.weight",), numel=6), Cell(2, "fc", ("fc.bias",), numel=2, why="in no optimizer")
    diagnosis = Diagnosis((*FAULTY.findings,), cells=(*two, Cell(1, "head", ("head.weight",), numel=3)), steps=9)
    assert [row[3] for row in cells_table(diagnosis).rows] == ["fc.weight, head", "fc.bias: in no optimizer"]


def test_each_of_the_four_cells_has_its_modules_and_their_reasons() -> None:
    others = Cell(3, "pooler", frozen=True), Cell(4, "old", why="decay"), Cell(0, "x")
    table = cells_table(replace(FAULTY, cells=(*FAULTY.cells, *others)))
    assert [(row[:2], row[3]) for row in table.rows] == [
        (("?", "?"), "x"),
        (("changing", "changing"), "encoder.* (6)"),
        (("changing", "unchanged"), "head: in no optimizer"),
        (("unchanged", "unchanged"), "pooler: frozen"),
        (("unchanged", "changing"), "old: decay"),
    ]
    assert table.marked == {2, 4}


# The terminal.


def test_a_healthy_run_takes_a_few_lines() -> None:
    text = shown(HEALTHY, run_of())
    assert len(text.splitlines()) <= 8
    assert text.startswith("train.py --lr 0.1: healthy: nothing found in 200 steps.\n")
    assert "encoder.* (6), head" in text
    assert "The doctor took 210.0 ms of 12.3 s (1.7% of the script's own time)." in text


@pytest.mark.parametrize("width", [40, 80, 160])
def test_a_faulty_run_takes_a_page_and_says_what_to_change(width: int) -> None:
    text = shown(FAULTY, run_of(head_in_optimizer=False), width)
    assert len(text.splitlines()) <= (40 if width > 40 else 60)
    order = (
        "1 error",
        "AB101",
        "why",
        "evidence",
        "fix",
        "add_param_group",
        "LOSS_FLAT",
        "AB210",
        "in no optimizer",
    )
    places = [flat(text).index(piece) for piece in order]
    assert places == sorted(places)
    assert MISSING.fix in text  # on one line, so that it can be copied
    longest = max(len(line) for line in text.splitlines() if MISSING.fix not in line and "head, train.py" not in line)
    assert longest <= max(width, 60)
    assert flat(text).count("head.weight and head.bias get gradients and are in no group of the optimizer.") == 1


def test_several_findings_are_numbered_and_only_the_first_three_are_told_in_full() -> None:
    many = tuple(replace(MISSING, name=f"N{index}", code=f"AB9{index:02}") for index in range(20))
    text = shown(replace(FAULTY, findings=many), run_of())
    assert text.count(MISSING.fix) == 3
    assert "4. error AB903" in text
    assert "and 11 more: --json or --output" in text


def test_a_crash_comes_with_its_line_and_its_fix_once() -> None:
    run = run_of(3, facts=(CRASH,))
    text = shown(replace(HEALTHY, exit_code=1), run)
    for piece in ("RuntimeError  /home/me/project/train.py:33", "loss.backward()", "state = state.detach()", "lstm at"):
        assert text.count(piece) == 1
    told = Finding(CRASH.message, Place(file=CRASH.file, line=33), CRASH.fix, name=CRASH.name, severity="error")
    assert shown(Diagnosis((told,), exit_code=1), run).count("state = state.detach()") == 1


@pytest.mark.parametrize("diagnosis", [FAULTY, HEALTHY])
def test_what_is_piped_has_no_colours(diagnosis: Diagnosis, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)
    assert "\x1b" not in shown(diagnosis, run_of())
    assert "\x1b[" in shown(diagnosis, run_of(), force_terminal=True, color_system="truecolor")
    monkeypatch.setitem(os.environ, "NO_COLOR", "1")
    coded = shown(diagnosis, run_of(), force_terminal=True, color_system="truecolor")
    assert not re.search(r"\x1b\[[0-9;]*3[0-7]", coded)


def test_the_cost_of_a_short_run_is_put_in_its_place() -> None:
    dear = replace(HEALTHY, overhead=0.4)
    assert "overhead is largest in short runs" not in words.cost_of(dear, Run([Ended(seconds=90.0, own_seconds=4.0)]))
    assert "overhead is largest in short runs" in words.cost_of(dear, Run([Ended(seconds=2.0, own_seconds=0.4)]))
    assert "overhead is largest in short runs" in words.cost_of(replace(dear, steps=20), run_of())
    asked = Ended(seconds=90.0, own_seconds=4.0, asked_seconds=2.0)
    assert words.cost_of(dear, Run([asked])).endswith(", and 2.0 s for its questions after the script")
    assert words.cost_of(Diagnosis(overhead=0.02), Run([])) == "the doctor took 2.0% of the run's own time"
    ended = Ended(seconds=2.0, own_seconds=0.1, thinned=1, dropped=3, failure="KeyError: 3")
    said = words.cost_of(Diagnosis(), Run([ended]))
    for piece in ("100.0 ms of 2.0 s", "measured fewer steps", "3 lines", "may be missing: KeyError: 3"):
        assert piece in said


def test_no_frame_is_drawn_where_there_is_ascii_only() -> None:
    console = Console(file=io.TextIOWrapper(io.BytesIO(), encoding="ascii", errors="strict"), width=80)
    show(FAULTY, run_of(), console)  # a character beyond ASCII would raise


def test_names_reach_the_terminal_as_text() -> None:
    bad = "[bold]\x1b]0;title\x07\ud800[/nope]"
    finding = Finding(f"{bad} is wrong.", Place(bad), bad, bad, {bad: bad}, severity="error", name=bad, code=bad)
    cell = Cell(2, bad, (bad,), why=bad)
    text = shown(Diagnosis((finding,), (cell,), script=bad, notes=(bad,)), run_of(facts=(replace(CRASH, text=bad),)))
    assert "\x1b" not in text
    assert "\x07" not in text
    assert "[bold]\\x1b]0;title\\x07\\ud800[/nope]" in text
    text.encode("utf-8")


def test_values_are_short_and_lists_end() -> None:
    assert words.value_text("x" * 1000) == "x" * 400 + " ..."
    assert words.value_text({f"k{index}": 0.1 for index in range(9)}).endswith("and 1 more")
    assert words.value_text((True, float("inf"), 3)) == "yes, inf, 3"
    assert words.evidence_of(MISSING)[2] == ("gradient norm", "0.412")


@pytest.mark.parametrize(
    ("diagnosis", "healthy"),
    [
        (HEALTHY, True),
        (replace(HEALTHY, verdict="undecided"), None),
        (replace(HEALTHY, verdict="crashed"), False),
        (replace(HEALTHY, verdict="not learning"), False),
        (Diagnosis((Finding("It does not fall.", severity="error", name="A"),)), False),
    ],
)
def test_json_says_healthy_only_of_what_was_judged(diagnosis: Diagnosis, healthy: bool | None) -> None:
    assert diagnosis.to_dict()["healthy"] is healthy
