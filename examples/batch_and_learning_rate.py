"""Why a larger batch does worse at the same learning rate, by how much the rate must grow with it, and until when.

Two problems, one trained with SGD and one with Adam, at several batch sizes that all see the same samples. The batches
are accumulated in micro-batches; only the number of updates differs. The first column of losses keeps the learning rate
that was found for the smallest batch; the others multiply it by sqrt(k) and by k, where k is how many times larger the
batch is. In between, every factor of two is tried as well, and the last column has the best of them.

    python examples/batch_and_learning_rate.py                   # a minute or two; prints the tables
    python examples/batch_and_learning_rate.py --figure out.svg   # and draws them
"""

import argparse
import math
import statistics
import sysconfig
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F

import anybatch

Batch = dict[str, Tensor]
Losses = dict[int, dict[float, list[float]]]  # by batch size and learning rate, one for each seed
RULES: dict[str, Any] = {"kept": None, "x sqrt(k)": "sqrt", "x k": "linear"}


@dataclass(frozen=True)
class Problem:
    """What is trained, and with what.

    Args:
        name: in the tables.
        model: makes the model.
        optimizer: makes the optimizer from parameters and a learning rate.
        train: samples that are trained on, once each epoch.
        held_out: samples that the result is measured on.
        sizes: of the batches; each is a power of four times the first.
        rates: learning rates for the smallest batch, each twice the one before; the best must not be at an end.
        epochs: how often each sample is seen.
        micro_batch_size: what a batch is accumulated in.
    """

    name: str
    model: Callable[[], nn.Module]
    optimizer: Callable[..., torch.optim.Optimizer]
    train: Batch
    held_out: Batch
    sizes: tuple[int, ...]
    rates: tuple[float, ...]
    epochs: int
    micro_batch_size: int


def loss_fn(model: nn.Module, batch: Batch) -> Tensor:
    """Mean cross-entropy."""
    return F.cross_entropy(model(batch["x"]), batch["y"])


def digits() -> Problem:
    """Images of digits, a perceptron, SGD."""
    data = load_digits()
    order = torch.randperm(1797, generator=torch.Generator().manual_seed(0))
    x, y = torch.tensor(data.data, dtype=torch.float32)[order] / 16, torch.tensor(data.target)[order]
    return Problem(
        "digits, SGD",
        lambda: nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)),
        torch.optim.SGD,
        {"x": x[:1536], "y": y[:1536]},
        {"x": x[1536:], "y": y[1536:]},
        sizes=(8, 32, 128, 512),
        rates=(0.05, 0.1, 0.2, 0.4, 0.8),
        epochs=6,
        micro_batch_size=64,
    )


def text(characters: int = 65_536, context: int = 12) -> Problem:
    """The next character of the standard library's sources, a perceptron over the last few, Adam."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    stream = torch.frombuffer(bytearray(b"\n".join(file.read_bytes() for file in files)), dtype=torch.uint8)
    windows = stream[: 40 * characters].clamp(max=127).unfold(0, context + 1, 1)
    chosen = torch.randperm(len(windows), generator=torch.Generator().manual_seed(0))[: characters + 8192]
    x, y = windows[chosen, :-1].long(), windows[chosen, -1].long()
    return Problem(
        "text, Adam",
        lambda: nn.Sequential(
            nn.Embedding(128, 16), nn.Flatten(), nn.Linear(16 * context, 128), nn.ReLU(), nn.Linear(128, 128)
        ),
        torch.optim.Adam,
        {"x": x[8192:], "y": y[8192:]},
        {"x": x[:8192], "y": y[:8192]},
        sizes=(64, 256, 1024, 4096),
        rates=(0.001, 0.002, 0.004, 0.008, 0.016),
        epochs=1,
        micro_batch_size=512,
    )


def train(problem: Problem, size: int, rate: float, seed: int) -> float:
    """Trains from the weights of the seed, in the order of the seed, and returns the loss on what was held out."""
    torch.manual_seed(seed)
    model = problem.model()
    step = anybatch.TrainStep(
        model,
        loss_fn,
        problem.optimizer(model.parameters(), lr=rate),
        micro_batch_size=min(size, problem.micro_batch_size),
    )
    rows = len(problem.train["x"])
    for _ in range(problem.epochs):
        for chosen in torch.randperm(rows)[: rows - rows % max(problem.sizes)].split(size):
            step({name: tensor[chosen] for name, tensor in problem.train.items()})
    return step.evaluate(problem.held_out).loss


def sweep(problem: Problem, seeds: int) -> Losses:
    """Every batch size with every rate from the best one of the smallest batch to what is linear in the size."""
    smallest, found, rates = problem.sizes[0], {}, problem.rates
    for size in problem.sizes:
        found[size] = {rate: [train(problem, size, rate, seed) for seed in range(seeds)] for rate in rates}
        base, larger = found_for(found[smallest]), 4 * size // smallest
        rates = tuple(base * 2**power for power in range(larger.bit_length()))
    return found


def middle(losses: list[float]) -> float:
    """The mean; infinite if a run has diverged."""
    return statistics.fmean(losses) if all(map(math.isfinite, losses)) else math.inf


def best(losses: Mapping[float, list[float]]) -> float:
    """The learning rate with the lowest mean loss."""
    return min(losses, key=lambda rate: middle(losses[rate]))


def found_for(losses: Mapping[float, list[float]]) -> float:
    """The smallest rate within a standard error of the best: the larger ones are near where training diverges."""
    lowest = losses[best(losses)]
    error = statistics.stdev(lowest) / math.sqrt(len(lowest))
    return min(rate for rate in losses if middle(losses[rate]) <= middle(lowest) + error)


def ruled(problem: Problem, base: float, size: int, rule: Any) -> float:
    """The rate that a rule gives for a batch size."""
    optimizer = problem.optimizer([torch.zeros(1, requires_grad=True)], lr=base)
    if rule is not None:
        anybatch.rescale(optimizer, batch=(problem.sizes[0], size), rule=rule)
    return float(optimizer.param_groups[0]["lr"])


def shown(losses: Mapping[float, list[float]], rate: float) -> str:
    """Mean and standard deviation over the seeds, at a rate."""
    found = losses[min(losses, key=lambda other: abs(other - rate))]
    return f"{middle(found):.3f} ± {statistics.stdev(found):.3f}" if math.isfinite(middle(found)) else "diverges"


def table(problem: Problem, losses: Losses) -> str:
    """The loss at each size with the rate that each rule gives, and with the best one."""
    base, seen = found_for(losses[problem.sizes[0]]), len(problem.train["x"]) * problem.epochs
    lines = [
        f"{problem.name}: loss on held-out samples; {base:g} is the rate found for a batch of {problem.sizes[0]}",
        "",
    ]
    lines += ["| batch | updates | kept | x sqrt(k) | x k | best of the grid |", "|" + " --- |" * 6]
    for size, row in losses.items():
        cells = [shown(row, ruled(problem, base, size, rule)) for rule in RULES.values()]
        cells.append(f"{shown(row, best(row))} at x {best(row) / base:g}")
        lines.append(" | ".join([f"| {size}", str(seen // size), *cells]) + " |")
    return "\n".join(lines) + "\n"


def draw(found: list[tuple[Problem, Losses]], path: str) -> None:
    """A curve for each batch size over the learning rate, with what each rule gives marked on it."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import FormatStrFormatter, LogLocator, MaxNLocator, NullFormatter

    figure = Figure(figsize=(9, 4), layout="constrained")
    for axes, (problem, losses) in zip(figure.subplots(1, len(found)), found, strict=True):
        base = found_for(losses[problem.sizes[0]])
        for size, row in losses.items():
            rates = [rate for rate in row if rate >= base and math.isfinite(middle(row[rate]))]
            values = [middle(row[rate]) for rate in rates]
            (line,) = axes.plot([rate / base for rate in rates], values, marker=".", label=f"batch {size}")
            for rule, mark in (("sqrt", "s"), ("linear", "^")) if size > problem.sizes[0] else ():
                at = ruled(problem, base, size, rule) / base
                near = min(range(len(rates)), key=lambda index: abs(rates[index] / base - at))
                axes.plot(at, values[near], mark, markersize=9, markerfacecolor="none", color=line.get_color())
        axes.set(xscale="log", yscale="log", title=problem.name, xlabel=f"learning rate, over {base:g}")
        axes.set_xscale("log", base=2)
        for which in (axes.xaxis, axes.yaxis):
            which.set_major_formatter(FormatStrFormatter("%g"))
        low, high = axes.get_ylim()
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)) if high > 4 * low else MaxNLocator(7))
        axes.yaxis.set_minor_formatter(NullFormatter())
        axes.legend(title="square: x sqrt(k), triangle: x k", fontsize="small", title_fontsize="small")
    figure.axes[0].set_ylabel("loss on held-out samples, the same samples seen")
    figure.savefig(path, metadata={"Date": None} if path.endswith(".svg") else None)


def main(seeds: int = 3, figure: str | None = None) -> None:
    """Runs both problems, prints a table of each, and draws them if a file is named."""
    found = []
    for problem in (digits(), text()):
        losses = sweep(problem, seeds)
        print(table(problem, losses))
        found.append((problem, losses))
    if figure is not None:
        draw(found, figure)


if __name__ == "__main__":
    torch.set_num_threads(1)  # the models are too small for more
    torch.set_flush_denormal(True)
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--figure", help="an SVG or PNG file")
    main(**vars(parser.parse_args()))
