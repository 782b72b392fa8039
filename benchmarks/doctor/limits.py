"""What the thresholds of the doctor's rules decide: each is halved and doubled, and the findings are compared.

    python benchmarks/doctor/limits.py FOLDER            # of records, *.jsonl or *.jsonl.gz
    python benchmarks/doctor/limits.py FOLDER --only LR  # of rules whose name has LR in it

A row says in how many runs the findings of the rule are others: with half of the threshold, and with twice of it. Where
both are 0, none of these runs needs the threshold.
"""

from __future__ import annotations

import argparse
import gzip
from pathlib import Path

from anybatch.doctor.rules.registry import Rule, all_rules
from anybatch.records.findings import Finding
from anybatch.records.runs import Run, read_run


def run_of(path: Path) -> Run:
    """Reads a record, compressed or not."""
    data = path.read_bytes()
    return read_run((gzip.decompress(data) if path.suffix == ".gz" else data).splitlines(keepends=True))


def seen(findings: list[Finding]) -> list[tuple[str, str]]:
    """Where a rule speaks, and how gravely."""
    return [(str(one.place), one.severity) for one in findings]


def changed(rule: Rule, runs: list[Run], name: str, factor: float) -> int:
    """In how many runs another threshold gives other findings."""
    others = {name: factor * rule.limits[name]}
    return sum(seen(rule.findings(run)) != seen(rule.findings(run, **others)) for run in runs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", default="")
    asked = parser.parse_args()
    runs = [run_of(path) for path in sorted(asked.folder.glob("*.jsonl*"))]
    print(f"{len(runs)} runs\n\n| rule | threshold | value | half | twice |\n| --- | --- | --- | --- | --- |")
    for rule in all_rules().values():
        for name, limit in rule.limits.items() if asked.only in rule.name else ():
            half, twice = (changed(rule, runs, name, factor) for factor in (0.5, 2.0))
            print(f"| {rule.code} {rule.name} | {name} | {limit:g} | {half} | {twice} |", flush=True)


if __name__ == "__main__":
    main()
