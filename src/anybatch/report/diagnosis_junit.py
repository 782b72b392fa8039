"""A diagnosis as JUnit XML, for the test reports of CI systems: the run and each finding are test cases."""

from xml.etree.ElementTree import Element, SubElement, indent, tostring

from anybatch.records.diagnoses import INTERRUPTED, Diagnosis
from anybatch.records.findings import Finding
from anybatch.records.runs import Run
from anybatch.records.sources import Sources
from anybatch.report import diagnosis as words
from anybatch.report.spots import spot_of
from anybatch.report.tables import clean


def text_of(diagnosis: Diagnosis, run: Run) -> str:
    """The XML: an error or a warning is a failed case; a script that failed without one is an error of case ``run``.

    Example:
        >>> print(text_of(Diagnosis(script="train.py"), Run([])).splitlines()[1])
        <testsuites name="anybatch doctor" tests="1" failures="0" errors="0" skipped="0" time="0.000">
    """
    sources = Sources()
    suites = Element("testsuites", name=words.tool_of(diagnosis))
    suite = SubElement(suites, "testsuite", name=clean(words.title_of(diagnosis)))
    run_case = SubElement(
        suite, "testcase", classname=_class_of(diagnosis), name="run", time=f"{diagnosis.seconds:.3f}"
    )
    SubElement(run_case, "system-out").text = clean(words.verdict_of(diagnosis, run))
    if diagnosis.exit_code not in (None, 0, INTERRUPTED) and not diagnosis.faulty:
        SubElement(run_case, "error", message=clean(words.verdict_of(diagnosis, run)))
    for one in diagnosis.findings:
        case = _case(suite, one, diagnosis, sources)
        if one.severity != "info":
            failure = SubElement(case, "failure", message=clean(one.message), type=str(one.severity))
            said = (str(one.place), one.cause, f"{words.fix_term(one)}: {one.fix}" if one.fix else "")
            failure.text = clean("\n".join(text for text in said if text))
        else:
            SubElement(case, "system-out").text = clean(one.message)
    for other in diagnosis.suppressed:
        case = _case(suite, other.finding, diagnosis, sources)
        SubElement(case, "skipped", message=clean(f"{other.by} {other.reason}".strip()))
    for element in (suites, suite):
        for name, kind in (("tests", "testcase"), ("failures", "failure"), ("errors", "error"), ("skipped", "skipped")):
            element.set(name, str(sum(1 for _ in suite.iter(kind))))
        element.set("time", f"{diagnosis.seconds:.3f}")
    indent(suites)
    return '<?xml version="1.0" encoding="utf-8"?>\n' + tostring(suites, encoding="unicode") + "\n"


def _case(suite: Element, one: Finding, diagnosis: Diagnosis, sources: Sources) -> Element:
    spot = spot_of(one, diagnosis.script, sources)
    name = clean(" ".join(filter(None, (one.code, one.name, str(one.place)))))
    return SubElement(suite, "testcase", classname=_class_of(diagnosis), name=name, file=spot.file, line=str(spot.line))


def _class_of(diagnosis: Diagnosis) -> str:
    return words.tool_of(diagnosis).replace(" ", ".")
