"""Models over sequences, each with the functions for ``OverTime``, and the slow truth: all steps in one graph."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import anybatch
from anybatch import Mean

WIDTH, CLASSES = 4, 3
Batch = dict[str, Any]


@dataclass
class Case:
    """A model and its loss over time."""

    model: nn.Module
    chunk_loss: Callable[[Any, Any, Any], Any]
    state: Callable[[Any, Any], Any]
    last: Callable[[Any, Any, Any], Any] | None = None
    options: dict[str, Any] = field(default_factory=dict)

    def over_time(self, chunk: int | None, **options: Any) -> anybatch.OverTime:
        return anybatch.OverTime(self.chunk_loss, self.state, last=self.last, chunk=chunk, **self.options, **options)

    def whole(self, model: Any, batch: Any) -> Any:
        """All steps as one chunk, without anything of the library but ``Mean``."""
        loss, state, *_ = self.chunk_loss(model, batch, self.state(model, batch))
        loss = loss() if callable(loss) else loss
        losses = {} if loss is None else dict(loss) if isinstance(loss, dict) else {"loss": loss}
        if self.last is not None:
            losses["last"] = self.last(model, state, batch)
        return losses


def batch_of(rows: int = 5, steps: int = 11, seed: int = 0) -> Batch:
    g = torch.Generator().manual_seed(seed)
    return {
        "x": torch.randn(rows, steps, WIDTH, dtype=torch.float64, generator=g),
        "y": torch.randint(CLASSES, (rows, steps), generator=g),
        "source": torch.randn(rows, 6, WIDTH, dtype=torch.float64, generator=g),
        "label": torch.randint(CLASSES, (rows,), generator=g),
        "mask": torch.rand(rows, steps, generator=g) < 0.6,
    }


class Recurrent(nn.Module):
    def __init__(self, kind: str = "LSTM", layers: int = 1, **options: Any) -> None:
        super().__init__()
        self.rnn = getattr(nn, kind)(WIDTH, WIDTH, layers, batch_first=True, **options)
        self.head = nn.Linear(WIDTH * (2 if options.get("bidirectional") else 1), CLASSES)
        self.first = nn.Parameter(torch.randn(layers, 1, WIDTH))
        self.double()

    def begin(self, rows: int) -> Any:
        """A learned initial state."""
        h = self.first.expand(-1, rows, -1)
        return (h.contiguous(), h.tanh()) if isinstance(self.rnn, nn.LSTM) else h.contiguous()


def cross_entropy(model: Any, output: torch.Tensor, chunk: Batch) -> torch.Tensor:
    return F.cross_entropy(model.head(output).flatten(0, 1), chunk["y"].flatten())


def masked(model: Any, output: torch.Tensor, chunk: Batch) -> Mean:
    each = F.cross_entropy(model.head(output).flatten(0, 1), chunk["y"].flatten(), reduction="none")
    mask = chunk["mask"].flatten()
    return Mean((each * mask).sum(), mask.sum())


def recurrent(
    kind: str = "LSTM", layers: int = 1, *, learned: bool = True, loss: str = "plain", last: bool = False
) -> Case:
    def chunk_loss(model: Any, chunk: Batch, state: Any) -> Any:
        output, state = model.rnn(chunk["x"], state)

        def losses() -> Any:
            if loss == "plain":
                return cross_entropy(model, output, chunk)
            if loss == "mean":
                return masked(model, output, chunk)
            return {"masked": masked(model, output, chunk), "size": output.square().mean()}

        return losses if loss != "none" else None, state

    def on_last(model: Any, state: Any, batch: Batch) -> Any:
        h = state[0] if isinstance(state, tuple) else state
        return F.cross_entropy(model.head(h[-1]), batch["label"])

    return Case(
        Recurrent(kind, layers), chunk_loss, lambda model, batch: model.begin(len(batch["x"])) if learned else None,
        on_last if last or loss == "none" else None, {"broadcast": ["source"]},
    )  # fmt: skip


@dataclass
class Memory:
    """A state of everything that can be in one."""

    pair: tuple[torch.Tensor, torch.Tensor]
    twice: list[torch.Tensor]
    context: dict[str, torch.Tensor]
    step: int
    seen: torch.Tensor
    nothing: None = None
    word: str = "as it is"


class Cells(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.encoder = nn.LSTMCell(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)
        self.double()


def cells() -> Case:
    """An unrolled cell, with a step counter, a tensor that is there twice and one that stays as it is."""

    def begin(model: Any, batch: Batch) -> Memory:
        context = model.encoder(batch["source"]).tanh()
        zeros = torch.zeros(len(context), WIDTH, dtype=context.dtype)
        mean = context.mean(1)
        return Memory((mean, zeros), [mean, mean], {"all": context}, 0, torch.zeros(len(context), dtype=torch.long))

    def chunk_loss(model: Any, chunk: Batch, state: Memory) -> Any:
        pair, twice, context, seen = state.pair, state.twice, state.context["all"], state.seen
        total = torch.zeros((), dtype=context.dtype)
        for t, x in enumerate(chunk["x"].unbind(1), start=state.step):
            pair = model.cell(x + 0.1 * t * context[:, 0] + twice[0] * twice[1], pair)
            twice = [0.5 * pair[0]] * 2
            seen = seen + (pair[0][:, 0] > 0)
            weight = 1 + seen.double()  # depends on what came before, without a gradient
            total = (
                total
                + (F.cross_entropy(model.head(pair[0]), chunk["y"][:, t - state.step], reduction="none") * weight).sum()
            )
        new = Memory(pair, twice, {"all": context}, state.step + chunk["x"].shape[1], seen)
        return total / chunk["y"].numel(), new

    def on_last(model: Any, state: Memory, batch: Batch) -> Any:
        return ((state.pair[1] * state.context["all"].sum(1)).sum(1) * state.step).mean() + state.twice[1].mean()

    return Case(Cells(), chunk_loss, begin, on_last, {"broadcast": ["source"]})


class Translator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(CLASSES, WIDTH)
        self.encoder = nn.GRU(WIDTH, WIDTH, batch_first=True, bidirectional=True)
        self.join = nn.Linear(2 * WIDTH, WIDTH)
        self.cell, self.head = nn.GRUCell(2 * WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.double()


FEEDS = ("teacher", "attached", "detached", "argmax", "sampled")


def translator(feed: str) -> Case:
    """Attention over the outputs of a bidirectional encoder, which travel in the state."""

    def begin(model: Any, batch: Batch) -> Any:
        memory = model.join(model.encoder(batch["source"])[0])
        token = torch.zeros(len(memory), dtype=torch.long)
        return {"hidden": memory.mean(1), "memory": memory, "before": model.embedding(token)}

    def chunk_loss(model: Any, chunk: Batch, state: Any) -> Any:
        hidden, memory, before = state["hidden"], state["memory"], state["before"]
        losses = []
        for target in chunk["y"].unbind(1):
            attention = (memory @ hidden[:, :, None]).softmax(1)
            hidden = model.cell(torch.cat([before, (attention * memory).sum(1)], 1), hidden)
            logits = model.head(hidden)
            losses.append(F.cross_entropy(logits, target))
            soft = logits.softmax(1) @ model.embedding.weight
            if feed == "sampled":
                before = model.embedding(torch.multinomial(logits.detach().softmax(1), 1)[:, 0])
            else:
                before = {
                    "teacher": model.embedding(target), "attached": soft, "detached": soft.detach(),
                    "argmax": model.embedding(logits.argmax(1)),
                }[feed]  # fmt: skip
        return torch.stack(losses).mean(), {"hidden": hidden, "memory": memory, "before": before}

    return Case(Translator(), chunk_loss, begin, None, {"broadcast": ["source"]})


CASES: dict[str, Callable[[], Case]] = {
    **{f"{kind} {n}": partial(recurrent, kind, n) for kind in ("RNN", "GRU", "LSTM") for n in (1, 2)},
    "zeros": partial(recurrent, learned=False),
    "mean": partial(recurrent, loss="mean"),
    "last": partial(recurrent, loss="none"),
    "both": partial(recurrent, last=True),
    "cells": cells,
    **{feed: partial(translator, feed) for feed in FEEDS[:-1]},
}
