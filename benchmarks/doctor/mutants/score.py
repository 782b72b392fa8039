"""How the doctor does on mutants: healthy programs of many fields, each with one fault that was put in by an operator.

    python benchmarks/doctor/mutants/score.py --half tune --sample 100     # runs what was not run yet, then judges
    python benchmarks/doctor/mutants/score.py --half tune --offline        # judges what was run
    python benchmarks/doctor/mutants/score.py --half tune --offline --misses
    python benchmarks/doctor/mutants/score.py -o benchmarks/results/mutants_cpu_DATE.md

The half for reporting gives totals only. See benchmarks/README.md.
"""

from __future__ import annotations

import hashlib
import os
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

os.environ.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import click
import forking
import tables
from catalog import Base, Mutant, bases, mutants
from comparing import SEEDS, Judged, judge, judge_base, same_under_the_doctor
from tables import Part

HALVES = ("tune", "report", "mixed")


@dataclass(frozen=True)
class Wanted:
    """What is run and judged.

    Args:
        half: of the split.
        mutants: of that half.
        bases: of that half; those of the mixed pairs are in the other two already.
    """

    half: str
    mutants: tuple[Mutant, ...]
    bases: tuple[Base, ...]


def wanted(half: str, only: Sequence[str], sample: int | None, seed: int = 0) -> Wanted:
    """Chooses mutants, by the hash of their names and the seed where not all are wanted, each family by its share."""
    found = [one for one in mutants() if one.half == half]
    if only:
        names = tuple(only)
        found = [one for one in found if one.base.name.startswith(names) or one.operator.name.startswith(names)
                 or one.operator.family.startswith(names)]  # fmt: skip
    found.sort(key=lambda one: hashlib.sha256(f"{seed}/{one.name}".encode()).digest())
    chosen = tuple(sampled(found, min(sample or len(found), len(found))))
    own = tuple(one for one in bases() if one.half == half)
    if only:
        own = tuple({one.base.name: one.base for one in chosen}.values())
    return Wanted(half, chosen, own)


def sampled(found: Sequence[Mutant], count: int) -> list[Mutant]:
    """The first ones of each family, of which each gives its share of the count to within one."""
    families: dict[str, list[Mutant]] = {}
    for one in found:
        families.setdefault(one.operator.family, []).append(one)
    ranks = {
        one.name: (number + 0.5) / len(family) for family in families.values() for number, one in enumerate(family)
    }
    return sorted(found, key=lambda one: ranks[one.name])[:count]


def run_all(what: Wanted, seconds: float, *, renew: bool) -> None:
    """Runs what has not been run, base programs first, until the time is over."""
    end = time.monotonic() + seconds
    needed = {one.base.name: one.base for one in what.mutants} | {one.name: one for one in what.bases}
    names = {True: lambda text: text, False: lambda text: "a program"}[what.half == "tune"]
    plans: list[tuple[str, str, int, forking.Mode, str]] = []
    for base in needed.values():
        modes: list[tuple[int, forking.Mode]] = [(seed, "plain") for seed in SEEDS]
        modes += [*((seed, "untrained") for seed in SEEDS), (0, "doctor")]
        plans += [(base.source, f"{base.name}.py", seed, mode, base.name) for seed, mode in modes]
    plans += [(one.source, f"{one.base.name}.py", 0, "doctor", one.name) for one in what.mutants]
    done = 0
    current = forking.stamp()
    for source, file, seed, mode, name in plans:
        known = forking.kept(source, seed, mode)
        if known is not None and not (renew and mode == "doctor" and known.stamp != current):
            continue
        if time.monotonic() > end:
            click.echo(f"{what.half}: the time is over after {done} runs", err=True)
            return
        result = forking.run(source, file, seed, mode, renew=renew)
        done += 1
        if result.broken and what.half == "tune":
            click.echo(f"{names(name)} {mode}: {result.broken.strip().splitlines()[-1]}", err=True)
        if done % 25 == 0:
            click.echo(f"{what.half}: {done} runs", err=True)


def judged(what: Wanted) -> tuple[list[Judged], list[Judged]]:
    """What can be judged of mutants and of base programs."""
    found = [one for one in map(judge, what.mutants) if one is not None]
    healthy = [one for one in map(judge_base, what.bases) if one is not None]
    return found, healthy


@click.command(help="Scores the doctor on mutants of healthy training programs.")
@click.option("--half", "halves", multiple=True, type=click.Choice(HALVES), help="Of the split; all without it.")
@click.option("--only", multiple=True, help="Beginning of a base program, an operator or a family; of the half tune.")
@click.option("--sample", type=click.IntRange(min=1), help="So many mutants of each half, of each family its share.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of the sample.")
@click.option("--seconds", type=float, default=1e9, help="Stop running after so long, and judge what is there.")
@click.option("--offline", is_flag=True, help="Run nothing; judge the records that are there.")
@click.option("--renew", is_flag=True, help="Run again what another recorder recorded.")
@click.option("--misses", is_flag=True, help="List what was missed or deceived of the half tune, and all alarms.")
@click.option("--list", "listing", is_flag=True, help="List the operators, and run nothing.")
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Also write the tables here, as Markdown.")
def main(
    halves: tuple[str, ...],
    only: tuple[str, ...],
    sample: int | None,
    seed: int,
    seconds: float,
    offline: bool,
    renew: bool,
    misses: bool,
    listing: bool,
    output: Path | None,
) -> None:
    """Parses the options, runs what is missing, prints the tables and writes them."""
    if listing:
        click.echo(tables.listed())
        return
    chosen = halves or HALVES
    if only and set(chosen) != {"tune"}:
        raise click.UsageError("--only looks into a half; got it without --half tune, which is the one to look into")
    plans = [wanted(half, only, sample, seed) for half in chosen]
    if not offline:
        forking.prepare()
        started = time.monotonic()
        for what in plans:
            run_all(what, seconds - (time.monotonic() - started), renew=renew)
    parts = []
    for what in plans:
        found, healthy = judged(what)
        whole = sum(one.half == what.half for one in mutants())
        same = sum(same_under_the_doctor(one) for one in what.bases)
        runs = [forking.kept(one.source, 0, "doctor") for one in (*what.mutants, *what.bases)]
        current = sum(one is not None and one.stamp == forking.stamp() for one in runs)
        parts.append(Part(what.half, tuple(found), tuple(healthy), whole, len(what.bases), same, current))
        if misses and what.half == "tune":
            click.echo(tables.misses(found, healthy))
    command = shlex.join(["python", "benchmarks/doctor/mutants/score.py", *sys.argv[1:]])
    text = tables.page(parts, command)
    click.echo(text)
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
