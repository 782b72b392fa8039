"""What is reported and what is not: comments on lines, settings, baselines."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from anybatch.doctor.diagnosing import diagnosis
from anybatch.doctor.policy import Policy, baseline_of, checked_codes, read_baseline, read_policy
from anybatch.records.events import Backward, Ended, Forward, Stepped
from anybatch.records.findings import Finding, Place
from anybatch.records.lines import Fact
from anybatch.records.runs import Run
from anybatch.records.samples import Norms
from anybatch.records.sources import line_at
from anybatch.records.tables import GroupFacts, ModuleFacts, OptimizerFacts, ParameterFacts, Root, Started

SOURCE = '''import torch
# anybatch: ignore[AB1] alone on a line: of the statement below? no, of none

optimizer = torch.optim.SGD(
    model.parameters(),  # anybatch: ignore[AB102, OPT_PARAM_MISSING] the head is fixed
    lr=1,
)
for x in y:  # anybatch: ignore[AB5] of the head only
    step(x)
text = """
# anybatch: ignore[AB1] a text
"""; a = 1  # anybatch: ignore  which?
b = 2  # anybatch:ignore[ab601]
'''


def finding(code: str, line: int, file: Path, name: str = "", module: str = "") -> Finding:
    return Finding("text", Place(module, file=str(file), line=line), code=code, name=name, severity="error")


@pytest.fixture
def train(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(SOURCE, encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("code", "name", "line", "reason"),
    [
        ("AB102", "", 4, "the head is fixed"),
        ("AB102", "", 6, "the head is fixed"),
        ("AB102", "", 7, "the head is fixed"),
        ("AB101", "OPT_PARAM_MISSING", 4, "the head is fixed"),
        ("AB103", "", 4, None),
        ("AB102", "", 3, None),
        ("AB501", "", 8, "of the head only"),
        ("AB501", "", 9, None),
        ("AB101", "", 11, None),
        ("AB101", "", 12, None),
        ("AB601", "", 13, ""),
        ("AB60", "", 13, None),
    ],
)
def test_a_comment_ignores_what_is_on_its_statement(
    train: Path, code: str, name: str, line: int, reason: str | None
) -> None:
    kept, others = Policy().parted([finding(code, line, train, name)])
    assert [(one.by, one.reason) for one in others] == ([] if reason is None else [("line", reason)])
    assert len(kept) + len(others) == 1


def test_comments_that_ignore_nothing_are_told(train: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(train.parent)
    policy = Policy()
    _, suppressed = policy.parted([finding("AB102", 4, train), finding("AB601", 13, train)])
    said = policy.unused([str(train), str(train), "", "nowhere.py"], suppressed)
    assert said == (
        "train.py:2: the comment ignores AB1, which was not found there in this run.",
        "train.py:5: the comment ignores OPT_PARAM_MISSING, which was not found there in this run.",
        "train.py:8: the comment ignores AB5, which was not found there in this run.",
        "train.py:12: the comment names no finding; write anybatch: ignore[AB101] and why.",
    )


def test_a_comment_with_an_unknown_code_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.py").write_text("x = 1  # anybatch: ignore[AB999]\n", encoding="utf-8")
    assert Policy().unused(["a.py"], []) == (
        "a.py:1: the comment ignores AB999, which is no code or name of a finding.",
    )


@pytest.mark.parametrize(
    "text", ["", "x = (", "%matplotlib inline\nx = 'a", "\x00", "def f(:\n  # anybatch: ignore[AB1]"]
)
def test_a_file_that_is_no_python_hurts_nothing(tmp_path: Path, text: str) -> None:
    path = tmp_path / "a.py"
    path.write_text(text, encoding="utf-8")
    assert Policy().parted([finding("AB101", 1, path)])[1] == []
    path.write_bytes(b"# -*- coding: nowhere -*-\n\xff\xfe")
    assert line_at(str(path), 1) == ""


TABLE = """
[tool.anybatch.doctor]
select = ["AB1", "AB5"]
ignore = ["OPT_PARAM_MISSING"]
fail-on = "warning"

[tool.anybatch.doctor.per-path]
"tests/*" = ["AB5"]

[tool.anybatch.doctor.limits.LR_COLLAPSED]
share = 0.5
"""


def test_settings_are_read_from_the_nearest_file(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text(TABLE, encoding="utf-8")
    inner = tmp_path / "tests" / "deep"
    inner.mkdir(parents=True)
    policy = read_policy(inner)
    assert (policy.fail_on, policy.limits) == ("warning", {"LR_COLLAPSED": {"share": 0.5}})
    findings = [
        finding("AB101", 1, tmp_path / "train.py", "OPT_PARAM_MISSING"),
        finding("AB102", 1, tmp_path / "train.py"),
        finding("AB501", 1, tmp_path / "train.py"),
        finding("AB501", 1, inner / "train.py"),
        finding("AB601", 1, tmp_path / "train.py"),
    ]
    kept, others = policy.parted(findings)
    assert kept == findings[1:3]
    assert [one.reason for one in others] == ["ignore", "per-path tests/*", "not selected"]
    (inner / "pyproject.toml").write_text("[project]\nname = 'x'\n", encoding="utf-8")
    assert read_policy(inner) == Policy(folder=inner)


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ("selects = []", "got 'selects'; expected one of select, ignore, limits, per-path, fail-on"),
        ("select = 'AB1'", 'got \'AB1\'; expected a list of codes, such as ["AB1", "AB501"]'),
        ("select = ['AB9X']", "got 'AB9X'; expected a code such as AB101"),
        ("fail-on = 'info'", "fail-on: got 'info'; expected 'error' or 'warning'"),
        ("per-path = []", "per-path: got []; expected a table of patterns"),
        ("limits = {NOTHING = {a = 1}}", "limits: got 'NOTHING'; expected the code or name of a finding"),
        ("limits = {AB504 = {a = 1}}", "limits AB504: got 'a'; expected one of its thresholds (share, steps, rest)"),
        ("limits = {AB504 = {share = true}}", "limits AB504.share: got True; expected a number"),
        ("limits = {AB504 = 3}", "limits AB504: got 3; expected a table of thresholds"),
        ("x = ", "is no TOML"),
    ],
)
def test_settings_that_are_not_known_are_refused(tmp_path: Path, table: str, said: str) -> None:
    (tmp_path / "pyproject.toml").write_text(f"[tool.anybatch.doctor]\n{table}\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"pyproject\.toml") as caught:
        read_policy(tmp_path)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("text", "said"), [("tool = 1", "tool: got 1"), ("tool.anybatch = 'x'", "anybatch: got 'x'; expected a table")]
)
def test_settings_that_are_no_table_are_refused(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "pyproject.toml").write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=said):
        read_policy(tmp_path)


def test_a_baseline_knows_a_finding_by_its_text_and_not_by_its_number(train: Path, tmp_path: Path) -> None:
    first = finding("AB102", 9, train, module="head")
    path = tmp_path / "known.json"
    path.write_text(json.dumps(baseline_of([first], Policy())), encoding="utf-8")
    known = read_baseline(path)
    train.write_text("\n\n" + SOURCE, encoding="utf-8")
    moved = finding("AB102", 11, train, module="head")
    others = [finding("AB103", 11, train, module="head"), finding("AB102", 11, train), finding("AB102", 15, train)]
    kept, suppressed = Policy(baseline=known).parted([moved, *others])
    assert (kept, [one.by for one in suppressed]) == (others, ["baseline"])


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"kind": "anybatch diagnosis"}', '{"kind": "anybatch baseline"}'])
def test_another_file_is_no_baseline(tmp_path: Path, text: str) -> None:
    path = tmp_path / "known.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match="is no baseline of anybatch"):
        read_baseline(path)


def test_codes_are_written_as_one_likes() -> None:
    assert checked_codes(["ab1, lr_collapsed", "AB501"], "x") == ("AB1", "LR_COLLAPSED", "AB501")
    assert checked_codes([], "x") == checked_codes([" , "], "x") == ()


def run_of(file: str, steps: int = 30) -> Run:
    """A parameter that is in no optimizer."""
    parameters = [
        ParameterFacts(parameter=n, names=(f"{name}.weight",), root=0, module=name, shape=(2, 2), numel=4, at=n + 2)
        for n, name in enumerate(("body", "head"))
    ]
    modules = (ModuleFacts(name="", cls="Net"), *(
        ModuleFacts(name=one.module, cls="Linear", parameters=(one.parameter,)) for one in parameters
    ))  # fmt: skip
    facts: list[Fact] = [
        Started(script="train.py"),
        Root(root=0, variable="model", cls="Net", at=1, modules=modules),
        *parameters,
        OptimizerFacts(
            optimizer=0, variable="optimizer", cls="SGD", groups=(GroupFacts(parameters=(0,), lr=0.1),), at=4,
            file=file, line=4,
        ),
        *(
            fact
            for step in range(steps)
            for fact in (
                Forward(root=0, training=True, grad=True, at=4 * step + 5, step=step, file=file, line=9),
                Backward(value=1.0 / (step + 1), touched=(0, 1), touched_count=2, at=4 * step + 6, step=step),
                Norms(
                    optimizer=0, number=step, parameters=(0, 1), grad=(1.0, 1.0), weight=(1.0, 1.0), update=(0.1, 0.0),
                    unchanged=(0.0, 1.0), grad_zeros=(0.0, 0.0), state_moved=(None, None), at=4 * step + 7, step=step,
                ),
                Stepped(optimizer=0, number=step, lrs=(0.1,), with_grad=1, at=4 * step + 8, step=step),
            )
        ),
        Ended(exit_code=0, seconds=2.0, own_seconds=0.01, at=4 * steps + 9, step=steps),
    ]  # fmt: skip
    return Run(facts)


def test_what_is_ignored_is_no_part_of_the_verdict_and_not_forgotten(train: Path) -> None:
    found = diagnosis(run_of("elsewhere.py"))
    assert [one.code for one in found.findings] == ["AB101"]
    assert found.verdict == "faults"
    ignored = diagnosis(run_of(str(train)))
    assert ignored.findings == ()
    assert [(one.finding.code, one.by) for one in ignored.suppressed] == [("AB101", "line")]
    assert ignored.verdict == "learning"
    assert any("ignores AB5," in note for note in ignored.notes)


def test_a_comment_that_is_added_between_two_diagnoses_is_seen(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text("\n\n\noptimizer = 1\n", encoding="utf-8")
    assert [one.code for one in diagnosis(run_of(str(path))).findings] == ["AB101"]
    path.write_text("\n\n\noptimizer = 1  # anybatch: ignore[AB101] fixed\n", encoding="utf-8")
    assert diagnosis(run_of(str(path))).findings == ()


def test_thresholds_of_the_settings_are_used() -> None:
    facts: list[Fact] = []
    for one in run_of("elsewhere.py", steps=40).facts:
        if isinstance(one, Stepped):
            facts.append(replace(one, lrs=(0.1 if one.number < 10 else 0.02,)))
        elif isinstance(one, Backward):
            facts.append(replace(one, value=2 - 0.02 * one.step))
        else:
            facts.append(one)
    names = {one.name for one in diagnosis(Run(facts)).findings}
    stricter = diagnosis(Run(facts), Policy(limits={"LR_COLLAPSED": {"share": 0.5}}))
    assert {one.name for one in stricter.findings} - names == {"LR_COLLAPSED"}
