"""A character LSTM over windows of 4000 characters: the gradient of all steps, in the memory of a chunk.

People back-propagate through the whole window, which keeps what 4000 steps have saved. When memory runs out they detach
the state every 100 steps. That fits, and is another gradient: nothing is learned across the places where it was cut.

With anybatch the loop of a window is a function of a chunk and the state before it, ``OverTime`` runs it, and the
gradient is that of all 4000 steps. ``carry=True`` begins each window with the last state of the one before, detached,
as the loop by hand does: so the text is a stream, of which only a window is ever there.

    python examples/character_rnn.py
"""

import copy
import sysconfig
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import anybatch

Batch = dict[str, Tensor]
State = tuple[Tensor, Tensor]
CHARACTERS = 128


class Model(nn.Module):
    """An LSTM over characters."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.embedding = nn.Embedding(CHARACTERS, width)
        self.rnn = nn.LSTM(width, width, batch_first=True)
        self.head = nn.Linear(width, CHARACTERS)

    def begin(self, rows: int) -> State:
        """The state before the first character."""
        zeros = self.head.weight.new_zeros(1, rows, self.rnn.hidden_size)
        return zeros, zeros.clone()


def windows(count: int, rows: int = 4, length: int = 4000) -> list[Batch]:
    """Windows over the sources of the standard library; each row goes on where it stopped in the window before."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = b"\n".join(file.read_bytes() for file in files)[: rows * (count * length + 1)]
    stream = torch.frombuffer(bytearray(text), dtype=torch.uint8).long().clamp(max=CHARACTERS - 1).view(rows, -1)
    starts = range(0, count * length, length)
    return [{"x": stream[:, at : at + length], "y": stream[:, at + 1 : at + length + 1]} for at in starts]


def by_hand(model: Model, batches: Sequence[Batch], chunk: int | None = None) -> list[float]:
    """The loop people write; with a chunk it is truncated back-propagation through time."""
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    state, history = model.begin(len(batches[0]["x"])), []
    for batch in batches:
        steps, total = batch["x"].shape[1], 0.0
        optimizer.zero_grad()
        for start in range(0, steps, chunk or steps):
            x, y = (batch[name][:, start : start + (chunk or steps)] for name in ("x", "y"))
            output, state = model.rnn(model.embedding(x), state)
            loss = F.cross_entropy(model.head(output).flatten(0, 1), y.flatten()) * (x.shape[1] / steps)
            loss.backward()
            total += loss.item()
            state = state[0].detach(), state[1].detach()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        history.append(total)
    return history


def chunk_loss(model: Model, chunk: Batch, state: State) -> tuple[Callable[[], Tensor], State]:
    """The loss of a chunk, where it is asked for, and the state after it."""
    output, state = model.rnn(model.embedding(chunk["x"]), state)
    return lambda: F.cross_entropy(model.head(output).flatten(0, 1), chunk["y"].flatten()), state


def begin(model: Model, batch: Batch) -> State:
    """The state before the first window."""
    return model.begin(len(batch["x"]))


def with_anybatch(
    model: Model,
    batches: Sequence[Batch],
    chunk: int | None = 100,
    mode: Literal["exact", "truncated"] = "exact",
) -> list[float]:
    """The same loop; without a chunk its length is measured."""
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    loss_fn = anybatch.OverTime(chunk_loss, begin, chunk=chunk, mode=mode, carry=True)
    step = anybatch.TrainStep(model, loss_fn, optimizer, clip_norm=1.0)
    return [step(batch).loss for batch in batches]


def main(steps: int = 12) -> None:
    """Trains in each way, from the same weights."""
    torch.manual_seed(0)
    start, batches, expected = Model(), windows(steps), None
    ways: dict[str, Callable[[Model, Sequence[Batch]], list[float]]] = {
        "by hand, all 4000 steps": by_hand,
        "by hand, truncated to 100": partial(by_hand, chunk=100),
        "with anybatch, all 4000 steps": with_anybatch,
    }
    for name, way in ways.items():
        model = copy.deepcopy(start)
        memory = anybatch.measure(partial(way, model, batches[:1]))
        gradient = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
        expected = gradient if expected is None else expected
        history = way(copy.deepcopy(start), batches)
        error = float((gradient - expected).norm() / expected.norm())
        print(f"{name}: peak {memory.peak_bytes / 2**20:.1f} MiB, first gradient off by {error:.0e}", end=", ")
        print(f"loss {history[0]:.3f} -> {history[-1]:.3f}")


if __name__ == "__main__":
    torch.set_num_threads(1)  # on a busy machine more threads wait for each other
    main()
