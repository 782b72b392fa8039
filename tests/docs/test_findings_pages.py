"""The pages of the findings are what the rules say."""

import importlib.util
import re
from types import ModuleType

import pytest

from anybatch.doctor.rules.registry import all_rules
from source_tree import ROOT


@pytest.fixture(scope="module")
def writer() -> ModuleType:
    spec = importlib.util.spec_from_file_location("write_findings", ROOT / "scripts" / "write_findings.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_pages_are_what_the_rules_say(writer: ModuleType) -> None:
    there = {path.name: path.read_text(encoding="utf-8") for path in (ROOT / "docs" / "findings").glob("*.md")}
    stale = sorted(name for name in {*there, *writer.pages()} if there.get(name) != writer.pages().get(name))
    assert not stale, f"run scripts/write_findings.py: {stale}"


def test_every_rule_is_in_the_index_and_its_links_lead_somewhere(writer: ModuleType) -> None:
    pages = writer.pages()
    assert all(f"[{rule.code}]({rule.code}.md)" in pages["index.md"] for rule in all_rules().values())
    links = {link for text in pages.values() for link in re.findall(r"\]\(([^)]+\.md)\)", text)}
    assert {link for link in links if not link.startswith("../")} <= pages.keys()  # others: test_docs_links


def test_codes_stay_within_their_family(writer: ModuleType) -> None:
    for rule in all_rules().values():
        assert 0 <= int(rule.code[2:]) - writer.FAMILIES[writer.family_of(rule)] < 50, rule.name
