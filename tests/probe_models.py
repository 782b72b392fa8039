"""Models that mix, leak and ignore, and healthy ones that look as if they did."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from anybatch.records.events import Epoch, Forward
from anybatch.records.lines import Fact
from anybatch.records.lossfacts import LossCall
from anybatch.records.runs import Run


class Made(nn.Module):
    """A model whose forward is a function of its layers."""

    def __init__(self, function: Callable[..., Any], *layers: nn.Module) -> None:
        super().__init__()
        self.function = function
        self.layers = nn.ModuleList(layers)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self.layers, *args, **kwargs)


class Attention(nn.Module):
    """A small language model, with or without a causal mask."""

    def __init__(self, causal: bool) -> None:
        super().__init__()
        self.words, self.mix, self.out = nn.Embedding(20, 8), nn.Linear(8, 24), nn.Linear(8, 20)
        self.causal = causal

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.words(tokens)
        q, k, v = self.mix(hidden).chunk(3, -1)
        scores = q @ k.transpose(1, 2) / 8**0.5
        if self.causal:
            mask = torch.ones(scores.shape[-2:]).triu(1).bool()
            scores = scores.masked_fill(mask, float("-inf"))
        result: torch.Tensor = self.out(hidden + scores.softmax(-1) @ v)
        return result


class Headed(nn.Module):
    """Two layers of two heads with a causal mask, which may come before the time when they are joined."""

    mask: torch.Tensor

    def __init__(self, first: bool) -> None:
        super().__init__()
        self.words, self.out, self.first = nn.Embedding(20, 8), nn.Linear(8, 20), first
        self.mix = nn.ModuleList(nn.Linear(8, 24) for _ in range(2))
        self.register_buffer("mask", torch.ones(16, 16).tril())

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.words(tokens)
        rows, time, _ = hidden.shape
        for mix in self.mix:
            q, k, v = (one.view(rows, time, 2, 4).transpose(1, 2) for one in mix(hidden).chunk(3, -1))
            scores = (q @ k.transpose(2, 3)).masked_fill(self.mask[:time, :time] == 0, -1e9)
            joined = scores.softmax(-1) @ v
            hidden = hidden + (joined if self.first else joined.transpose(1, 2)).reshape(rows, time, 8)
        result: torch.Tensor = self.out(hidden)
        return result


class Layered(nn.Module):
    """The same of torch's own layer."""

    def __init__(self, causal: bool) -> None:
        super().__init__()
        self.words, self.out = nn.Embedding(20, 8), nn.Linear(8, 20)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.causal = causal

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1]) if self.causal else None
        result: torch.Tensor = self.out(self.layer(self.words(tokens), src_mask=mask))
        return result


def _from_centres(made: torch.Tensor) -> torch.Tensor:
    groups = made.view(4, -1, made.shape[1])
    return -torch.cdist(groups, groups.mean(1)[None].expand(4, -1, -1)).reshape(-1, 4)


class Masked(nn.Module):
    """Hides some tokens, and gives the loss of what it makes of them."""

    def __init__(self, batch_first: bool = False) -> None:
        super().__init__()
        self.words, self.places, self.out = nn.Embedding(21, 8), nn.Embedding(30, 8), nn.Linear(8, 20)
        self.mix = nn.TransformerEncoderLayer(8, 2, 16, batch_first=batch_first)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = torch.rand(tokens.shape) < torch.empty(len(tokens), 1).uniform_(0.2, 0.7)
        made = self.words(tokens.masked_fill(hidden, 20)) + self.places(torch.arange(tokens.shape[1]))
        return F.cross_entropy(self.out(self.mix(made)).transpose(1, 2), tokens.masked_fill(~hidden, -100))


class Stateful(nn.Module):
    """Keeps its state, of the size of the batch, between calls."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(6, 6)
        self.state: torch.Tensor | None = None

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        state = self.cell(rows, self.state)
        self.state = state.detach()
        result: torch.Tensor = state
        return result


class Recorder:
    """What the probes know of a run."""

    def __init__(self, model: nn.Module, *args: Any, facts: tuple[Fact, ...] = (), **kwargs: Any) -> None:
        self.last_inputs = {0: (model, args, kwargs)}
        self.run = Run(list(facts))


LIN = nn.Linear
Cases = dict[str, Callable[[], Recorder]]
Given = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
SHIFTED = (LossCall(function="cross_entropy", shift=1, root=0, classes=20),)
ONE_TARGET = (Forward(root=0, rows=8), LossCall(function="cross_entropy", target_shape=(8,), root=0))
LOADED = (Epoch(loader=0, batch_size=8), Forward(root=0, rows=8))


def _mixing(given: Given) -> Cases:
    tokens, steps, rows, _ = given
    return {
        "softmax over dim 0": lambda: Recorder(Made(lambda m, x: m[0](x).softmax(0), LIN(6, 3)), rows),
        "softmax layer over dim 0": lambda: Recorder(
            nn.Sequential(LIN(6, 9), nn.Softmax(dim=0), LIN(9, 2)), rows
        ),
        "normalize over dim 0": lambda: Recorder(
            Made(lambda m, x: m[1](F.normalize(m[0](x), dim=0)), LIN(6, 9), LIN(9, 2)), rows
        ),
        "view for transpose": lambda: Recorder(
            Made(lambda m, x: m[0](x.view(x.shape[1], x.shape[0], 6)).mean(0), LIN(6, 3)), steps
        ),
        "view of tokens": lambda: Recorder(
            Made(lambda m, t: m[0](t).view(t.shape[1], t.shape[0], 8).mean(0), nn.Embedding(20, 8)), tokens
        ),
        "batch_first forgotten": lambda: Recorder(
            Made(lambda m, x: m[1](m[0](x)[0][:, -1]), nn.GRU(6, 7), LIN(7, 2)), steps, facts=ONE_TARGET
        ),
        "batch_first forgotten, loaded": lambda: Recorder(
            Made(lambda m, x: m[1](m[0](x)[0][:, -1]), nn.LSTM(6, 7), LIN(7, 2)), steps, facts=LOADED
        ),
        "batch_first forgotten, in a model that gives its loss": lambda: Recorder(Masked(), tokens),
    }  # fmt: skip


def _sound(given: Given) -> Cases:
    tokens, steps, rows, pictures = given
    return {
        "mlp": lambda: Recorder(nn.Sequential(LIN(6, 9), nn.ReLU(), LIN(9, 2)), rows),
        "conv net": lambda: Recorder(
            nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), LIN(144, 3)), pictures
        ),
        "transpose": lambda: Recorder(Made(lambda m, x: m[0](x.transpose(0, 1)).mean(0), LIN(6, 3)), steps),
        "batch norm": lambda: Recorder(nn.Sequential(LIN(6, 9), nn.BatchNorm1d(9), LIN(9, 2)), rows),
        "batch_first": lambda: Recorder(
            Made(lambda m, x: m[1](m[0](x)[0][:, -1]), nn.GRU(6, 7, batch_first=True), LIN(7, 2)), steps,
            facts=ONE_TARGET,
        ),
        "time first, transposed": lambda: Recorder(
            Made(lambda m, x: m[1](m[0](x.transpose(0, 1))[0][-1]), nn.GRU(6, 7), LIN(7, 2)), steps, facts=ONE_TARGET
        ),
        "rows by time": lambda: Recorder(Made(lambda m, x: m[0](x.transpose(0, 1)).flatten(0, 1), LIN(6, 3)), steps),
        "stateful": lambda: Recorder(Stateful(), rows),
        "dropout": lambda: Recorder(nn.Sequential(LIN(6, 9), nn.Dropout(), LIN(9, 2)), rows),
        "loss": lambda: Recorder(Masked(batch_first=True), tokens),
        "causal, shifted in a loss": lambda: Recorder(
            Made(lambda m, t: F.cross_entropy(m[0](t)[:, :-1].flatten(0, 1), t[:, 1:].flatten()), Attention(True)),
            tokens, facts=SHIFTED,
        ),
        "loss of statistics": lambda: Recorder(
            Made(lambda m, x: F.mse_loss(m[0](x).T @ m[0](x) / len(x), torch.eye(4)), LIN(6, 4)), rows
        ),
        "loss of rows": lambda: Recorder(
            Made(lambda m, x: F.mse_loss(m[0](x), x[:, :1]), LIN(6, 1)), rows
        ),
        "loss of noise, which comes first": lambda: Recorder(
            Made(lambda m, x: F.mse_loss(torch.randn(len(x), 1), m[0](x)), LIN(6, 1)), rows
        ),
        "dict output": lambda: Recorder(
            Made(lambda m, x: {"loss": m[0](x).mean(), "logits": m[0](x)}, LIN(6, 3)), rows
        ),
        "causal": lambda: Recorder(Attention(True), tokens, facts=SHIFTED),
        "causal layer": lambda: Recorder(Layered(True), tokens, facts=SHIFTED),
        "lstm": lambda: Recorder(
            Made(lambda m, t: m[2](m[1](m[0](t))[0]), nn.Embedding(20, 8), nn.LSTM(8, 8, batch_first=True), LIN(8, 20)),
            tokens, facts=SHIFTED,
        ),
        "flat logits": lambda: Recorder(
            Made(lambda m, t: m[0](t).flatten(0, 1), Attention(True)), tokens, facts=SHIFTED
        ),
    }  # fmt: skip


def _meant(given: Given) -> Cases:
    _, steps, rows, _ = given
    return {
        "no statistics": lambda: Recorder(
            nn.Sequential(LIN(6, 9), nn.BatchNorm1d(9, track_running_stats=False), LIN(9, 2)), rows
        ),
        "time first": lambda: Recorder(Made(lambda m, x: m[1](m[0](x)[0]), nn.GRU(6, 7), LIN(7, 2)), steps),
        "attention over time, time first": lambda: Recorder(
            Made(lambda m, x: m[0](x * x.softmax(0))[0], nn.GRU(6, 7)), steps
        ),
        "transformer, time first": lambda: Recorder(
            nn.TransformerEncoder(nn.TransformerEncoderLayer(6, 2, 8), 1, enable_nested_tensor=False), steps
        ),
        "lstm with a state, time first": lambda: Recorder(
            Made(lambda m, x: m[0](x, (m[1](torch.arange(x.shape[1])[None] * 0), x.new_zeros(1, x.shape[1], 6)))[0],
                 nn.LSTM(6, 6), nn.Embedding(30, 6)), steps,
        ),
        "lstm with a table of the samples, time first": lambda: Recorder(
            Made(lambda m, x, who: m[0](x + m[1](who))[0], nn.LSTM(6, 6), nn.Embedding(30, 6)),
            steps, torch.arange(steps.shape[1]),
        ),
        "groups of rows in a loss": lambda: Recorder(
            Made(lambda m, x: F.cross_entropy(_from_centres(m[0](x)), torch.arange(4).repeat_interleave(4)), LIN(6, 5)),
            rows,
        ),
        "transformer with places, time first": lambda: Recorder(
            Made(lambda m, x: m[0](x + m[1](torch.arange(len(x)))[:, None]), nn.TransformerEncoderLayer(6, 2, 8),
                 nn.Embedding(30, 6)), steps,
        ),
        "graph": lambda: Recorder(Made(lambda m, x, a: a @ m[0](x), LIN(6, 9)), rows, torch.rand(16, 16)),
        "graph, normalised": lambda: Recorder(
            Made(lambda m, x, a: a.softmax(0) @ m[0](x), LIN(6, 9)), rows, torch.rand(16, 16)
        ),
        "edges": lambda: Recorder(
            Made(lambda m, x, e: torch.zeros(len(x), 9).index_add(0, e[1], m[0](x)[e[0]]), LIN(6, 9)),
            rows, torch.randint(0, 16, (2, 40)),
        ),
        "set attention": lambda: Recorder(Made(lambda m, x: (x @ x.t()).softmax(-1) @ m[0](x), LIN(6, 9)), rows),
        "centred": lambda: Recorder(Made(lambda m, x: m[0](x) - m[0](x).mean(0), LIN(6, 3)), rows),
    }  # fmt: skip


def _looking_ahead(given: Given) -> Cases:
    tokens, _, _, _ = given
    return {
        "no mask": lambda: Recorder(Attention(False), tokens, facts=SHIFTED),
        "heads first": lambda: Recorder(Headed(True), tokens, facts=SHIFTED),
        "heads behind": lambda: Recorder(Headed(False), tokens, facts=SHIFTED),
        "no mask, layer": lambda: Recorder(Layered(False), tokens, facts=SHIFTED),
        "both directions": lambda: Recorder(
            Made(lambda m, t: m[2](m[1](m[0](t))[0]), nn.Embedding(20, 8),
                 nn.LSTM(8, 8, batch_first=True, bidirectional=True), LIN(16, 20)),
            tokens, facts=SHIFTED,
        ),
        "encoder": lambda: Recorder(Attention(False), tokens),
    }  # fmt: skip


def _others(given: Given) -> Cases:
    _, _, rows, pictures = given
    return {
        "collapsed": lambda: Recorder(Made(lambda m, x: m[0](x) * 0 + 3, LIN(6, 3)), rows),
        "always dropping": lambda: Recorder(
            Made(lambda m, x: m[1](F.dropout(m[0](x), 0.5)), LIN(6, 9), LIN(9, 2)), rows
        ),
        "sampling": lambda: Recorder(Made(lambda m, x: m[0](x) + torch.randn_like(x), LIN(6, 6)), rows),
        "one row": lambda: Recorder(nn.Sequential(nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4)), pictures[:1]),
    }  # fmt: skip


def made(name: str) -> Recorder:
    """The recorder of a case by its name."""
    torch.manual_seed(1)
    tokens, steps, rows = torch.randint(0, 20, (8, 11)), torch.randn(8, 11, 6), torch.randn(16, 6)
    given = tokens, steps, rows, torch.randn(8, 1, 8, 8)
    cases: Cases = {}
    for part in (_mixing, _sound, _meant, _looking_ahead, _others):
        cases |= part(given)
    return cases[name]()
