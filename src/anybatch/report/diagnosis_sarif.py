"""A diagnosis as SARIF 2.1.0, for code scanning and editors."""

import hashlib
import json
from collections.abc import Iterable
from typing import Any
from urllib.parse import quote

from anybatch._version import __version__
from anybatch.records.diagnoses import INTERRUPTED, Diagnosis, Suppressed
from anybatch.records.findings import Finding
from anybatch.records.runs import Run
from anybatch.records.sources import Sources
from anybatch.report import diagnosis as words
from anybatch.report.spots import spot_of

SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"
_LEVELS = {"error": "error", "warning": "warning", "info": "note"}
_KINDS = {"line": "inSource", "settings": "external", "baseline": "external"}


def text_of(diagnosis: Diagnosis, run: Run, rules: Iterable[Any] = ()) -> str:
    """The SARIF log: the rules, the findings, and the suppressed findings marked as such.

    Example:
        >>> values = json.loads(text_of(Diagnosis(script="train.py"), Run([])))
        >>> values["version"], values["runs"][0]["results"]
        ('2.1.0', [])
    """
    rules = list(rules)
    numbers = {rule.code: number for number, rule in enumerate(rules)}
    sources = Sources()
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
    results = [_result(one, other, numbers, diagnosis.script, sources) for one, other in everything]
    log = {"tool": {"driver": driver}, "invocations": [invocation], "columnKind": "unicodeCodePoints"}
    return json.dumps({"$schema": SCHEMA, "version": "2.1.0", "runs": [log | {"results": results}]}, indent=2) + "\n"


def _result(
    one: Finding, suppressed: Suppressed | None, numbers: dict[str, int], script: str, sources: Sources
) -> dict[str, Any]:
    spot = spot_of(one, script, sources)
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
