"""What both benchmarks share: the facts of the run, the clock, the tables, the models and the data."""

from __future__ import annotations

import datetime as dt
import json
import platform
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import peers
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

Batch = dict[str, Tensor]
LossFunction = Callable[[nn.Module, Batch], Tensor]

IGNORED = -100


def facts(device: torch.device) -> dict[str, str]:
    """Names what the figures were taken on and with.

    Args:
        device: the device that the models lie on.

    Returns:
        Device, versions, date and command, in the order in which a table shows them.
    """
    if device.type != "cpu":
        tells = getattr(torch.get_device_module(device), "get_device_name", lambda _: f"{device.type}, on the host")
        where = f"{tells(device)}, wall time, synchronized"
    else:
        where = f"{platform.machine()} CPU, one thread, CPU time"
    return {
        "device": where,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        **{name: peers.version(name) for name in peers.NAMES},
        "date": dt.date.today().isoformat(),
        "command": shlex.join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]]),
    }


def markdown(title: str, known: Mapping[str, str], notes: Sequence[str], rows: Sequence[Mapping[str, str]]) -> str:
    """Renders one table with what it was measured on.

    Args:
        title: the heading.
        known: what ``facts`` returned.
        notes: sentences under the heading, a line each.
        rows: at least one row; all rows have the keys of the first, in its order.

    Returns:
        The page as Markdown, ending in a newline.
    """
    columns = list(rows[0])
    lines = [f"# {title}", "", *(f"- {name}: {value}" for name, value in known.items()), "", *notes, ""]
    lines += ["| " + " | ".join(columns) + " |", "|" + " --- |" * len(columns)]
    lines += ["| " + " | ".join(row[column] for column in columns) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def write_json(path: Path, known: Mapping[str, str], rows: Sequence[Mapping[str, Any]]) -> None:
    """Writes the unrounded rows.

    Args:
        path: the file; its folder is made.
        known: what ``facts`` returned.
        rows: one mapping for each row.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"facts": dict(known), "rows": [dict(row) for row in rows]}, indent=1) + "\n")


def write_text(path: Path, text: str) -> None:
    """Writes a page and makes its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def seconds(work: Callable[[], None], device: torch.device) -> float:
    """Times one piece of work.

    Args:
        work: what is timed.
        device: on CUDA the wall time between two synchronizations counts, elsewhere the CPU time of the process.

    Returns:
        Seconds.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        start = time.perf_counter()
        work()
        torch.cuda.synchronize(device)
        return time.perf_counter() - start
    start = time.process_time()
    work()
    return time.process_time() - start


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Gives the lower quartile, the median and the upper quartile of at least one value."""
    if len(values) == 1:
        return values[0], values[0], values[0]
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


class Rows(Dataset[Batch]):
    """A dataset over the rows of tensors, repeated so that an epoch does not end while a clock runs.

    Args:
        rows: tensors of shape ``[n, ...]``.
        length: samples that the dataset says it has; sample ``i`` is row ``i % n``.
    """

    def __init__(self, rows: Batch, length: int | None = None) -> None:
        self.rows = rows
        self.count = len(next(iter(rows.values())))
        self.length = self.count if length is None else length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Batch:
        return {name: tensor[index % self.count] for name, tensor in self.rows.items()}


def loader(rows: Batch, batch_size: int, *, length: int | None = None, pin: bool = False) -> DataLoader[Batch]:
    """A loader in order, in this process, without dropping the last short batch."""
    return DataLoader(Rows(rows, length), batch_size=batch_size, shuffle=False, pin_memory=pin)


def to_device(batch: Batch, device: torch.device) -> Batch:
    """Moves a batch as hand-written loops do; on the CPU nothing is moved."""
    return {name: tensor.to(device, non_blocking=True) for name, tensor in batch.items()}


def cut_rows(rows: Batch, size: int) -> list[Batch]:
    """Cuts the rows into micro-batches of ``size`` samples; the last may be shorter."""
    count = len(next(iter(rows.values())))
    return [{name: tensor[at : at + size] for name, tensor in rows.items()} for at in range(0, count, size)]


class Again:
    """An iterable that starts over for ever: batches that are already there.

    Args:
        batches: at least one batch.
    """

    def __init__(self, batches: Sequence[Batch]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Batch]:
        while True:
            yield from self.batches


class Block(nn.Module):
    """A causal pre-norm transformer block: ``[B, T, width]`` to ``[B, T, width]``."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_attention, self.norm_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.project_in, self.project_out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        rows, time_steps, width = x.shape
        parts = self.project_in(self.norm_attention(x)).view(rows, time_steps, 3, self.heads, width // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.project_out(mixed.transpose(1, 2).reshape(rows, time_steps, width))
        out: Tensor = x + self.mlp(self.norm_mlp(x))
        return out


class LanguageModel(nn.Module):
    """A small causal language model: tokens ``[B, T]`` to logits ``[B, T, vocabulary]``."""

    def __init__(self, vocabulary: int, width: int, heads: int, layers: int, length: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*[Block(width, heads) for _ in range(layers)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        logits: Tensor = self.head(self.norm(self.blocks(self.tokens(tokens) + self.places(places))))
        return logits


def classification_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Mean cross-entropy over the samples."""
    return F.cross_entropy(model(batch["x"]), batch["y"])


def language_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Mean cross-entropy of the next token over the labels that are not ignored; the labels are shifted here."""
    logits = model(batch["tokens"])[:, :-1]
    return F.cross_entropy(logits.flatten(0, 1), batch["labels"][:, 1:].flatten(), ignore_index=IGNORED)


@dataclass(frozen=True)
class Missing:
    """A side that can't run here, and why."""

    side: str
    reason: str

    def __str__(self) -> str:
        return f"skipped {self.side}: {self.reason}"


def missing(sides: Iterable[str]) -> list[Missing]:
    """Gives the sides that can't run here: peers that are not installed."""
    reasons = {side: peers.reason(side.lower()) for side in sides if side.lower() in peers.NAMES}
    return [Missing(side, reason) for side, reason in reasons.items() if reason]
