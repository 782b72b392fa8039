"""A diagnosis in the formats of other programs, each read by what it is for."""

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from anybatch.cli.doctor_records import values_of
from anybatch.doctor.rules.registry import all_rules
from anybatch.records.diagnoses import Diagnosis, Suppressed
from anybatch.records.findings import Finding, Place
from anybatch.records.runs import Run
from anybatch.report import formats
from diagnosis_samples import CRASH, FAULTY, HEALTHY, MISSING, NOTE, run_of
from source_tree import ROOT

jsonschema = pytest.importorskip("jsonschema")  # both are in the extra "test"
JUnitXml = pytest.importorskip("junitparser").JUnitXml
SARIF = json.loads((Path(__file__).parents[2] / "schemas" / "sarif-2.1.0.json").read_text(encoding="utf-8"))
OWN = json.loads((ROOT / "docs" / "static" / "diagnosis.schema.json").read_text(encoding="utf-8"))
ODD = Finding(
    "100 %0A of it,\nthe rest: \x1b[31mred\x00 <&> \ud800", Place("a", file="/a b/ü,:%.py", line=3), fix='x = "\n"',
    severity="warning", code="AB601", name="X",
)  # fmt: skip
RUNS: dict[str, tuple[Diagnosis, Run]] = {
    "healthy": (HEALTHY, run_of(30)),
    "faulty": (FAULTY, run_of(30, odd=math.nan)),
    "crashed": (replace(HEALTHY, verdict="crashed", exit_code=1), Run([CRASH])),
    "nothing": (Diagnosis(), Run([])),
    "odd": (Diagnosis((ODD,), script="-m pack.train", notes=("a\nb",), exit_code=3), Run([])),
    "suppressed": (Diagnosis(suppressed=(Suppressed(MISSING, "line", "meant"), Suppressed(NOTE, "baseline"))), Run([])),
}


@pytest.fixture(params=RUNS)
def found(request: pytest.FixtureRequest) -> tuple[Diagnosis, Run]:
    return RUNS[request.param]


def test_sarif_is_valid(found: tuple[Diagnosis, Run]) -> None:
    text = formats.sarif(*found, all_rules().values())
    text.encode("utf-8")
    values = json.loads(text)
    jsonschema.Draft4Validator(SARIF, format_checker=jsonschema.FormatChecker()).validate(values)
    results, rules = values["runs"][0]["results"], values["runs"][0]["tool"]["driver"]["rules"]
    assert len(results) == len(found[0].findings) + len(found[0].suppressed)
    assert all(rules[one["ruleIndex"]]["id"] == one["ruleId"] for one in results if "ruleIndex" in one)


def test_the_schema_of_sarif_refuses_what_is_none() -> None:
    values = json.loads(formats.sarif(*RUNS["faulty"]))
    values["runs"][0]["results"][0]["level"] = "info"
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.Draft4Validator(SARIF).validate(values)


def test_sarif_names_the_place_and_stays_the_same_finding_when_lines_move(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    def result(text: str, line: int) -> Any:
        Path("train.py").write_text(text, encoding="utf-8")
        one = replace(MISSING, place=replace(MISSING.place, file=str(tmp_path / "train.py"), line=line))
        return json.loads(formats.sarif(Diagnosis((one,)), Run([])))["runs"][0]["results"][0]

    first, later = result("if a:\n    b = c()\n", 2), result("\n\nif a:\n    b = c()\n", 4)
    place = first["locations"][0]["physicalLocation"]
    assert place["artifactLocation"]["uri"] == "train.py"
    assert place["region"] == {"startLine": 2, "startColumn": 5, "snippet": {"text": "b = c()"}}
    assert first["partialFingerprints"] == later["partialFingerprints"]
    assert first["partialFingerprints"] != result("if a:\n    b = d()\n", 2)["partialFingerprints"]


def test_what_is_ignored_is_suppressed_in_sarif_and_skipped_in_junit() -> None:
    results = json.loads(formats.sarif(*RUNS["suppressed"]))["runs"][0]["results"]
    assert [one["suppressions"] for one in results] == [
        [{"kind": "inSource", "justification": "meant"}],
        [{"kind": "external"}],
    ]
    suite = next(iter(JUnitXml.fromstring(formats.junit(*RUNS["suppressed"]).encode())))
    assert (suite.tests, suite.skipped, suite.failures) == (3, 2, 0)


def test_junit_counts(found: tuple[Diagnosis, Run]) -> None:
    diagnosis = found[0]
    xml = JUnitXml.fromstring(formats.junit(*found).encode())
    stated = xml.tests, xml.failures, xml.errors, xml.skipped
    xml.update_statistics()
    assert stated == (xml.tests, xml.failures, xml.errors, xml.skipped)
    grave = [one for one in diagnosis.findings if one.severity != "info"]
    assert xml.failures == len(grave)
    assert (xml.failures + xml.errors > 0) == (bool(grave) or bool(diagnosis.exit_code))


def test_lines_are_read_by_a_problem_matcher(found: tuple[Diagnosis, Run]) -> None:
    matcher = json.loads((ROOT / "docs" / "static" / "problem-matcher.json").read_text(encoding="utf-8"))
    pattern = re.compile(matcher["problemMatcher"][0]["pattern"][0]["regexp"])
    lines = formats.lines(*found).splitlines()
    assert len(lines) == len(found[0].findings)
    matches = [pattern.fullmatch(line) for line in lines]
    assert [match[5] for match in matches if match is not None] == [
        one.code for one in found[0].findings if one.place.file or found[0].script.endswith(".py")
    ]


def commands(text: str) -> list[tuple[str, dict[str, str], str]]:
    """Reads workflow commands as the runner does: actions/runner, src/Runner.Common/ActionCommand.cs."""
    read = []
    for line in text.splitlines():
        command, _, data = line.removeprefix("::").partition("::")
        name, _, rest = command.partition(" ")
        pairs = [pair.partition("=") for pair in rest.split(",") if pair]
        properties = {key: unescaped(value, {"%3A": ":", "%2C": ","}) for key, _, value in pairs}
        read.append((name, properties, unescaped(data, {})))
    return read


def unescaped(text: str, more: dict[str, str]) -> str:
    for code, character in (more | {"%0D": "\r", "%0A": "\n", "%25": "%"}).items():
        text = text.replace(code, character)
    return text


def test_github_annotates_each_finding(found: tuple[Diagnosis, Run]) -> None:
    read = commands(formats.github(*found))
    assert {name for name, _, _ in read} <= {"error", "warning", "notice"}
    findings = found[0].findings
    for (name, properties, data), one in zip(read, findings, strict=False):
        assert name == {"info": "notice"}.get(one.severity, one.severity)
        assert properties["title"] == f"{one.code} {one.name}"
        assert data.startswith(one.message)
        assert not one.place.file or (properties["file"], properties["line"]) == (one.place.file, str(one.place.line))
    assert read[len(findings)][1] == {"title": "anybatch doctor"}
    assert len(read) == len(findings) + 1 + len(found[0].notes)


def test_json_has_the_form_that_is_promised(found: tuple[Diagnosis, Run]) -> None:
    values = json.loads(json.dumps(values_of(*found), allow_nan=False))
    jsonschema.validate(values, OWN)


def test_the_schema_says_everything_that_there_is() -> None:
    values = values_of(*RUNS["faulty"])
    assert set(OWN["required"]) == set(values)
    definitions = OWN["$defs"]
    assert set(definitions["finding"]["required"]) == set(values["findings"][0])
    assert set(definitions["cell"]["required"]) == set(FAULTY.cells[0].to_dict())
    assert set(definitions["finding"]["properties"]["place"]["required"]) == set(values["findings"][0]["place"])
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(values | {"verdict": "fine"}, OWN)


def test_each_format_has_a_text() -> None:
    from anybatch.cli.reporting import FORMATS

    assert formats.TEXTS.keys() == set(FORMATS) - {"terminal", "json"}
    for text_of in formats.TEXTS.values():
        assert text_of(Diagnosis(), Run([])) is not None
