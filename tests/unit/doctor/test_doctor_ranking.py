"""Findings are in order: roots first, the earliest anomaly at the top, and consequences under their roots."""

import itertools
import logging
import math

import pytest

from anybatch.doctor import diagnosing
from anybatch.doctor.diagnosing import diagnose, diagnosis, ranked
from anybatch.doctor.rules.registry import Found, Rule, all_rules
from anybatch.records.events import Backward, Ended, Stepped
from anybatch.records.findings import Finding, Place
from anybatch.records.runs import Run
from anybatch.records.tables import Root
from number_runs import Training
from rule_runs import RunBuilder

EXPLAINS = {"A": ("B",), "B": ("C",), "X": ("Y",), "Y": ("X",)}


def make(name: str, at: int, severity: str = "warning", **values: object) -> Finding:
    """A finding."""
    return Finding(name, at=at, severity=severity, name=name, code=name, **values)  # type: ignore[arg-type]


def shown(*findings: Finding) -> list[tuple[str, str]]:
    """Names and roots in order, which must not depend on the order of the findings."""
    orders = [ranked(order, EXPLAINS) for order in itertools.permutations(findings)]
    assert all(order == orders[0] for order in orders)
    return [(one.name, one.consequence_of) for one in orders[0]]


def test_consequences_hang_under_the_first_of_the_chain() -> None:
    assert shown(make("C", 9), make("A", 1), make("B", 5)) == [("A", ""), ("B", "A"), ("C", "A")]


@pytest.mark.parametrize(
    ("root", "is_one"), [("OUTPUT_RANGE", True), ("LOSS_BROADCAST", True), ("PLATEAU_MODE", False)]
)
def test_targets_out_of_reach_explain_that_those_of_other_rows_give_the_same(root: str, is_one: bool) -> None:
    explains = {name: rule.explains for name, rule in all_rules().items()}
    found = {one.name: one.consequence_of for one in ranked((make(root, 1), make("LABELS_UNRELATED", 5)), explains)}
    assert found == {root: "", "LABELS_UNRELATED": root if is_one else ""}


def test_what_is_earlier_than_its_root_is_no_consequence() -> None:
    assert shown(make("A", 5), make("B", 1)) == [("B", ""), ("A", "")]


def test_a_chain_whose_middle_was_not_found_does_not_hold() -> None:
    assert shown(make("A", 1), make("C", 5)) == [("A", ""), ("C", "")]


def test_of_two_that_explain_each_other_the_earlier_is_the_root() -> None:
    assert shown(make("X", 3), make("Y", 2)) == [("Y", ""), ("X", "Y")]
    assert shown(make("X", 2), make("Y", 2)) == [("X", ""), ("Y", "X")]


def test_errors_come_before_warnings_and_hints_last() -> None:
    assert [name for name, _ in shown(make("I", 0, "info"), make("W", 1), make("E", 7, "error"))] == ["E", "W", "I"]


def test_a_warning_whose_consequence_is_an_error_ranks_as_one_and_stays_a_warning() -> None:
    findings = make("W", 0), make("A", 1), make("B", 5, "error"), make("E", 7, "error")
    assert [name for name, _ in shown(*findings)] == ["A", "B", "E", "W"]
    assert ranked(findings, EXPLAINS)[0].severity == "warning"


def test_that_nothing_was_learned_follows_from_any_fault_and_explains_none() -> None:
    assert shown(make("A", 1), make("NOT_LEARNING", 9, "error")) == [("A", ""), ("NOT_LEARNING", "A")]
    assert shown(make("A", 1, "info"), make("NOT_LEARNING", 9, "error")) == [("NOT_LEARNING", ""), ("A", "")]


def test_a_hint_explains_no_warning() -> None:
    assert shown(make("A", 1, "info"), make("B", 5)) == [("B", ""), ("A", "")]
    assert shown(make("A", 1, "info"), make("B", 5, "info")) == [("A", ""), ("B", "A")]


def test_the_same_finding_at_the_same_place_is_shown_once() -> None:
    here, there = Place(file="a.py", line=1), Place(file="a.py", line=2)
    found = ranked([make("A", 4, place=here), make("A", 2, place=here), make("A", 3, place=there)], {})
    assert [one.at for one in found] == [2, 3]


def story() -> Run:
    """A pretrained model trained on with a learning rate a thousand times too high."""
    gradient = (0.3, 2e-5, 3e-6, 2e-10)
    return Training(
        lr=lambda step: 1e-2,
        loss=lambda step: 0.006 if step < 2 else 4.7 if step < 4 else 0.7 + 0.001 * (step % 3),
        ratio=lambda step, layer: 0.28 if step < 4 else 0.01,
        grad=lambda step, layer: 0.4 if layer == 2 else gradient[min(step, 3)],
        spread=lambda step: (2.0, 0.5, 8e-6, 4e-9)[min(step, 3)],
        activation="Tanh",
        saturated=lambda step, layer: 0.1 if step < 2 else 0.99,
    ).run()


def test_the_story_ends_with_the_learning_rate_as_the_root_and_vanishing_under_it() -> None:
    order = [(one.name, one.consequence_of) for one in diagnose(story())]
    assert order[0] == ("LR_TOO_HIGH", "")
    assert set(order[1:]) == {
        ("VANISHING", "LR_TOO_HIGH"), ("INPUT_IGNORED", "LR_TOO_HIGH"), ("SATURATED", "LR_TOO_HIGH")
    }  # fmt: skip


def test_nan_hangs_under_the_learning_rate() -> None:
    run = Training(ratio=lambda step, layer: 0.5, loss=lambda step: 2.0 * 4**step if step < 8 else math.nan).run()
    assert [(one.name, one.consequence_of) for one in diagnose(run)][:2] == [
        ("LR_TOO_HIGH", ""), ("NAN_IN_FORWARD", "LR_TOO_HIGH")
    ]  # fmt: skip


def test_a_rule_that_fails_is_noted_and_hides_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(run: Run) -> list[Found]:
        raise KeyError("norms")

    rules = {
        "BROKEN": Rule("AB1", "BROKEN", "error", (), broken),
        "WORKS": Rule("AB2", "WORKS", "error", (), lambda run: [Found(text="it works", since=0)]),
    }
    monkeypatch.setattr(diagnosing, "all_rules", lambda: rules)
    with caplog.at_level(logging.WARNING):
        whole = diagnosis(Run([Ended(seconds=11.0, own_seconds=1.0, exit_code=0)]))
    assert [one.name for one in whole.findings] == ["WORKS"]
    assert "BROKEN" in whole.notes[0]
    assert "BROKEN" in caplog.text
    assert (whole.overhead, whole.exit_code) == (0.1, 0)


def test_a_training_of_plain_tensors_by_hand_is_said_to_be_out_of_sight() -> None:
    by_hand = [Backward(value=1.0, file="/home/me/train.py", line=5, at=1), Backward(value=1.0, at=2)]
    (note,) = diagnosis(Run(list(by_hand))).notes
    assert note.startswith("2 backwards ran (the first at train.py:5), but no nn.Module was called")
    assert diagnosis(Run([])).notes == ()
    assert diagnosis(Run([Root(root=0), *by_hand])).notes == ()
    assert diagnosis(Run([*by_hand, Stepped(optimizer=0, at=3)])).notes == ()


def test_a_diagnosis_survives_json() -> None:
    import json

    whole = diagnosis(story())
    assert type(whole).from_dict(json.loads(json.dumps(whole.to_dict()))) == whole
    assert whole.consequences(whole.roots[0])
    assert not whole.healthy


def test_steps_of_optimizers_one_after_another_are_added_and_those_by_turns_are_not() -> None:
    folds, turns = RunBuilder(), RunBuilder()
    for built in (folds, turns):
        own = built.model()
        for number in range(3):
            built.optimizer(own, number=number)
    for number in range(3):
        folds.train(own, steps=7, number=number)
    for step in range(7):
        for number in range(3 if step % 2 else 2):
            turns.step(number)
    assert diagnosis(folds.run).steps == 21
    assert diagnosis(turns.run).steps == 7
    assert diagnosis(RunBuilder().run).steps == 0
