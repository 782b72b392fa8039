"""The programs of the doctor's benchmark are what they say, and the scorer judges as it should."""

from __future__ import annotations

import gzip
import importlib
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from anybatch.doctor.rules.registry import all_rules
from anybatch.records.lines import to_line
from rule_runs import RunBuilder

HOME = Path(__file__).parents[3] / "benchmarks" / "doctor"


def load(name: str) -> Any:
    sys.path.insert(0, str(HOME))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(HOME))


judging = load("judging")
symptoms = load("symptoms")
limits = load("limits")
reach = load("reach")
PROGRAMS = {program.key: program for program in judging.programs()}
FAST = ("f02", "f03", "f06", "f07", "f09", "f17", "f18", "f21", "f24", "f29", "f33", "f41", "f46", "r03", "r07", "r11")


def finding(name: str, severity: str = "error", step: int = 3, **place: Any) -> dict[str, Any]:
    return {"name": name, "severity": severity, "step": step, "message": "", "place": place}


def line_of(program: Any, text: str) -> int:
    lines = program.path.read_text().splitlines()
    return next(number for number, line in enumerate(lines, 1) if text in line)


def test_the_set_is_complete() -> None:
    wanted = [f"f{n:02d}" for n in range(1, 48)] + [f"r{n:02d}" for n in range(1, 16)]
    assert list(PROGRAMS) == wanted + [f"p{n:02d}" for n in range(1, 21)]
    rules = all_rules()
    for key in wanted:
        truth = PROGRAMS[key].truth
        assert truth.name in rules, key
        assert truth.modules or truth.optimizers or truth.text, key
        assert key in symptoms.SYMPTOMS or key in symptoms.DIFFERENCES or key == "r14", key


@pytest.mark.parametrize("key", PROGRAMS)
def test_a_program_gives_nothing_away(key: str) -> None:
    program = PROGRAMS[key]
    source = program.path.read_text()
    assert source.startswith("# "), "a line that says what it trains"
    assert "anybatch" not in source
    comments = "_".join(re.findall(r"#.*|\"\"\".*\"\"\"", source)).upper().replace(" ", "_")
    for name in all_rules():
        assert name not in comments, name
    if not program.healthy:
        assert '"--fixed"' in source, "its twin"
        header = source[: source.index("\nimport")]
        assert re.search(r"report|classic", header), "where it comes from"
        for text in program.truth.text:
            assert text in source, text


@pytest.mark.parametrize("key", FAST)
def test_a_faulty_program_shows_its_fault_and_its_twin_does_not(key: str) -> None:
    assert symptoms.shown(PROGRAMS[key], seed=1) == ""


@pytest.mark.parametrize("key", ["p01", "p13", "p16"])
def test_a_healthy_program_trains(key: str) -> None:
    assert symptoms.quiet(PROGRAMS[key], seed=1) == ""


def test_a_symptom_is_not_seen_where_it_is_not() -> None:
    seen = symptoms.observe(PROGRAMS["p13"].path)
    assert not symptoms.still(seen)
    assert seen.steps[0].norm > 1e3 * seen.steps[-1].norm
    assert seen.text.startswith("0 5.55")  # the last figures are rounding errors of the machine


def test_places() -> None:
    program = PROGRAMS["f02"]
    right = judging.right_place
    assert right(program, {"module": "crf", "parameters": ["crf.score"]})
    assert right(program, {"module": "", "parameters": ["tagger.crf.score"]})
    assert not right(program, {"module": "encoder", "parameters": ["encoder.weight"]})
    assert not right(program, {"module": "crfs"})
    assert not right(program, {"module": "crf2.score", "file": "", "line": 0})
    loop = PROGRAMS["f07"]
    assert right(loop, {"optimizer": "sgd"})
    here = str(loop.path)
    assert right(loop, {"file": here, "line": line_of(loop, "sgd.step()")})
    assert not right(loop, {"file": here, "line": line_of(loop, "prediction = ")})
    assert not right(loop, {"file": "/elsewhere/other.py", "line": line_of(loop, "sgd.step()")})


def test_names_in_lists() -> None:
    assert judging.within("blocks[0].weight", "blocks")
    assert judging.within("net.blocks.0.weight", "blocks.0")
    assert not judging.within("subblocks.0", "blocks")
    assert not judging.within("", "blocks")


def test_a_statement_over_several_lines(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("if x:\n    y = f(\n        1,\n        2,\n    )\nelse:\n    y = 3\n")
    assert judging.statement(script, 3) == "    y = f(\n        1,\n        2,\n    )"
    assert judging.statement(script, 1) == "if x:"
    assert judging.statement(script, 7) == "    y = 3"


def test_verdicts() -> None:
    program = PROGRAMS["f07"]
    good, wrong = finding("ZERO_GRAD_MISSING", optimizer="sgd"), finding("LR_TOO_HIGH", "warning", optimizer="sgd")
    verdict = judging.judge(program, [good, wrong])
    assert (verdict.first, verdict.first_code, verdict.first_place, verdict.in_three) == (
        good["name"],
        True,
        True,
        True,
    )
    assert verdict.step == 3
    assert verdict.alarms == ("ZERO_GRAD_MISSING", "LR_TOO_HIGH")
    verdict = judging.judge(program, [wrong, good])
    assert (verdict.first_code, verdict.first_place, verdict.in_three) == (False, False, True)
    assert not judging.judge(program, [wrong, wrong, wrong, good]).in_three
    elsewhere = finding("ZERO_GRAD_MISSING", optimizer="other")
    verdict = judging.judge(program, [elsewhere])
    assert (verdict.first_code, verdict.first_place, verdict.in_three, verdict.step) == (True, False, False, None)
    nothing = judging.judge(program, [])
    assert (nothing.first, nothing.first_code, nothing.first_place, nothing.alarms) == ("-", False, False, ())
    healthy = judging.judge(PROGRAMS["p01"], [finding("PARAM_UNUSED", "info")])
    assert healthy.alarms == ()
    assert not healthy.first_code


def test_another_name_with_a_reason_is_accepted() -> None:
    program = PROGRAMS["f34"]
    assert program.truth.also
    assert judging.judge(program, [finding("LR_NOT_SCALED", "warning", optimizer="optimizer")]).first_place


def test_a_threshold_that_decides_is_found_and_one_that_does_not_is_not() -> None:
    built = RunBuilder()
    numbers = built.model()
    built.optimizer(numbers)
    for _ in range(25):  # never steps
        built.forward()
        built.backward(numbers)
    rule, runs = all_rules()["STEP_MISSING"], [built.run, RunBuilder().run]
    assert [limits.changed(rule, runs, "backwards", factor) for factor in (0.5, 2.0)] == [0, 1]


def test_a_record_is_read_compressed_or_not(tmp_path: Path) -> None:
    text = "".join(f"{to_line(one)}\n" for one in RunBuilder().facts).encode()
    (tmp_path / "a.jsonl").write_bytes(text)
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(text))
    assert [len(limits.run_of(path).facts) for path in sorted(tmp_path.iterdir())] == [1, 1]


def test_what_a_rule_reaches_is_counted_once_and_over_files(tmp_path: Path) -> None:
    (tmp_path / "doctor" / "rules").mkdir(parents=True)
    (tmp_path / "doctor" / "views").mkdir()
    (tmp_path / "doctor" / "views" / "seen.py").write_text(
        "class View:\n    def used(self):\n        return 1\n\n    def not_used(self):\n        return 2\n\n\n"
        "def view():\n    return View()\n"
    )
    (tmp_path / "doctor" / "rules" / "some.py").write_text(
        "from anybatch.doctor.views.seen import view\n\n\n"
        "@rule()\ndef found(run):\n    return helper() + helper()\n\n\n"
        "def helper():\n    return view().used()\n\n\ndef other():\n    return 1\n"
    )
    code = reach.Code(tmp_path)
    assert code.rules == [("some", "found")]
    assert sum(code.lines[one] for one in code.reached(("some", "found"))) == 2 + 2 + 2 + 2
