"""The page of public reports: each test that it names is there, and its figures are those of its tables."""

import re
import sys
from typing import NamedTuple

import pytest

import forked_python
from source_tree import ROOT

PAGE = (ROOT / "docs" / "reports.md").read_text(encoding="utf-8")
MOST = 63


class Report(NamedTuple):
    """One line of the tables."""

    number: int
    links: str
    seen: str
    ours: str
    does: str
    test: str


def reports() -> list[Report]:
    lines = [line.strip("|").split(" | ") for line in PAGE.splitlines() if re.match(r"\| \d+ \|", line)]
    return [Report(int(first), *(cell.strip(" `") for cell in rest)) for first, *rest in lines]


def test_there_is_a_line_for_each_report() -> None:
    found = reports()
    assert [report.number for report in found] == list(range(1, MOST + 1))
    assert all(re.search(r"https://github.com/[\w.-]+/[\w.-]+/(issues|pull)/\d+", report.links) for report in found)
    assert {report.ours for report in found} == {"yes", "in part", "no"}
    assert all(report.does.endswith(".") for report in found)


def test_what_is_ours_is_shown_by_a_test_and_the_page_counts_them() -> None:
    found = reports()
    ours = [report for report in found if report.ours != "no"]
    shown = [report for report in ours if report.test]
    in_part = sum(report.ours == "in part" for report in ours)
    assert len(shown) >= 45
    assert f"{len(ours)} are, of which {in_part} in part; a test shows {len(shown)}." in " ".join(PAGE.split())


def test_every_test_that_is_named_is_there(request: pytest.FixtureRequest) -> None:
    """In a run of all tests most were collected; the others are collected here."""
    there = {name for item in request.session.items for name in (item.nodeid, item.nodeid.partition("[")[0])}
    others = sorted({report.test for report in reports() if report.test} - there)
    if not others:
        return
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", *others]
    done = forked_python.run(command, ROOT)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]


def test_a_test_of_a_report_is_on_the_page() -> None:
    """A test that reproduces a report is found from its line, by its number."""
    by_number = {report.number: report.test for report in reports()}
    for path in sorted((ROOT / "tests").rglob("test_reports_*.py")):
        for name, number in re.findall(r"^def (test_(\d+)_\w+)", path.read_text(encoding="utf-8"), re.MULTILINE):
            assert by_number[int(number)].startswith(f"{path.relative_to(ROOT)}::{name}")
