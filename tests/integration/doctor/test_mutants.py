"""The mutants of the doctor's benchmark: operators apply and leave valid Python, the split stands, programs run."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import forked_python
from anybatch.doctor.rules.registry import all_rules

ROOT = Path(__file__).parents[3]
HOME = ROOT / "benchmarks" / "doctor" / "mutants"
sys.path.insert(0, str(HOME))
try:
    import catalog  # type: ignore[import-not-found]
    import code_of  # type: ignore[import-not-found]
    import comparing  # type: ignore[import-not-found]
    import forking  # type: ignore[import-not-found]
    import tables  # type: ignore[import-not-found]
finally:
    sys.path.remove(str(HOME))

BASES: tuple[Any, ...] = catalog.bases()


@pytest.fixture(scope="module", autouse=True)
def operators() -> tuple[Any, ...]:
    """All of them; their modules are found while they are loaded."""
    sys.path.insert(0, str(HOME))
    try:
        found: tuple[Any, ...] = catalog.operators()
        return found
    finally:
        sys.path.remove(str(HOME))


def test_there_are_enough(operators: tuple[Any, ...]) -> None:
    assert len(BASES) >= 60
    assert len(operators) >= 60
    assert len(catalog.mutants()) >= 1500
    assert {one.family for one in operators} == set(catalog.FAMILIES)
    text = (ROOT / "benchmarks" / "README.md").read_text(encoding="utf-8")
    halves = Counter(one.half for one in catalog.mutants())
    assert f"{len(operators)} operators" in text
    assert f"{len(catalog.mutants()):,} mutants" in text
    assert f"{halves['tune']} mutants to tune on, {halves['report']} to" in text
    named = Counter(word for one in operators for word in ("DeepCrime", "DeepMutation", "DeepFD") if word in one.after)
    assert min(named.values()) >= 3


@pytest.mark.parametrize("base", BASES, ids=lambda one: one.name)
def test_a_base_parses_and_gives_nothing_away(base: Any) -> None:
    ast.parse(base.source)
    assert base.source.isascii()
    assert base.source.startswith("# "), "a line that says what it trains"
    assert "anybatch" not in base.source
    assert 'print(f"metric ' in base.source, "the line that is agreed on"


def test_every_operator_changes_a_base_and_leaves_valid_python(operators: tuple[Any, ...]) -> None:
    sources = {base.name: base.source for base in BASES}
    seen: Counter[str] = Counter()
    for one in catalog.mutants():
        seen[one.operator.name] += 1
        assert one.source != sources[one.base.name], one.name
        ast.parse(one.source)
        changed = zip(one.source.splitlines(), sources[one.base.name].splitlines(), strict=False)
        first = next((n for n, (new, old) in enumerate(changed, 1) if new != old), one.line)
        assert first <= one.last + 1, one.name
        assert one.line <= len(one.source.splitlines()) + 1
    assert set(seen) == {one.name for one in operators}


def test_what_counts_as_right_is_a_rule_or_said_to_come(operators: tuple[Any, ...]) -> None:
    names = {name for one in operators for name in one.right} - {comparing.UNDECIDED}
    assert names - set(all_rules()) == catalog.TO_COME


def test_the_split_is_fixed_and_each_half_has_every_family(operators: tuple[Any, ...]) -> None:
    assert catalog.SALT == "anybatch mutants, first split"
    halves = {name: catalog.half_of(name) for name in ("base/gan_ring", "base/vae_digits", "operator/step-removed")}
    assert halves == {"base/gan_ring": "tune", "base/vae_digits": "tune", "operator/step-removed": "report"}
    for half in ("tune", "report"):
        assert {one.family for one in operators if one.half == half} == set(catalog.FAMILIES)
        assert len([one for one in BASES if one.half == half]) >= 30
        assert len([one for one in catalog.mutants() if one.half == half]) >= 700


def test_edits_keep_all_other_text() -> None:
    code = code_of.Code("for x in y:\n    a.zero_grad()\n    # why\n    a.step(  1)\nprint(f(2, k=3, m=4))\n")
    (clear,) = code.statements_of("zero_grad")
    (step,) = code.statements_of("step")
    moved = code.apply([code.after(step, code.lines(clear)), code.delete(clear)])
    assert moved == "for x in y:\n    # why\n    a.step(  1)\n    a.zero_grad()\nprint(f(2, k=3, m=4))\n"
    (call,) = code.calls("f")
    assert "f(2, m=4)" in code.apply([code.without_keyword(call, "k")])
    assert "f(2, k=3, m=4, n=5)" in code.apply([code.with_keyword(call, "n", "5")])
    assert "f(2, k=7, m=4)" in code.apply([code.with_keyword(call, "k", "7")])
    alone = code_of.Code("if x:\n    a.step()\n")
    assert alone.apply([alone.delete(alone.statements_of("step")[0])]) == "if x:\n    pass\n"


def result(metric: float | None, code: int = 0) -> Any:
    return forking.Result(code, 1.0, metric, "")


def test_what_became_of_a_mutant_is_measured_by_its_base() -> None:
    scale = comparing.Scale(0.1, (0.9, 0.92, 0.88))
    assert scale.fate(result(0.87), hidden=False) == "equivalent"
    assert scale.fate(result(0.95), hidden=True) == "weaker"
    assert scale.fate(result(0.7), hidden=False) == "weaker"
    assert scale.fate(result(0.3), hidden=False) == "failed"
    assert scale.fate(result(None), hidden=False) == "failed"
    assert scale.fate(result(0.9, code=1), hidden=False) == "failed"


def judged(fate: str, first: str, *, right: bool, verdict: str = "faults", alarms: tuple[str, ...] = ("X",)) -> Any:
    true = alarms if right else ()
    values = (fate, verdict, first, right, right, right, alarms, true, "tested", "m", 1)
    progress = {"failed": 0.1, "weaker": 0.6}.get(fate, 1.0)
    return comparing.Judged("n", "order", *values, grave=first != "-", progress=progress)


def test_the_tables_count() -> None:
    rows = (
        judged("failed", "X", right=True),
        judged("failed", "-", right=False, verdict="learning", alarms=()),
        judged("weaker", "X", right=False),
        judged("equivalent", "X", right=True),
    )
    part = tables.Part("tune", rows, (judged("base", "-", right=False, verdict="learning", alarms=()),), 4, 1, 1, 5)
    wanted = ["3", "1 (33%)", "1 (33%)", "1 (33%)", "1 (33%)", "1 (50%)", "1", "1 (100%)", "1"]
    assert tables.line_of("all", rows)[1:] == wanted
    text = tables.page([part], "command")
    assert "| X | 3 | 1 | 1 | 1 (1 true) | 0 | 0 | 67% |" in text
    hidden = tables.page([tables.Part("report", rows, (), 4, 1, 0, 0)], "command")
    assert "### " not in hidden, "totals only"


@pytest.mark.parametrize("name", ["resume_checkpoint", pytest.param("classic_lbfgs", marks=pytest.mark.slow)])
def test_a_base_and_a_mutant_run(name: str, tmp_path: Path) -> None:
    environment = {**os.environ, "ANYBATCH_MUTANTS_CACHE": str(tmp_path), "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([str(HOME), str(ROOT / "src")])
    script = """
import json, sys, catalog, comparing, forking
forking.prepare(heavy=False)
base = next(one for one in catalog.bases() if one.name == sys.argv[1])
for seed in comparing.SEEDS:
    forking.run(base.source, base.name + ".py", seed, "plain")
    forking.run(base.source, base.name + ".py", seed, "untrained")
assert not forking.run(base.source, base.name + ".py", 0, "doctor").broken
scale = comparing.scale_of(base)
operator = next(one for one in catalog.operators() if one.name == "backward-removed")
mutant = next(iter(catalog.mutants_of(base, operator)))
forking.run(mutant.source, "train.py", 0, "doctor")
one = comparing.judge(mutant)
print(json.dumps([scale.way, comparing.judge_base(base).verdict, one.fate, one.right]))
"""
    command = [sys.executable, "-c", script, name]
    done = subprocess.run(command, check=False, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    way, verdict, fate, right = json.loads(done.stdout.strip().splitlines()[-1])
    assert way > 0.3, "it learns"
    assert verdict in ("learning", "undecided")
    assert (fate, right) == ("failed", True)


def test_the_half_for_reporting_is_not_looked_into(tmp_path: Path) -> None:
    environment = {**os.environ, "ANYBATCH_MUTANTS_CACHE": str(tmp_path), "PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, str(HOME / "score.py"), "--offline", "--half", "report", "--only", "gan"]
    done = forked_python.run(command, tmp_path, environment)
    assert done.returncode == 2
    assert "got it without --half tune" in done.stderr.replace("\n", " ")
