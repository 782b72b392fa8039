"""``anybatch explain``: what a finding of the doctor means, and what to change."""

import difflib
import reprlib
from collections.abc import Mapping

import click
from rich.console import Console
from rich.markdown import Markdown
from rich.text import Text

from anybatch.doctor.rules.registry import FAMILIES, Rule, all_rules

_STYLES = {"error": "bold red", "warning": "bold yellow", "info": "cyan"}
_CODES = 50  # that each family has
_WIDTH = 100
_LONGEST = 60  # of a name that is compared with those that there are


@click.command("explain", short_help="What does a finding of the doctor mean?")
@click.argument("names", nargs=-1, metavar="[CODE | NAME]...")
def explain_command(names: tuple[str, ...]) -> None:
    """Explains findings by code or name, such as AB101 or OPT_PARAM_MISSING; without one it lists them all.

    Each page says what the finding means, why it matters, what to change, and when it is fine.
    """
    rules = all_rules()
    console = Console(highlight=False)
    if not names:
        _list(rules, console)
        return
    found = [_rule_of(name, rules) for name in names]
    for number, rule in enumerate(found):
        if number:
            console.print()
        _show(rule, console)


def _rule_of(name: str, rules: Mapping[str, Rule]) -> Rule:
    """The rule with a code or name."""
    wanted = name.upper().replace("-", "_").replace(" ", "_")
    by_code = {rule.code: rule for rule in rules.values()}
    rule = rules.get(wanted) or by_code.get(wanted)
    if rule is not None:
        return rule
    close = difflib.get_close_matches(wanted[:_LONGEST], [*rules, *by_code], n=3, cutoff=0.6)
    parts = [other for other in rules if len(wanted) > 2 and wanted in other]
    near = list(dict.fromkeys([*parts[:5], *close]))
    hint = f"Did you mean {', '.join(near)}?" if near else "anybatch explain lists them all."
    raise click.UsageError(f"no finding has the code or name {reprlib.repr(name)}. {hint}")


def _show(rule: Rule, console: Console) -> None:
    """A page, set on a terminal and as its own Markdown elsewhere."""
    head = f"{rule.code} {rule.name} ({rule.severity})"
    if not console.is_terminal:
        click.echo(f"# {head}\n\n{_title(rule)}.\n\n{rule.page}{rule.decided}{_causes(rule)}", nl=False)
        return
    console.print(Text(head, style=_STYLES[rule.severity]))
    console.print(Text(f"{_title(rule)}.", style="bold"))
    console.print()
    console.print(Markdown(rule.page + rule.decided + _causes(rule)), width=min(console.width, _WIDTH))


def _title(rule: Rule) -> str:
    return f"{rule.title[:1].upper()}{rule.title[1:]}"


def _causes(rule: Rule) -> str:
    return f"\n## What may follow\n\nIt may be the cause of {', '.join(rule.explains)}.\n" if rule.explains else ""


def _list(rules: Mapping[str, Rule], console: Console) -> None:
    """All findings, by family."""
    ranges = sorted((first, family) for family, first in FAMILIES.items())
    shown = 0
    for first, family in ranges:
        members = [rule for rule in rules.values() if first <= int(rule.code.removeprefix("AB")) < first + _CODES]
        if not members:
            continue
        if shown:
            console.print()
        shown += len(members)
        console.print(Text(family, style="bold"))
        wide = max(len(rule.name) for rule in members)
        for rule in members:
            line = Text("  ").append(rule.code).append("  ").append(f"{rule.severity:7}", style=_STYLES[rule.severity])
            console.print(line.append(f"  {rule.name:{wide}}  {_title(rule)}"), soft_wrap=True)
