"""An encoder, and a decoder that attends to it: snake_case names of the standard library become CamelCase.

People unroll the decoder in a loop, where each step looks at all outputs of the encoder, and call ``backward()`` on the
sum: what every step has saved is in memory at once. Detaching the state every few steps would save it, and cut off the
encoder, which then learns from the first few steps only.

With anybatch the decoder is a function of a chunk of steps. The encoder's outputs travel in the state; they are not
copied, and the gradient that every chunk has for them is added up and goes through the encoder once. The loss is a
``Mean``, a total and its count, since names differ in length. Whether the decoder is fed what should have come or its
own output makes no difference to the loop.

    python examples/seq2seq_attention.py
"""

import copy
import re
import sysconfig
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import anybatch

Batch = dict[str, Tensor]
State = dict[str, Tensor]
PADDING, BEGIN, END, CHARACTERS, LONGEST = 0, 1, 2, 128, 16


class Model(nn.Module):
    """A bidirectional encoder, and one step of a decoder with attention (Luong et al. 2015, dot)."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.embedding = nn.Embedding(CHARACTERS, width, padding_idx=PADDING)
        self.encoder = nn.GRU(width, width // 2, batch_first=True, bidirectional=True)
        self.cell = nn.GRUCell(2 * width, width)
        self.head = nn.Linear(2 * width, CHARACTERS)


def names(samples: int = 192) -> Batch:
    """Names of the standard library, each with its other spelling."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    found = {name for file in files for name in re.findall(r"\b[a-z]+(?:_[a-z]+)+\b", file.read_text("utf-8"))}
    chosen = sorted(name for name in found if len(name) < LONGEST)[::3][:samples]

    def padded(texts: list[str]) -> Tensor:
        rows = [[*text.encode(), END] + [PADDING] * (LONGEST - len(text)) for text in texts]
        return torch.tensor(rows)[:, :LONGEST]

    return {"source": padded(chosen), "target": padded([name.title().replace("_", "") for name in chosen])}


def encoded(model: Model, batch: Batch) -> State:
    """The state before the first step of the decoder."""
    memory, _ = model.encoder(model.embedding(batch["source"]))
    token = torch.full_like(batch["source"][:, 0], BEGIN)
    return {"hidden": memory[:, 0], "memory": memory, "is_padding": batch["source"] == PADDING, "token": token}


def decoded(model: Model, target: Tensor, state: State, free_running: bool) -> tuple[Tensor, State]:
    """The sum of the losses of some steps of the decoder, and the state after them."""
    hidden, memory, token = state["hidden"], state["memory"], state["token"]
    losses = []
    for character in target.unbind(1):
        scores = (memory @ hidden[:, :, None]).squeeze(2).masked_fill(state["is_padding"], float("-inf"))
        context = (scores.softmax(1)[:, :, None] * memory).sum(1)
        hidden = model.cell(torch.cat([model.embedding(token), context], 1), hidden)
        logits = model.head(torch.cat([hidden, context], 1))
        losses.append(F.cross_entropy(logits, character, ignore_index=PADDING, reduction="sum"))
        token = logits.argmax(1) if free_running else character  # teacher forcing: what should have come
    return torch.stack(losses).sum(), {**state, "hidden": hidden, "token": token}


def by_hand(model: Model, batches: Sequence[Batch], free_running: bool = False) -> list[float]:
    """The loop people write."""
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    history = []
    for batch in batches:
        optimizer.zero_grad()
        total, _ = decoded(model, batch["target"], encoded(model, batch), free_running)
        loss = total / (batch["target"] != PADDING).sum()
        loss.backward()
        optimizer.step()
        history.append(loss.item())
    return history


def with_anybatch(
    model: Model,
    batches: Sequence[Batch],
    free_running: bool = False,
    chunk: int = 4,
    micro_batch_size: int | None = 64,
) -> list[float]:
    """The same loop, in chunks of time and micro-batches of names."""

    def chunk_loss(model: Model, chunk: Batch, state: State) -> tuple[anybatch.Mean, State]:
        total, state = decoded(model, chunk["target"], state, free_running)
        return anybatch.Mean(total, (chunk["target"] != PADDING).sum()), state

    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    loss_fn = anybatch.OverTime(chunk_loss, encoded, chunk=chunk, broadcast=["source"])
    step = anybatch.TrainStep(model, loss_fn, optimizer, micro_batch_size=micro_batch_size)
    return [step(batch).loss for batch in batches]


def main(steps: int = 20) -> None:
    """Trains in each way, from the same weights."""
    torch.manual_seed(0)
    start, batch, expected = Model(), names(), None
    ways: dict[str, Callable[[Model, Sequence[Batch]], list[float]]] = {
        "teacher forcing, by hand": by_hand,
        "teacher forcing, with anybatch": with_anybatch,
        "free running, by hand": partial(by_hand, free_running=True),
        "free running, with anybatch": partial(with_anybatch, free_running=True),
    }
    for name, way in ways.items():
        model = copy.deepcopy(start)
        memory = anybatch.measure(partial(way, model, [batch]))
        gradient = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
        expected = gradient if expected is None or name.endswith("by hand") else expected
        history = way(copy.deepcopy(start), [batch] * steps)
        print(f"{name}: peak {memory.peak_bytes / 2**20:.1f} MiB, loss {history[0]:.3f} -> {history[-1]:.3f}", end=", ")
        print(f"first gradient off by {float((gradient - expected).norm() / expected.norm()):.0e}")


if __name__ == "__main__":
    torch.set_num_threads(1)  # on a busy machine more threads wait for each other
    main()
