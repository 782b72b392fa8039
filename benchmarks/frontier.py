"""Time against memory: how fast a logical batch goes under a budget, beside what people do by hand.

    python benchmarks/frontier.py                        # on the CPU, about seven minutes
    python benchmarks/frontier.py --quick                # about two
    python benchmarks/frontier.py --repeats 5            # about forty
    python benchmarks/frontier.py --json frontier.json -o frontier.md --figure frontier.svg

The budgets are shares of the peak of the whole batch. All sides look for their way under the same emulated memory, then
their updates are timed in turn in one process: one round after the other, each side once a round, in alternating order.
The figure is the median over the rounds of the time of anybatch over that of the fastest other side in the same round.
Where its tensors happen to lie makes the same loop up to 7 % slower or faster for as long as it lives, so that further
rounds do not help: ``--repeats`` lets all sides look for their way again, with new models, and pools the rounds.
Peaks count the bytes of live tensors; a side that exceeds the budget is marked.
"""

from __future__ import annotations

import importlib
import importlib.util
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import byhand
import click
import torch
from byhand import ANYBATCH, SIDES, Case, Found
from common import classification_loss, facts, markdown, missing, quartiles, seconds, to_device, write_json, write_text
from torch import Tensor, nn
from torch.nn import functional as F

from anybatch.demo.transformer import make_model, next_byte_loss
from planning_modules import Block, ConvNet, LanguageModel, Mixing, PlainAttention, Residual

SHARES = (1.0, 1 / 2, 1 / 4, 1 / 8, 1 / 16)
SAMPLES = 64
VOCABULARY = 4096
NOTES = (
    "Share: the budget as a share of the peak of the whole batch at once. Peak: the most bytes of live tensors in an",
    "update after the first two, of all that a training step holds. Search: the seconds until the second update was",
    "done, with planning, trials and restarts; all but anybatch's first call run under the emulated memory, which is",
    "slower.",
    "OOM: how often memory ran out on the way. Ratio: time of anybatch over time of the fastest other side, in the",
    "same round; under 1 anybatch is faster. accumulation and checkpointing: the fastest power of two that fits,",
    "with none or all of the blocks recomputed. With repeats all sides look for their way again each time: rounds are",
    "pooled, peaks are the largest, OOM and search are medians, and ways that differ are listed with how often.",
)


def _names(model: nn.Module, home: str) -> list[str]:
    return [f"{home}.{name}" for name, _ in model.get_submodule(home).named_children()]


def _tokens(time: int, vocabulary: int) -> dict[str, Tensor]:
    text = torch.randint(vocabulary, (SAMPLES, time + 1))
    return {"x": text[:, :-1].contiguous(), "y": text[:, 1:].contiguous()}


def _demo() -> Case:
    model = make_model(0)
    return Case("transformer", model, next_byte_loss, _tokens(model.context, 256), _names(model, "blocks"))


def _images() -> Case:
    model = ConvNet("group", widths=(16, 32, 64))
    batch = {"x": torch.randn(SAMPLES, 3, 40, 40), "y": torch.randint(10, (SAMPLES,))}
    return Case("CNN", model, classification_loss, batch, _names(model, "blocks"))


def _large_vocabulary() -> Case:
    width = 64
    blocks = [Residual(width, 8), PlainAttention(width), Mixing(width), Block(width, 4), Residual(width), Mixing(width)]
    model = LanguageModel(blocks, width, VOCABULARY, 64, tied=True)

    def loss_fn(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return F.cross_entropy(model(batch["x"]).flatten(0, 1), batch["y"].flatten())

    return Case("large vocabulary", model, loss_fn, _tokens(64, VOCABULARY), _names(model, "blocks"))


CASES: dict[str, Callable[[], Case]] = {
    "transformer": _demo,
    "CNN": _images,
    "large vocabulary": _large_vocabulary,
}


def make_case(name: str, device: torch.device) -> Case:
    """Makes a model and its logical batch from one seed."""
    torch.manual_seed(0)
    case = CASES[name]()
    case.model.to(device)
    return Case(case.name, case.model, case.loss_fn, to_device(case.batch, device), case.blocks)


def time_all(found: dict[str, Found], rounds: int, device: torch.device) -> None:
    """Times the updates of the sides that fit, in turn; the order alternates from round to round."""
    fitting = [one for one in found.values() if one.update is not None]
    for turn in range(rounds):
        for one in fitting if turn % 2 == 0 else reversed(fitting):
            update = one.update
            if update is not None:
                one.seconds.append(seconds(update, device))


def pooled(searches: Sequence[dict[str, Found]]) -> dict[str, Found]:
    """Makes one search of several; a side counts as fitting if it does each time."""
    return {name: _pooled([found[name] for found in searches]) for name in searches[0]}


def _pooled(same: Sequence[Found]) -> Found:
    ways = Counter(one.how for one in same)
    return Found(
        update=same[0].update if all(one.update is not None for one in same) else None,
        how=next(iter(ways)) if len(ways) == 1 else "; ".join(f"{how} ({n}x)" for how, n in ways.most_common()),
        out_of_memory=statistics.median_low([one.out_of_memory for one in same]),
        search_seconds=statistics.median(one.search_seconds for one in same),
        first_peak=max(one.first_peak for one in same),
        peak=max(one.peak for one in same),
        seconds=[taken for one in same for taken in one.seconds],
    )


def ratio_of(found: dict[str, Found]) -> tuple[str, tuple[float, float, float]] | None:
    """The fastest other side by its median, and the quartiles of anybatch's time over its time, round by round."""
    others = {name: one for name, one in found.items() if name != ANYBATCH and one.seconds}
    if not others or ANYBATCH not in found or not found[ANYBATCH].seconds:
        return None
    best = min(others, key=lambda name: quartiles(others[name].seconds)[1])
    pairs = zip(found[ANYBATCH].seconds, others[best].seconds, strict=True)
    return best, quartiles([own / other for own, other in pairs])


def rows_of(case: str, share: float, budget: int, found: dict[str, Found]) -> list[dict[str, Any]]:
    """One row a side, unrounded."""
    compared = ratio_of(found)
    rows = []
    for name, one in found.items():
        times = quartiles(one.seconds) if one.seconds else (None, None, None)
        row: dict[str, Any] = {
            "model": case, "share": share, "budget": budget, "side": name, "how": one.how,
            "fits": one.update is not None, "peak": one.peak, "peak while searching": one.first_peak,
            "over budget": max(one.peak, one.first_peak) > budget, "out of memory": one.out_of_memory,
            "search seconds": one.search_seconds,
            "ms an update": None if times[1] is None else times[1] * 1e3,
            "lower quartile": None if times[0] is None else times[0] * 1e3,
            "upper quartile": None if times[2] is None else times[2] * 1e3,
        }  # fmt: skip
        if name == ANYBATCH and compared is not None:
            row |= {"fastest other": compared[0], "ratio": compared[1][1], "ratio quartiles": compared[1][::2]}
        rows.append(row)
    return rows


def shown(row: dict[str, Any]) -> dict[str, str]:
    """Rounds one row for the table."""
    fits, ratio = row["fits"], ""
    if "ratio" in row:
        low, high = row["ratio quartiles"]
        ratio = f"{row['ratio']:.3f} ({low:.3f} to {high:.3f}) to {row['fastest other']}"
    return {
        "model": row["model"],
        "share": f"1/{1 / row['share']:.0f}" if row["share"] < 1 else "1",
        "budget MB": f"{row['budget'] / 1e6:.2f}",
        "side": row["side"],
        "how": row["how"] if fits else f"does not fit: {row['how']}",
        "peak MB": f"{row['peak'] / 1e6:.2f}{' OVER' if row['over budget'] else ''}" if fits else "",
        "ms an update": f"{row['ms an update']:.1f}" if row["ms an update"] is not None else "",
        "OOM": str(row["out of memory"]),
        "search s": f"{row['search seconds']:.1f}",
        "ratio (quartiles)": ratio,
    }


def draw(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Draws time against budget, a panel for each model, in the times of the fastest whole batch."""
    matplotlib = importlib.import_module("matplotlib")
    matplotlib.use("Agg")
    pyplot = importlib.import_module("matplotlib.pyplot")
    names = list(dict.fromkeys(row["model"] for row in rows))
    figure, axes = pyplot.subplots(1, len(names), figsize=(4.2 * len(names), 3.6), squeeze=False, sharey=True)
    for axis, name in zip(axes[0], names, strict=True):
        mine = [row for row in rows if row["model"] == name and row["fits"] and row["ms an update"] is not None]
        whole = min((row["ms an update"] for row in mine if row["share"] == 1), default=1.0)
        for side in dict.fromkeys(row["side"] for row in mine):
            points = sorted((row["share"], row["ms an update"] / whole) for row in mine if row["side"] == side)
            style = {"linewidth": 2.4, "zorder": 3} if side == ANYBATCH else {"linewidth": 1.2}
            axis.plot(*zip(*points, strict=True), marker="o", markersize=4, label=side, **style)
        axis.set_xscale("log", base=2)
        axis.invert_xaxis()
        axis.set_title(name)
        axis.set_xlabel("budget, of the whole batch's peak")
        axis.grid(alpha=0.3)
    axes[0][0].set_ylabel("time, of the whole batch's")
    axes[0][-1].legend(fontsize="small")
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    pyplot.close(figure)


def run_all(
    cases: Sequence[str], shares: Sequence[float], names: Sequence[str], rounds: int, repeats: int, device: torch.device
) -> list[dict[str, Any]]:
    """Measures all models under all budgets; returns one row for each side, unrounded."""
    rows = []
    for name in cases:
        case = make_case(name, device)
        whole = byhand.whole_peak(case)
        for share in shares:
            budget = int(whole * share)
            searches = []
            for _ in range(repeats):
                found = byhand.search(case, budget, names)
                time_all(found, rounds, device)
                searches.append(found)
            rows += rows_of(name, share, budget, pooled(searches))
            click.echo(f"{name}, {share:g}: {[shown(row)['how'] for row in rows[-len(names) :]]}", err=True)
    return rows


@click.command(help="Measures time against memory, beside what people do by hand.")
@click.option("--device", default="cpu", show_default=True, help="cpu or cuda; the memory is emulated on both.")
@click.option("--quick", is_flag=True, help="Fewer budgets and rounds; for a first look.")
@click.option("--rounds", type=click.IntRange(min=1), help="Updates of each side that are timed.")
@click.option("--repeats", type=click.IntRange(min=1), default=1, show_default=True, help="Searches of each side.")
@click.option("--model", "chosen", multiple=True, type=click.Choice(list(CASES)))
@click.option("--side", "names", multiple=True, type=click.Choice(list(SIDES)))
@click.option("--share", "shares", multiple=True, type=click.FloatRange(min=0, min_open=True), help="1 is all of it.")
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Also write the unrounded rows here.")
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Also write the table here, as Markdown.")
@click.option("--figure", type=click.Path(path_type=Path), help="Also draw it here, as .svg or .png.")
def main(
    device: str,
    quick: bool,
    rounds: int | None,
    repeats: int,
    chosen: tuple[str, ...],
    names: tuple[str, ...],
    shares: tuple[float, ...],
    json_path: Path | None,
    output: Path | None,
    figure: Path | None,
) -> None:
    """Parses the options, measures, prints the table and writes the files."""
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    where = torch.device(device)
    left_out = missing(names or SIDES)
    for side in left_out:
        click.echo(str(side))
    usable = [name for name in names or SIDES if name not in {side.side for side in left_out}]
    which = shares or (SHARES[::2] if quick else SHARES)
    rows = run_all(chosen or list(CASES), which, usable, rounds or (5 if quick else 9), repeats, where)
    notes = [*NOTES, *(f"{side}." for side in left_out)]
    known = facts(where)
    text = markdown("Time against memory", known, notes, [shown(row) for row in rows])
    click.echo(text)
    if output is not None:
        write_text(output, text)
    if json_path is not None:
        write_json(json_path, known, rows)
    if figure is not None:
        if importlib.util.find_spec("matplotlib") is None:
            raise click.UsageError("--figure needs matplotlib: pip install matplotlib")
        draw(rows, figure)


if __name__ == "__main__":
    main()
