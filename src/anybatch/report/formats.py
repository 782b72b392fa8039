"""A diagnosis for other programs: SARIF, workflow commands of GitHub, JUnit, and lines that editors parse."""

import hashlib
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote
from xml.etree.ElementTree import Element, SubElement, indent, tostring

from anybatch._version import __version__
from anybatch.records.diagnoses import INTERRUPTED, Diagnosis, Suppressed
from anybatch.records.findings import Finding
from anybatch.records.runs import Run
from anybatch.records.sources import line_at
from anybatch.report import diagnosis as words
from anybatch.report.tables import clean

_COMMANDS = {"error": "error", "warning": "warning", "info": "notice"}
SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"
_LEVELS = {"error": "error", "warning": "warning", "info": "note"}
_KINDS = {"line": "inSource", "settings": "external", "baseline": "external"}


class _Spot(NamedTuple):
    """A place in a file."""

    file: str  # with slashes; relative to the working directory if inside it, else absolute; empty if there is none
    line: int = 1  # from 1
    column: int = 1  # of the first character of the line that is not a space, from 1
    text: str = ""  # the line, stripped


def _spot_of(finding: Finding, script: str) -> _Spot:
    """The place of a finding; without a file, the beginning of the script."""
    place = finding.place
    if not place.file:
        return _Spot(_relative(script) if script and not script.startswith("-m ") else "")
    line = max(1, place.line)
    text = line_at(place.file, line)
    indentation = len(text) - len(text.lstrip()) if place.line else 0
    return _Spot(_relative(place.file), line, indentation + 1, text.strip())


def _relative(file: str) -> str:
    path, here = Path(file).absolute(), Path.cwd()
    return path.relative_to(here).as_posix() if path.is_relative_to(here) else path.as_posix()


def lines(diagnosis: Diagnosis, run: Run) -> str:
    """One line per finding; empty without findings."""
    texts = []
    for one in diagnosis.findings:
        spot = _spot_of(one, diagnosis.script)
        head = f"{spot.file}:{spot.line}:{spot.column}: " if spot.file else ""
        message = " ".join(one.message.split())
        texts.append(f"{head}{one.severity} {one.code} {message}\n")
    return "".join(texts)


def github(diagnosis: Diagnosis, run: Run) -> str:
    """One command per finding, one for the verdict, and one per note of the diagnosis."""
    texts = []
    for one in diagnosis.findings:
        spot = _spot_of(one, diagnosis.script)
        where = f"file={_property(spot.file)},line={spot.line},col={spot.column}," if spot.file else ""
        fix = f"\n{words.fix_term(one)}: {one.fix.strip()}" if one.fix.strip() else ""
        title = _property(f"{one.code} {one.name}".strip())
        texts.append(f"::{_COMMANDS[one.severity or 'info']} {where}title={title}::{_data(one.message + fix)}\n")
    verdict = f"{words.title_of(diagnosis)}: {words.verdict_of(diagnosis, run)}"
    texts += [f"::notice title={words.tool_of(diagnosis)}::{_data(text)}\n" for text in (verdict, *diagnosis.notes)]
    return "".join(texts)


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")


def junit(diagnosis: Diagnosis, run: Run) -> str:
    """The XML: an error or a warning is a failed case; a script that failed without one is an error of case ``run``."""
    suites = Element("testsuites", name=words.tool_of(diagnosis))
    suite = SubElement(suites, "testsuite", name=clean(words.title_of(diagnosis)))
    run_case = SubElement(
        suite, "testcase", classname=_class_of(diagnosis), name="run", time=f"{diagnosis.seconds:.3f}"
    )
    SubElement(run_case, "system-out").text = clean(words.verdict_of(diagnosis, run))
    if diagnosis.exit_code not in (None, 0, INTERRUPTED) and not diagnosis.faulty:
        SubElement(run_case, "error", message=clean(words.verdict_of(diagnosis, run)))
    for one in diagnosis.findings:
        case = _case(suite, one, diagnosis)
        if one.severity != "info":
            failure = SubElement(case, "failure", message=clean(one.message), type=str(one.severity))
            said = (str(one.place), one.cause, f"{words.fix_term(one)}: {one.fix}" if one.fix else "")
            failure.text = clean("\n".join(text for text in said if text))
        else:
            SubElement(case, "system-out").text = clean(one.message)
    for other in diagnosis.suppressed:
        case = _case(suite, other.finding, diagnosis)
        SubElement(case, "skipped", message=clean(f"{other.by} {other.reason}".strip()))
    for element in (suites, suite):
        for name, kind in (("tests", "testcase"), ("failures", "failure"), ("errors", "error"), ("skipped", "skipped")):
            element.set(name, str(sum(1 for _ in suite.iter(kind))))
        element.set("time", f"{diagnosis.seconds:.3f}")
    indent(suites)
    return '<?xml version="1.0" encoding="utf-8"?>\n' + tostring(suites, encoding="unicode") + "\n"


def _case(suite: Element, one: Finding, diagnosis: Diagnosis) -> Element:
    spot = _spot_of(one, diagnosis.script)
    name = clean(" ".join(filter(None, (one.code, one.name, str(one.place)))))
    return SubElement(suite, "testcase", classname=_class_of(diagnosis), name=name, file=spot.file, line=str(spot.line))


def _class_of(diagnosis: Diagnosis) -> str:
    return words.tool_of(diagnosis).replace(" ", ".")


def sarif(diagnosis: Diagnosis, run: Run, rules: Iterable[Any] = ()) -> str:
    """The SARIF log: the rules, the findings, and the suppressed findings marked as such."""
    rules = list(rules)
    numbers = {rule.code: number for number, rule in enumerate(rules)}
    everything = [*((one, None) for one in diagnosis.findings), *((one.finding, one) for one in diagnosis.suppressed)]
    driver = {
        "name": words.tool_of(diagnosis),
        "version": __version__,
        "rules": [
            {
                "id": rule.code,
                "name": rule.name,
                "shortDescription": {"text": rule.title},
                "help": {"text": rule.page, "markdown": rule.page},
                "defaultConfiguration": {"level": _LEVELS[rule.severity]},
            }
            for rule in rules
        ],
    }
    invocation: dict[str, Any] = {"executionSuccessful": diagnosis.exit_code in (None, 0, INTERRUPTED)}
    if diagnosis.exit_code is not None:
        invocation["exitCode"] = diagnosis.exit_code
    invocation["toolExecutionNotifications"] = [
        {"level": "note", "message": {"text": text}} for text in (words.verdict_of(diagnosis, run), *diagnosis.notes)
    ]
    results = [_result(one, other, numbers, diagnosis.script) for one, other in everything]
    log = {"tool": {"driver": driver}, "invocations": [invocation], "columnKind": "unicodeCodePoints"}
    return json.dumps({"$schema": SCHEMA, "version": "2.1.0", "runs": [log | {"results": results}]}, indent=2) + "\n"


def _result(one: Finding, suppressed: Suppressed | None, numbers: dict[str, int], script: str) -> dict[str, Any]:
    spot = _spot_of(one, script)
    fix = f"{words.fix_term(one)}: {one.fix.strip()}" if one.fix.strip() else ""
    location: dict[str, Any] = {}
    if spot.file:
        snippet = {"snippet": {"text": spot.text}} if spot.text else {}
        location["physicalLocation"] = {
            "artifactLocation": {
                "uri": quote(spot.file) if not spot.file.startswith("/") else "file://" + quote(spot.file)
            },
            "region": {"startLine": spot.line, "startColumn": spot.column} | snippet,
        }
    if one.place.module:
        location["logicalLocations"] = [{"fullyQualifiedName": one.place.module, "kind": "module"}]
    known = "\0".join((one.code, one.place.module, spot.text))
    result: dict[str, Any] = {
        "ruleId": one.code,
        "level": _LEVELS[one.severity or "info"],
        "message": {"text": "\n".join(text for text in (one.message, one.cause, fix) if text)},
        "locations": [location] if location else [],
        "partialFingerprints": {"anybatch/v1": hashlib.sha256(known.encode("utf-8", "replace")).hexdigest()},
    }
    if one.code in numbers:
        result["ruleIndex"] = numbers[one.code]
    if suppressed is not None:
        reason = {"justification": suppressed.reason} if suppressed.reason else {}
        result["suppressions"] = [{"kind": _KINDS[suppressed.by]} | reason]
    return result


TEXTS: dict[str, Callable[..., str]] = {"sarif": sarif, "github": github, "junit": junit, "line": lines}
"""What makes the text of a format, from a diagnosis and its run."""
