"""Back-propagation through thousands of steps: memory, time and gradient of the ways to do it.

    python benchmarks/sequence.py                        # on the CPU, about six minutes
    python benchmarks/sequence.py --quick                # short sequences, some seconds
    python benchmarks/sequence.py -o sequence.md --json sequence.json

A character model: an embedding of 256 bytes, two layers of LSTM of width 64, and an output layer at each step; 4 texts.
The second case is an LSTMCell that is unrolled in Python. All sides compute a gradient of the same batch; they go in
turn in one process, in alternating order from round to round. The third part trains on a stream, window by window.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
import torch
from common import facts, markdown, quartiles, seconds, write_json, write_text
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import anybatch
from anybatch.memory.meter import Recording
from anybatch.records.memory import PARAMETERS

PLAIN = "plain BPTT"
BYTES = 256
NOTES = (
    "Peak: the most bytes of live tensors that an update makes, gradients included; parameters and the batch are not.",
    "Of plain: the peak over that of plain BPTT. Ratio: CPU time over that of plain BPTT in the same round, median and",
    "quartiles. Error: distance of the gradient to that of plain BPTT in float64, relative to its norm; in float32 and",
    "in float64. Truncated BPTT has another gradient on purpose. checkpoint is torch.utils.checkpoint, non-reentrant.",
    "Targets for OverTime with the chunk that it measures, on the LSTM: a peak of at most 1/40, at most 1.05 of the",
    "time, a float64 error of at most 1e-10.",
)
STREAM_NOTES = (
    "Stream: one window after the other through TrainStep with carry=True, one layer of width 16, one text. Peak: of",
    "live tensors that an update makes; in the second window, and the most in any window from there on. Held: the",
    "bytes of tensors that are still there after the last window: its text, gradients and the carried state.",
)


class Characters(nn.Module):
    """Bytes to the next byte."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(BYTES, width)
        self.rnn = nn.LSTM(width, width, layers, batch_first=True)
        self.head = nn.Linear(width, BYTES)

    def steps(self, x: Tensor, state: Any) -> tuple[Tensor, Any]:
        """Goes through all steps of ``[rows, steps]``."""
        output, state = self.rnn(self.embedding(x), state)
        return output, state


class Unrolled(nn.Module):
    """The same with a cell, step by step in Python."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embedding, self.cell = nn.Embedding(BYTES, width), nn.LSTMCell(width, width)
        self.head = nn.Linear(width, BYTES)

    def steps(self, x: Tensor, state: Any) -> tuple[Tensor, Any]:
        """Goes through all steps of ``[rows, steps]``."""
        outputs = []
        for one in self.embedding(x).unbind(1):
            state = self.cell(one, state)
            outputs.append(state[0])
        return torch.stack(outputs, 1), state


def loss_of(model: Any, output: Tensor, y: Tensor) -> Tensor:
    """The mean over the steps."""
    return F.cross_entropy(model.head(output).flatten(0, 1), y.flatten())


def chunk_loss(model: Any, chunk: Mapping[str, Tensor], state: Any) -> Any:
    """What ``OverTime`` is given."""
    output, state = model.steps(chunk["x"], state)
    return lambda: loss_of(model, output, chunk["y"]), state


@dataclass
class Case:
    """A model and a batch, the same for all sides."""

    name: str
    model: Any
    batch: dict[str, Tensor]
    sides: Mapping[str, Side]


Update = Callable[[], None]
Side = Callable[[Any, dict[str, Tensor]], Update]


def plain(model: Any, batch: dict[str, Tensor]) -> Update:
    """One graph of all steps."""
    return lambda: loss_of(model, model.steps(batch["x"], None)[0], batch["y"]).backward()


def checkpointed(length: int, *, with_loss: bool) -> Side:
    """Chunks in ``torch.utils.checkpoint``, with the loss in them or behind them."""

    def side(model: Any, batch: dict[str, Tensor]) -> Update:
        def with_its_loss(x: Tensor, y: Tensor, state: Any) -> Any:
            output, state = model.steps(x, state)
            return loss_of(model, output, y), state

        def update() -> None:
            total, state, outputs = torch.zeros(()), None, []
            x, y = batch["x"], batch["y"]
            for a in range(0, x.shape[1], length):
                b = min(a + length, x.shape[1])
                if with_loss:
                    loss, state = checkpoint(with_its_loss, x[:, a:b], y[:, a:b], state, use_reentrant=False)
                    total = total + loss * (b - a) / x.shape[1]
                else:
                    output, state = checkpoint(model.steps, x[:, a:b], state, use_reentrant=False)
                    outputs.append(output)
            (total if with_loss else loss_of(model, torch.cat(outputs, 1), y)).backward()

        return update

    return side


def over_time(length: int | None, mode: Any = "exact") -> Side:
    """``OverTime`` through ``anybatch.backward``."""

    def side(model: Any, batch: dict[str, Tensor]) -> Update:
        loss_fn = anybatch.OverTime(chunk_loss, lambda model, batch: None, chunk=length, mode=mode)

        def update() -> None:
            anybatch.backward(model, loss_fn, batch)

        return update

    return side


MEASURED = "OverTime, measured chunk"
LSTM: dict[str, Side] = {
    PLAIN: plain,
    "checkpoint, rnn and loss, 64": checkpointed(64, with_loss=True),
    "checkpoint, rnn alone, 64": checkpointed(64, with_loss=False),
    MEASURED: over_time(None),
    "OverTime, 16": over_time(16),
    "OverTime, 64": over_time(64),
    "OverTime, 256": over_time(256),
    "OverTime, truncated, 64": over_time(64, "truncated"),
}
CELL: dict[str, Side] = {
    PLAIN: plain,
    "checkpoint, rnn and loss, 32": checkpointed(32, with_loss=True),
    MEASURED: over_time(None),
    "OverTime, 32": over_time(32),
    "OverTime, truncated, 32": over_time(32, "truncated"),
}


@dataclass
class Found:
    """What was measured of a side."""

    update: Update
    peak: int = 0
    seconds: list[float] = field(default_factory=list)
    error: float = 0.0
    error64: float = 0.0


def gradient(model: Any) -> Tensor:
    """All gradients as one vector in float64."""
    return torch.cat([p.grad.detach().double().flatten() for p in model.parameters()])


def cleared(model: Any, update: Update) -> Tensor:
    """The gradient of one update alone."""
    model.zero_grad()
    update()
    return gradient(model)


def run_all(case: Case, rounds: int) -> list[dict[str, Any]]:
    """Measures the sides; returns one row for each, unrounded."""
    double = copy.deepcopy(case.model).double()
    truth = cleared(double, plain(double, case.batch))
    found = {name: Found(side(case.model, case.batch)) for name, side in case.sides.items()}
    for name, one in found.items():
        one.error = ((cleared(case.model, one.update) - truth).norm() / truth.norm()).item()
        other = cleared(double, case.sides[name](double, case.batch))
        one.error64 = ((other - truth).norm() / truth.norm()).item()
        case.model.zero_grad()
        with Recording() as recording:
            recording.register(case.model.parameters(), PARAMETERS, counted=False)
            one.update()
        one.peak = recording.most
    del double
    for turn in range(rounds):
        for one in list(found.values()) if turn % 2 == 0 else reversed(found.values()):
            case.model.zero_grad()
            one.seconds.append(seconds(one.update, torch.device("cpu")))
    base = found[PLAIN]
    return [
        {
            "case": case.name, "side": name, "peak": one.peak, "of plain": one.peak / base.peak,
            "seconds": quartiles(one.seconds)[1],
            "ratio": quartiles([own / other for own, other in zip(one.seconds, base.seconds, strict=True)]),
            "error": one.error, "error64": one.error64,
        }
        for name, one in found.items()
    ]  # fmt: skip


def shown(row: Mapping[str, Any]) -> dict[str, str]:
    """Rounds one row for the table."""
    low, middle, high = row["ratio"]
    return {
        "case": row["case"], "side": row["side"], "peak MiB": f"{row['peak'] / 2**20:.2f}",
        "of plain": f"1/{1 / row['of plain']:.1f}", "s": f"{row['seconds']:.3f}",
        "ratio (quartiles)": f"{middle:.3f} ({low:.3f} to {high:.3f})", "error": f"{row['error']:.1e}",
        "float64": f"{row['error64']:.1e}",
    }  # fmt: skip


def stream(steps: int, window: int, mode: Any) -> dict[str, Any]:
    """Trains on a stream of random bytes, a window at a time."""
    torch.manual_seed(0)
    model = Characters(16, 1)
    loss_fn = anybatch.OverTime(chunk_loss, lambda model, batch: None, chunk=128, mode=mode, carry=True)
    step = anybatch.TrainStep(model, loss_fn, torch.optim.SGD(model.parameters(), 0.1), clip_norm=1.0)
    peaks, last = [], torch.zeros(1, 1, dtype=torch.long)
    for _ in range(math.ceil(steps / window)):
        text = torch.cat([last, torch.randint(BYTES, (1, window))], 1)
        with Recording() as recording:
            recording.register(model.parameters(), PARAMETERS, counted=False)
            step({"x": text[:, :-1], "y": text[:, 1:]})
        peaks.append(recording.most - text.nbytes)
        last = text[:, -1:].clone()
    return {
        "mode": mode,
        "steps": steps,
        "window": window,
        "second": peaks[1],
        "most": max(peaks[1:]),
        "held": sum(recording.by_category().values()),
    }


@click.command(help="Measures memory, time and gradient of losses over long sequences.")
@click.option("--quick", is_flag=True, help="Short sequences and few rounds; for a first look.")
@click.option("--rounds", type=click.IntRange(min=1), help="Updates of each side that are timed.")
@click.option("--steps", type=click.IntRange(min=64), help="Of the LSTM; the cell takes a quarter.")
@click.option("--stream", "stream_steps", type=click.IntRange(min=1000), help="Steps of the stream.")
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Also write the unrounded rows here.")
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Also write the table here, as Markdown.")
def main(
    quick: bool,
    rounds: int | None,
    steps: int | None,
    stream_steps: int | None,
    json_path: Path | None,
    output: Path | None,
) -> None:
    """Parses the options, measures, prints the tables and writes the files."""
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    steps = steps or (512 if quick else 4096)
    rounds = rounds or (3 if quick else 15)
    torch.manual_seed(0)
    text = torch.randint(BYTES, (4, steps + 1))
    batch = {"x": text[:, :-1].contiguous(), "y": text[:, 1:].contiguous()}
    short = {name: value[:, : steps // 4].contiguous() for name, value in batch.items()}
    cases = [
        Case(f"LSTM, {steps} steps", Characters(64, 2), batch, LSTM),
        Case(f"cell, {steps // 4} steps", Unrolled(64), short, CELL),
    ]
    rows = [row for case in cases for row in run_all(case, rounds)]
    total = stream_steps or (20_000 if quick else 1_000_000)
    streams = [stream(total, min(10_000, total // 4), mode) for mode in ("exact", "truncated")]
    everything = facts(torch.device("cpu"))
    known = {key: everything[key] for key in ("device", "python", "torch", "date", "command")}
    page = markdown("Back-propagation through many steps", known, NOTES, [shown(row) for row in rows])
    page += "\n" + table_of_streams(streams)
    click.echo(page)
    if output is not None:
        write_text(output, page)
    if json_path is not None:
        write_json(json_path, known, [*rows, *streams])


def table_of_streams(streams: Sequence[Mapping[str, Any]]) -> str:
    """The second table."""
    lines = [
        *STREAM_NOTES,
        "",
        "| stream | window | peak, second window KiB | most of any later KiB | held KiB |",
        "|" + " --- |" * 5,
    ]
    for one in streams:
        kib = " | ".join(f"{one[name] / 1024:.1f}" for name in ("second", "most", "held"))
        lines.append(f"| {one['steps']} steps, {one['mode']} | {one['window']} | {kib} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
