"""Several heads on one trunk: each loss is differentiated as it is made, with one backward through the trunk.

People add up the losses and call ``backward()`` once. That gives the right gradient, and the graphs of all heads are in
memory at the same time. Calling ``backward()`` for each loss raises "Trying to backward through the graph a second
time"; ``retain_graph=True`` silences it, frees nothing earlier and goes through the trunk once for each head.

With anybatch the loss function yields where ``backward()`` would stand, and ``cut`` stands for the features. There is
the graph of one head at a time. Micro-batches come with it.

    python examples/images_with_heads.py
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F

import anybatch

CLASSES = {"digit": 10, "parity": 2, "prime": 2, "large": 2, "holes": 3}
HOLES = torch.tensor([1, 0, 0, 0, 0, 0, 1, 0, 2, 1])  # 0, 6 and 9 have one, 8 has two

Batch = dict[str, Tensor]


class Model(nn.Module):
    """A trunk of convolutions, and a head of convolutions for each question."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Conv2d(1, width, 3, padding=1), nn.ReLU())
        self.heads = nn.ModuleDict(
            {
                name: nn.Sequential(
                    nn.Conv2d(width, width, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(width * 64, classes)
                )
                for name, classes in CLASSES.items()
            }
        )


def digits(samples: int = 500) -> Batch:
    """Images of digits, and five questions about each."""
    data = load_digits()
    x, y = torch.tensor(data.images[:samples]).float()[:, None] / 16, torch.tensor(data.target[:samples])
    prime = (y == 2) | (y == 3) | (y == 5) | (y == 7)
    return {"x": x, "digit": y, "parity": y % 2, "prime": prime.long(), "large": (y > 4).long(), "holes": HOLES[y]}


def by_hand(model: Model, batches: Sequence[Batch]) -> list[float]:
    """The loop people write."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    history = []
    for batch in batches:
        optimizer.zero_grad()
        features = model.trunk(batch["x"])
        losses = [F.cross_entropy(head(features), batch[name]) for name, head in model.heads.items()]
        loss = torch.stack(losses).sum()
        loss.backward()
        optimizer.step()
        history.append(loss.item())
    return history


def losses_of(model: Model, batch: Batch) -> Iterator[tuple[str, Tensor]]:
    """Yields where ``backward()`` would stand."""
    with anybatch.cut(model.trunk(batch["x"])) as features:
        for name, head in model.heads.items():
            yield name, F.cross_entropy(head(features), batch[name])


def with_anybatch(model: Model, batches: Sequence[Batch], micro_batch_size: int | None = None) -> list[float]:
    """The same loop; ``memory="8GiB"`` in place of a size would find the size."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    step = anybatch.TrainStep(model, losses_of, optimizer, micro_batch_size=micro_batch_size)
    return [step(batch).loss for batch in batches]


def main(steps: int = 20) -> None:
    """Trains in each way, from the same weights."""
    torch.manual_seed(0)
    start, batch, expected = Model(), digits(), None
    ways: dict[str, Callable[[Model, Sequence[Batch]], list[float]]] = {
        "by hand": by_hand,
        "with cut": with_anybatch,
        "with cut, in micro-batches of 100": partial(with_anybatch, micro_batch_size=100),
    }
    for name, way in ways.items():
        model = copy.deepcopy(start)
        memory = anybatch.measure(partial(way, model, [batch]))
        gradient = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
        expected = gradient if expected is None else expected
        history = way(copy.deepcopy(start), [batch] * steps)
        print(
            f"{name}: peak {memory.peak_bytes / 2**20:.1f} MiB, losses {history[0]:.3f} -> {history[-1]:.3f}", end=", "
        )
        print(f"first gradient off by {float((gradient - expected).norm() / expected.norm()):.0e}")


if __name__ == "__main__":
    torch.set_num_threads(1)  # on a busy machine more threads wait for each other
    main()
