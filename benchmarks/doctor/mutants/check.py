"""Runs base programs without the doctor, so that it is seen whether they learn.

python benchmarks/doctor/mutants/check.py vision rl_dqn
python benchmarks/doctor/mutants/check.py --seeds 3
"""

from __future__ import annotations

import os

os.environ.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import click
import forking
from catalog import bases


@click.command(help="Runs base programs, all of them or those whose names begin so, without the doctor.")
@click.argument("names", nargs=-1)
@click.option("--seeds", type=click.IntRange(min=1), default=1, show_default=True)
def main(names: tuple[str, ...], seeds: int) -> None:
    """Prints for each program the time that it takes, its metric, and that without any step."""
    chosen = [one for one in bases() if not names or one.name.startswith(names)]
    forking.prepare(heavy=any(word in one.source for one in chosen for word in ("lightning", "Trainer(")))
    for base in chosen:
        for seed in range(seeds):
            one = forking.run(base.source, f"{base.name}.py", seed, "plain")
            none = forking.run(base.source, f"{base.name}.py", seed, "untrained")
            click.echo(f"{base.name:28} {seed} {one.seconds:5.1f} s  {one.metric} after {none.metric}  code {one.code}")
            if one.code:
                click.echo(one.errors[-600:])


if __name__ == "__main__":
    main()
