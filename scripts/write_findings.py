#!/usr/bin/env python3
"""Writes docs/findings: a page for each rule of the doctor, from src/anybatch/doctor/pages.

.venv/bin/python scripts/write_findings.py            # writes what has changed
.venv/bin/python scripts/write_findings.py --check    # exits with 1 if a page is not what it is written from
"""

import json
import re
import sys
from pathlib import Path

from anybatch.doctor.rules.registry import FAMILIES, Rule, all_rules

FOLDER = Path(__file__).parents[1] / "docs" / "findings"
_INTRODUCTION = (
    "What each finding means, how the doctor knows it, what to change, and when it is fine; `anybatch explain` prints "
    "the same.\nAn `info` is a note. For a message that torch printed, search [troubleshooting by error message]"
    "(../troubleshooting.md).\n"
)
HEAD = "<!-- Written by scripts/write_findings.py from src/anybatch/doctor/pages; change that. -->\n"


def pages() -> dict[str, str]:
    """The text of each page by its file name."""
    rules = all_rules()
    found = {f"{rule.code}.md": page_of(rule, rules) for rule in rules.values()}
    return found | {"index.md": index_of(list(rules.values()))}


def page_of(rule: Rule, rules: dict[str, Rule]) -> str:
    """A rule as a page; its code is an example and does not run here."""
    text = (rule.page + rule.decided).replace("```python\n", "```python no-run\n")
    known = {each.code for each in rules.values()} - {rule.code}
    text = re.sub(r"\bAB\d{3}\b", lambda one: f"[{one[0]}]({one[0]}.md)" if one[0] in known else one[0], text)
    lines = [
        _described(rule),
        HEAD,
        f"# {rule.code}: {rule.title}\n",
        f"`{rule.name}`, severity: {rule.severity}.\n",
        text,
    ]
    following = [f"[{name}]({rules[name].code}.md)" for name in rule.explains if name in rules]
    if following:
        lines.append(f"## What may follow\n\nIt may be the cause of {', '.join(following)}.\n")
    return "\n".join(lines)


def _described(rule: Rule) -> str:
    """What a search engine shows of a page: its first paragraph, as front matter."""
    lead = " ".join(rule.page.partition("\n\n")[0].split()).replace("`", "")
    return f"---\nmyst:\n  html_meta:\n    description: {json.dumps(lead, ensure_ascii=False)}\n---\n"


def family_of(rule: Rule) -> str:
    """The name of the family that a rule's code belongs to."""
    number = int(rule.code[2:])
    return max((family for family in FAMILIES if FAMILIES[family] <= number), key=lambda family: FAMILIES[family])


def index_of(rules: list[Rule]) -> str:
    """The list of all findings by family."""
    lines = [HEAD, "# Findings of the doctor\n", _INTRODUCTION]
    for family in FAMILIES:
        of_family = [rule for rule in rules if family_of(rule) == family]
        if of_family:
            lines += [
                f"## {family.capitalize()}\n",
                "| code | what is wrong, and its name | severity |",
                "| --- | --- | --- |",
            ]
            lines += [f"| [{r.code}]({r.code}.md) | {r.title} `{r.name}` | {r.severity} |" for r in of_family]
            lines.append("")
    return "\n".join([*lines, "```{toctree}", ":hidden:", ":glob:", "", "AB*", "```", ""])


def main() -> int:
    """Writes or checks the pages."""
    wanted = pages()
    there = {path.name: path.read_text(encoding="utf-8") for path in FOLDER.glob("*.md")}
    if "--check" in sys.argv[1:]:
        stale = sorted(name for name in wanted.keys() | there.keys() if wanted.get(name) != there.get(name))
        if stale:
            sys.stderr.write(f"not what they are written from: {', '.join(stale)}; run scripts/write_findings.py\n")
        return int(bool(stale))
    FOLDER.mkdir(exist_ok=True)
    for name in there.keys() - wanted.keys():
        (FOLDER / name).unlink()
    for name, text in wanted.items():
        (FOLDER / name).write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
