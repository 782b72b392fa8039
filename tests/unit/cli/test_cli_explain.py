"""``anybatch explain``: what a finding means."""

import io
import re

import pytest
from click.testing import CliRunner
from rich.console import Console

from anybatch.cli import explain
from anybatch.cli.main import main
from anybatch.doctor.rules.registry import FAMILIES, all_rules


def test_the_list_has_every_rule_once_under_its_family() -> None:
    done = CliRunner().invoke(main, ["explain"])
    assert done.exit_code == 0
    listed = re.findall(r"^  (AB\d{3})  (?:error|warning|info) +([A-Z0-9_]+)  +\S", done.output, re.MULTILINE)
    assert listed == [(rule.code, rule.name) for rule in all_rules().values()]
    families = [line for line in done.output.splitlines() if line and not line.startswith(" ")]
    assert families == [family for family in FAMILIES if family in families]
    for family, rules in zip(families, done.output.split("\n\n"), strict=True):
        codes = [int(code) for code in re.findall(r"  AB(\d{3})  ", rules)]
        assert all(FAMILIES[family] <= code < FAMILIES[family] + 50 for code in codes)


@pytest.mark.parametrize("name", ["AB101", "ab101", "OPT_PARAM_MISSING", "opt-param-missing", "Opt_Param_Missing"])
def test_a_page_is_found_by_code_and_by_name(name: str) -> None:
    done = CliRunner().invoke(main, ["explain", name])
    rule = all_rules()["OPT_PARAM_MISSING"]
    assert done.exit_code == 0
    title = "A trainable parameter is in no optimizer."
    assert done.output.startswith(f"# AB101 OPT_PARAM_MISSING (error)\n\n{title}\n\n{rule.page}")


def test_a_page_ends_with_what_may_follow_from_the_finding() -> None:
    rule = next(rule for rule in all_rules().values() if len(rule.explains) > 1)
    done = CliRunner().invoke(main, ["explain", rule.code])
    assert done.output.endswith(f"\n\nIt may be the cause of {', '.join(rule.explains)}.\n")
    alone = next(rule for rule in all_rules().values() if not rule.explains)
    assert CliRunner().invoke(main, ["explain", alone.code]).output.endswith(alone.page + alone.decided)


def test_a_page_shows_the_thresholds_with_their_source_and_the_facts_that_are_needed() -> None:
    output = CliRunner().invoke(main, ["explain", "DEAD_UNITS"]).output
    assert "\n## How it is decided\n\n- `share` = 0.9: of the units" in output
    assert "\nIt says nothing where no `Activations` was recorded.\n" in output


def test_several_pages_come_one_after_the_other() -> None:
    done = CliRunner().invoke(main, ["explain", "AB101", "AB102"])
    assert re.findall(r"^# (AB\d+)", done.output, re.MULTILINE) == ["AB101", "AB102"]


def test_a_page_is_set_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    file = io.StringIO()
    monkeypatch.setattr(explain, "Console", lambda **options: Console(file=file, force_terminal=True, width=70))
    assert CliRunner().invoke(main, ["explain", "AB101"]).exit_code == 0
    text = re.sub(r"\x1b\[[0-9;]*m", "", file.getvalue())
    assert "\x1b[" in file.getvalue()
    assert "AB101 OPT_PARAM_MISSING (error)" in text
    assert "```" not in text
    assert max(map(len, text.splitlines())) <= 70


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("OPT_PARAM_MISING", "Did you mean OPT_PARAM_MISSING"),
        ("param_missing", "Did you mean OPT_PARAM_MISSING"),
        ("AB1001", "AB101"),
        ("xyz", "anybatch explain lists them all"),
        ("", "anybatch explain lists them all"),
    ],
)
def test_an_unknown_name_gives_those_that_are_near(name: str, hint: str) -> None:
    done = CliRunner().invoke(main, ["explain", name])
    assert done.exit_code == 2
    assert f"no finding has the code or name {name!r}" in done.output
    assert hint in done.output


def test_every_page_can_be_set() -> None:
    for rule in all_rules().values():
        done = CliRunner().invoke(main, ["explain", rule.code])
        assert done.exit_code == 0
        assert rule.name in done.output
