"""A diagnosis as one line per finding, a format that editors parse: ``path:line:column: severity code message``."""

from anybatch.records.diagnoses import Diagnosis
from anybatch.records.runs import Run
from anybatch.records.sources import Sources
from anybatch.report.spots import one_line, spot_of


def text_of(diagnosis: Diagnosis, run: Run) -> str:
    """One line per finding; empty without findings.

    Example:
        >>> from anybatch.records.findings import Finding
        >>> found = Finding("It has no gradient.", severity="error", code="AB101")
        >>> text_of(Diagnosis((found,), script="train.py"), Run([]))
        'train.py:1:1: error AB101 It has no gradient.\\n'
    """
    sources = Sources()
    lines = []
    for one in diagnosis.findings:
        spot = spot_of(one, diagnosis.script, sources)
        head = f"{spot.file}:{spot.line}:{spot.column}: " if spot.file else ""
        lines.append(f"{head}{one.severity} {one.code} {one_line(one.message)}\n")
    return "".join(lines)
