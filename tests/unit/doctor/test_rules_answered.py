"""Each row of ``answers.toml`` can speak: a run reaches it, and its templates have what the question gives them."""

import ast
from collections.abc import Iterator
from functools import partial
from itertools import product
from typing import Any

import pytest

from answer_runs import EVIDENCE, flat
from anybatch.doctor.rules import answered
from anybatch.records.lossfacts import LossCall, Printed, Probed
from anybatch.records.runs import Run
from number_runs import Training, call, falling
from source_tree import ROOT

Row = dict[str, Any]
OF_KINDS: dict[str, Row] = {
    "class": {"rows": 600},
    "split": {"held_out": "test_mask"},
    **{one: {"factor": -1.0, "place": 0, "shape": [2, 2]} for one in ("factor", "turned", "aside", "zero")},
}  # what answers of a kind have beside
ROWS = [(code, at) for code, table in answered._TABLES.items() for at in range(len(table.get("answers", [{}])))]


def rows(code: str) -> list[Row]:
    """The rows of a table, with what they have in common."""
    table = answered._TABLES[code]
    return [table | row for row in table.get("answers", [{}])]


def guessed(loss: Any, step: int) -> list[LossCall]:
    """The loss of a step beside that of a guess."""
    return [call(guess=2.3, value=loss(step))]


def runs(row: Row) -> Iterator[tuple[Run, Probed]]:
    """Runs of which a row may be said: with what it names, and with what it has to see beside that."""
    seen = {name: one[0] if isinstance(one, list) else one for name, one in row.get("seen", {}).items()}
    own, answer = EVIDENCE[row["to"]] | OF_KINDS.get(seen.get("kind", ""), {}), row.get("answer", "yes")
    others: tuple[Row, ...] = (
        {},
        {"share": 1.0},
        {"value": None},
        {"mode": "max"},
        {"by": "rows"},
        {"keeps": "highest"},
        {"boxes": False},
    )
    said = Printed(label="val acc", steps=(60,), values=(0.1,), file="train.py", line=9)
    for beside, detail, loss, printed in product(others, ("", "a table", "one row"), (falling, flat), ((), (said,))):
        evidence = own | {name: one for name, one in beside.items() if name in own} | seen
        one = Probed(probe=row["to"], answer=answer, evidence=evidence, detail=detail, file="train.py", line=7)
        every = partial(guessed, loss) if printed else lambda step: ()
        run = Training(loss=loss, every=every, after=(*printed, one)).run()
        yield run, next(run.of(Probed))


@pytest.mark.parametrize(("code", "at"), ROWS)
def test_each_row_is_reached_and_filled(code: str, at: int) -> None:
    row = rows(code)[at]
    before = [one for one in rows(code)[:at] if (one["to"], one.get("answer")) == (row["to"], row.get("answer"))]
    reached = (
        run for run, probed in runs(row)
        if answered._fits(run, probed, row) and not any(answered._fits(run, probed, one) for one in before)
    )  # fmt: skip
    run = next(reached, None)
    assert run is not None, f"nothing reaches it after {len(before)} other rows"
    (found,) = answered.say(run, code)
    assert all((found.text, found.fix, found.cause))


@pytest.mark.parametrize("code", answered._TABLES)
def test_tables_have_only_what_is_read(code: str) -> None:
    for row in rows(code):
        own = row.keys() - answered._OWN
        read = " ".join(one for name, one in row.items() if isinstance(one, str) and name not in ("to", "name"))
        assert not {name for name in own if f"{{{name}" not in read}, "entries of its own that no template has"
        assert {*row.get("when", ())} <= answered._WHEN.keys()
        assert row["to"] in EVIDENCE


def names(function: ast.AST) -> set[str]:
    """The words that are written in a function: of these its dictionaries and the evidence of answers are made."""
    words = [one.arg if isinstance(one, ast.keyword) else getattr(one, "value", None) for one in ast.walk(function)]
    return {one for one in words if isinstance(one, str)}


def name_of(node: ast.AST) -> str:
    """A variable's name."""
    return node.id if isinstance(node, ast.Name) else ""


def test_the_evidence_of_these_tests_is_that_of_the_questions() -> None:
    written: dict[str, set[str]] = {}
    for path in (ROOT / "src/anybatch/doctor/ask").glob("*.py"):
        every = {one.name: one for one in ast.walk(ast.parse(path.read_text())) if isinstance(one, ast.FunctionDef)}
        for function in every.values():
            called = {*map(name_of, ast.walk(function))} & every.keys()
            callers = [one for one in every.values() if function.name in {*map(name_of, ast.walk(one))}]
            near = set[str]().union(*map(names, (function, *callers, *(every[one] for one in called))))
            for probe in names(function) & EVIDENCE.keys():
                written.setdefault(probe, set()).update(near)
    wrong = {probe: lost for probe, own in EVIDENCE.items() if (lost := own.keys() - written.get(probe, set()))}
    assert not wrong, "of names that no question gives"
