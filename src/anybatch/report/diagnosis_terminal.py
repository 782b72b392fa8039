"""A diagnosis for the terminal: the verdict, what to change, which parameters changed; plain text in a pipe."""

import textwrap

from rich.console import Console
from rich.text import Text

from anybatch.records.diagnoses import Diagnosis
from anybatch.records.events import Crashed
from anybatch.records.findings import Finding, is_code
from anybatch.records.runs import Run
from anybatch.report import diagnosis as words
from anybatch.report.source import source_of
from anybatch.report.tables import clean
from anybatch.report.terminal import Terminal

_MOST_FULL = 3
_MOST_SHORT = 6
_MOST_NOTES = 5
_MOST_EVIDENCE = 8
_MOST_FIX_LINES = 40
_LONGEST_VALUE = 200
_INDENT = "   "
_ELSEWHERE = "--json or --output"
_STYLES = {"error": "bold red", "warning": "bold yellow", "info": "cyan", "healthy": "bold green", "unknown": "bold"}


def show(diagnosis: Diagnosis, run: Run, console: Console) -> None:
    """Writes a diagnosis: a few lines for a healthy run, about a page for a faulty one."""
    screen = _Screen(console, run.started.time)
    verdict = words.verdict_of(diagnosis, run)
    screen.words(f"{words.title_of(diagnosis)}: {verdict}.", style=_STYLES[words.mood_of(diagnosis, run)])
    crash = words.crash_of(run)
    grave, notes = words.grave_and_notes(diagnosis)
    if crash is not None and not any(one.name == crash.name for one in diagnosis.findings if crash.name):
        screen.crash(crash)
    for number, knot in enumerate(grave[:_MOST_FULL], start=1):
        screen.finding(knot, number if len(grave) > 1 else 0, verdict)
    screen.others(grave[_MOST_FULL:])
    screen.notes(notes)
    if diagnosis.cells:
        screen.heading("Which gradients and parameters change?")
        screen.table(words.cells_table(diagnosis), mark="bold yellow", wraps=True)
    cost = words.cost_of(diagnosis, run)
    code = grave[0].finding.code if grave else ""
    hint = [f"What it means, and when it is fine: anybatch explain {code}"] if code else []
    remarks = [*hint, *diagnosis.notes, *([f"{cost[0].upper()}{cost[1:]}."] if cost else [])]
    if remarks:
        console.print()
    for text in remarks:
        screen.words(text, style="dim")


class _Screen(Terminal):
    """Writes the parts of a diagnosis."""

    def __init__(self, console: Console, since: float) -> None:
        super().__init__(console)
        self._since = since
        ascii_only = console.options.ascii_only
        self._tee, self._corner, self._bar = ("|- ", "`- ", "|  ") if ascii_only else ("├─ ", "└─ ", "│  ")

    def finding(self, knot: words.Knot, number: int, verdict: str) -> None:
        """Writes a finding in full; its message is left out if the verdict has it already."""
        finding = knot.finding
        place = str(finding.place)
        self.line()
        head = f"{number}. " if number else ""
        line = Text(clean(f"{head}{words.label_of(finding)}"), style=_STYLES[finding.severity or "info"])
        self.console.print(line.append(clean(f"  {place}") if place else "", style="bold"), soft_wrap=True)
        self._source(finding)
        if number or finding.message.strip().rstrip(".") not in verdict:
            self.words(finding.message, indent="   ")
        if finding.cause:
            self.term("why", finding.cause, indent=_INDENT)
        evidence = words.evidence_of(finding)
        if evidence:
            more = f"; and {len(evidence) - _MOST_EVIDENCE} more" if len(evidence) > _MOST_EVIDENCE else ""
            said = (f"{name} {_clipped(text)}" for name, text in evidence[:_MOST_EVIDENCE])
            self.term("evidence", "; ".join(said) + more, indent=_INDENT)
        if finding.proof:
            self.term("proof", finding.proof, indent=_INDENT)
        self._fix(finding.fix, words.fix_term(finding))
        if knot.follows:
            self.line("   it leads to", "dim")
            self._branches(knot.follows, "   ")

    def _source(self, finding: Finding) -> None:
        """Writes the user's line with carets below the faulty part."""
        source = source_of(finding, self._since)
        for line in source.marked.splitlines() if source is not None else ():
            self.line(f"   {line}")

    def _fix(self, fix: str, term: str = "suggestion") -> None:
        lines = textwrap.dedent(fix).strip("\n").splitlines()
        if not lines:
            return
        if len(lines) == 1 and not is_code(fix):
            self.term(term, fix, "green", indent=_INDENT)
            return
        self.line(f"   {term}", "bold green")
        for line in lines[:_MOST_FIX_LINES]:
            self.line(f"       {line}", "green")
        if len(lines) > _MOST_FIX_LINES:
            self.line(f"       and {len(lines) - _MOST_FIX_LINES} lines more: --json or --output", "dim")

    def _branches(self, knots: tuple[words.Knot, ...], indent: str) -> None:
        for knot in knots:
            last = knot is knots[-1]
            finding = knot.finding
            text = f"{words.label_of(finding)}: {finding.message}"
            first, rest = (self._corner, "   ") if last else (self._tee, self._bar)
            self.words(text, first=indent + first, indent=indent + rest)
            self._branches(knot.follows, indent + rest)

    def others(self, knots: tuple[words.Knot, ...]) -> None:
        """Writes findings in short, one paragraph each."""
        if not knots:
            return
        self.heading("Further findings")
        for number, knot in enumerate(knots[:_MOST_SHORT], start=_MOST_FULL + 1):
            finding = knot.finding
            more = f" (leads to {len(knot.follows)} more)" if knot.follows else ""
            self.words(f"{number}. {words.label_of(finding)}: {finding.message}{more}", indent="   ", first="")
        self.rest(len(knots) - _MOST_SHORT, _ELSEWHERE)

    def notes(self, knots: tuple[words.Knot, ...]) -> None:
        """Writes notes in short."""
        if not knots:
            return
        self.heading("Notes")
        for knot in knots[:_MOST_NOTES]:
            self.words(f"{knot.finding.code} {knot.finding.message}".strip(), first="- ", indent="  ")
        self.rest(len(knots) - _MOST_NOTES, _ELSEWHERE)

    def crash(self, crash: Crashed) -> None:
        """Writes the exception that ended the script."""
        self.line()
        where = f"  {crash.file}:{crash.line}" if crash.file else ""
        self.line(f"{crash.error}{where}", _STYLES["error"])
        if crash.code:
            self.line(f"       {crash.code.strip()}", "bold")
        if crash.message:  # without one, the verdict has the text of the exception
            self.words(crash.message, indent="   ", first="   ")
        for name, text in (("why", crash.cause), ("tensor", crash.tensor)):
            if text:
                self.term(name, text, indent=_INDENT)
        self._fix(crash.fix)


def _clipped(text: str) -> str:
    """Shortens a long list at an entry, so that no number is cut."""
    if len(text) <= _LONGEST_VALUE:
        return text
    head = text[:_LONGEST_VALUE]
    return f"{head.rpartition(', ' if ', ' in head else ' ')[0] or head}, ..."
