"""Two encoders on two views of an image: all pairs of the batch count, whatever fits into memory at once.

Each left half of a digit is to find its right half among all others. People who run out of memory accumulate the loss
over micro-batches, which is another loss: in a micro-batch of 32 a sample has 31 negatives, however many of them are
added up. The gradient is wrong, and no division mends it.

With anybatch the loss is in two functions: ``encode`` sees a micro-batch, and ``clip_loss`` what it gave for all
samples. Encoders run in micro-batches, the loss sees every pair once, and the learned temperature gets its gradient
once. With ``row_block`` the matrix of all pairs never exists as a whole.

    python examples/contrastive.py
"""

import copy
from collections.abc import Callable, Sequence
from functools import partial

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F

import anybatch

Batch = dict[str, Tensor]


def encoder(width: int) -> nn.Sequential:
    """Turns half an image into a point on a sphere, but for its length."""
    return nn.Sequential(
        nn.Flatten(), nn.Linear(32, width), nn.GELU(), nn.Linear(width, width), nn.GELU(), nn.Linear(width, 32)
    )


class Model(nn.Module):
    """Two encoders and a temperature, the logarithm of its inverse as in CLIP."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.left, self.right = encoder(width), encoder(width)
        self.log_scale = nn.Parameter(torch.tensor(2.0))


def halves(samples: int = 512) -> Batch:
    """The left and the right half of images of digits."""
    images = torch.tensor(load_digits().images[:samples]).float() / 16
    return {"left": images[:, :, :4], "right": images[:, :, 4:]}


def encode(model: Model, batch: Batch) -> tuple[Tensor, Tensor]:
    """Gives what the loss needs of these samples."""
    return F.normalize(model.left(batch["left"])), F.normalize(model.right(batch["right"]))


def clip_loss(model: Model, outputs: tuple[Tensor, Tensor], rows: slice) -> Tensor:
    """The mean over some rows of the matrix of all pairs (Radford et al. 2021, the pseudocode of figure 3)."""
    left, right = outputs
    target = torch.arange(rows.start, rows.stop)
    scale = model.log_scale.exp()
    to_right = F.cross_entropy(left[rows] @ right.T * scale, target)
    to_left = F.cross_entropy(right[rows] @ left.T * scale, target)
    return (to_right + to_left) / 2


def by_hand(model: Model, batches: Sequence[Batch], micro_batch_size: int | None = None) -> list[float]:
    """The loop people write; with a size the gradient is that of another loss."""
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    history = []
    for batch in batches:
        samples, total = len(batch["left"]), 0.0
        parts = (batch[name].split(micro_batch_size or samples) for name in ("left", "right"))
        optimizer.zero_grad()
        for left, right in zip(*parts, strict=True):
            rows = slice(0, len(left))
            loss = clip_loss(model, encode(model, {"left": left, "right": right}), rows) * (len(left) / samples)
            loss.backward()
            total += loss.item()
        optimizer.step()
        history.append(total)
    return history


def with_anybatch(model: Model, batches: Sequence[Batch], micro_batch_size: int = 32) -> list[float]:
    """The same loop, with the gradient of all pairs."""
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    loss_fn = anybatch.Coupled(encode, clip_loss, row_block=micro_batch_size)
    step = anybatch.TrainStep(model, loss_fn, optimizer, micro_batch_size=micro_batch_size)
    return [step(batch).loss for batch in batches]


def found(model: Model, batch: Batch) -> float:
    """The share of left halves whose nearest right half is their own."""
    with torch.no_grad():
        left, right = encode(model, batch)
    return float(((left @ right.T).argmax(1) == torch.arange(len(left))).float().mean())


def main(steps: int = 60) -> None:
    """Trains in each way, from the same weights."""
    torch.manual_seed(0)
    start, batch, expected = Model(), halves(), None
    ways: dict[str, Callable[[Model, Sequence[Batch]], list[float]]] = {
        "by hand, the whole batch": by_hand,
        "by hand, accumulated over 32 at a time": partial(by_hand, micro_batch_size=32),
        "with anybatch, 32 at a time": with_anybatch,
    }
    for name, way in ways.items():
        model = copy.deepcopy(start)
        memory = anybatch.measure(partial(way, model, [batch]))
        gradient = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
        expected = gradient if expected is None else expected
        error = float((gradient - expected).norm() / expected.norm())
        model = copy.deepcopy(start)
        way(model, [batch] * steps)
        print(f"{name}: peak {memory.peak_bytes / 2**20:.1f} MiB, first gradient off by {error:.0e}", end=", ")
        print(f"halves found {found(start, batch):.0%} -> {found(model, batch):.0%}")


if __name__ == "__main__":
    torch.set_num_threads(1)  # on a busy machine more threads wait for each other
    main()
