"""A diagnosis as workflow commands of GitHub Actions, which annotate lines of a pull request."""

from anybatch.records.diagnoses import Diagnosis
from anybatch.records.runs import Run
from anybatch.records.sources import Sources
from anybatch.report import diagnosis as words
from anybatch.report.spots import spot_of

_COMMANDS = {"error": "error", "warning": "warning", "info": "notice"}


def text_of(diagnosis: Diagnosis, run: Run) -> str:
    """One command per finding, one for the verdict, and one per note of the diagnosis.

    Example:
        >>> print(text_of(Diagnosis(script="train.py"), Run([])), end="")
        ::notice title=anybatch doctor::train.py: nothing to judge: no optimizer stepped
    """
    sources = Sources()
    lines = []
    for one in diagnosis.findings:
        spot = spot_of(one, diagnosis.script, sources)
        where = f"file={_property(spot.file)},line={spot.line},col={spot.column}," if spot.file else ""
        fix = f"\n{words.fix_term(one)}: {one.fix.strip()}" if one.fix.strip() else ""
        title = _property(f"{one.code} {one.name}".strip())
        lines.append(f"::{_COMMANDS[one.severity or 'info']} {where}title={title}::{_data(one.message + fix)}\n")
    verdict = f"{words.title_of(diagnosis)}: {words.verdict_of(diagnosis, run)}"
    lines += [f"::notice title={words.tool_of(diagnosis)}::{_data(text)}\n" for text in (verdict, *diagnosis.notes)]
    return "".join(lines)


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")
