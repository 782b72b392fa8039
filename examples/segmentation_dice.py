"""Segmentation with the dice loss: over the batch it is a ratio of sums, for each sample it is a mean.

Dice over the batch divides what all masks have in common by what they have together. People accumulate it over
micro-batches all the same: but the mean of ratios is no ratio of sums, and a micro-batch with little to find counts as
much as one with many large digits. Dice of each sample is a mean, and may be accumulated like any other; it is another
loss, which empty images have no part in.

With anybatch dice over the batch is ``Coupled``: ``encode`` gives three numbers for each image, ``dice`` divides the
sums over all of them. So the network runs in micro-batches, and no mask has to be kept. Dice of each sample is a plain
loss function.

    python examples/segmentation_dice.py
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


def canvases(samples: int = 192, side: int = 24) -> Batch:
    """Noisy canvases, half of them empty, the others with a digit of some size somewhere; and where the ink is."""
    generator = torch.Generator().manual_seed(0)
    images = torch.rand(samples, 1, side, side, generator=generator) / 2
    masks = torch.zeros_like(images)
    for n, digit in enumerate(torch.tensor(load_digits().images[:samples]).float() / 16):
        size, empty = torch.randint(6, side, (2,), generator=generator).tolist()
        if empty % 2:
            continue
        shown = F.interpolate(digit[None, None], size=(size, size), mode="bilinear")[0, 0]
        top, left = torch.randint(side - size + 1, (2,), generator=generator).tolist()
        images[n, 0, top : top + size, left : left + size] += shown / 2
        masks[n, 0, top : top + size, left : left + size] = (shown > 0.5).float()
    return {"image": images, "mask": masks}


class Model(nn.Module):
    """A U-Net of one step down and one up, which gives the probability of ink for each pixel."""

    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(1, width, 3, padding=1), nn.ReLU())
        self.middle = nn.Sequential(
            nn.MaxPool2d(2), nn.Conv2d(width, 2 * width, 3, padding=1), nn.ReLU(), nn.Conv2d(2 * width, width, 1)
        )
        self.up = nn.Sequential(nn.Conv2d(2 * width, width, 3, padding=1), nn.ReLU(), nn.Conv2d(width, 1, 1))

    def forward(self, images: Tensor) -> Tensor:
        """Gives masks of the shape of the images."""
        features = self.down(images)
        below = F.interpolate(self.middle(features), scale_factor=2)
        return torch.sigmoid(self.up(torch.cat([features, below], 1)))


def encode(model: Model, batch: Batch) -> Tensor:
    """Gives for each image the sums of the product of both masks, of the found mask, and of the true one."""
    found, true = model(batch["image"]), batch["mask"]
    return torch.stack([(found * true).sum((1, 2, 3)), found.sum((1, 2, 3)), true.sum((1, 2, 3))], 1)


def dice(model: Model, sums: Tensor) -> Tensor:
    """Dice over all images (Milletari et al. 2016, with sums instead of squares)."""
    common, found, true = sums.sum(0).unbind()
    return 1 - 2 * common / (found + true)


dice_of_all = anybatch.Coupled(encode, dice)


def dice_of_each(model: Model, batch: Batch) -> Tensor:
    """The mean of the dice of each image, a loss like any other."""
    common, found, true = encode(model, batch).unbind(1)
    return (1 - 2 * common / (found + true)).mean()


def by_hand(model: Model, batches: Sequence[Batch], micro_batch_size: int | None = None) -> list[float]:
    """The loop people write; with a size the gradient is that of another loss."""
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    history = []
    for batch in batches:
        samples, total = len(batch["image"]), 0.0
        parts = (batch[name].split(micro_batch_size or samples) for name in ("image", "mask"))
        optimizer.zero_grad()
        for image, mask in zip(*parts, strict=True):
            loss = dice(model, encode(model, {"image": image, "mask": mask})) * (len(image) / samples)
            loss.backward()
            total += loss.item()
        optimizer.step()
        history.append(total)
    return history


def with_anybatch(
    model: Model,
    batches: Sequence[Batch],
    micro_batch_size: int = 8,
    loss_fn: Callable[[Model, Batch], Tensor] = dice_of_all,
) -> list[float]:
    """The same loop; ``loss_fn=dice_of_each`` is the other loss, and as exact."""
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    step = anybatch.TrainStep(model, loss_fn, optimizer, micro_batch_size=micro_batch_size)
    return [step(batch).loss for batch in batches]


def main(steps: int = 15) -> None:
    """Trains in each way, from the same weights."""
    torch.manual_seed(0)
    start, batch = Model(), canvases()
    in_float64 = copy.deepcopy(start).double()
    by_hand(in_float64, [{name: value.double() for name, value in batch.items()}])
    expected = torch.cat([p.grad.flatten() for p in in_float64.parameters() if p.grad is not None])
    ways: dict[str, Callable[[Model, Sequence[Batch]], list[float]]] = {
        "by hand, the whole batch": by_hand,
        "by hand, accumulated over 8 at a time": partial(by_hand, micro_batch_size=8),
        "with anybatch, 8 at a time": with_anybatch,
        "with anybatch, dice of each image": partial(with_anybatch, loss_fn=dice_of_each),
    }
    for name, way in ways.items():
        model = copy.deepcopy(start)
        memory = anybatch.measure(partial(way, model, [batch]))
        gradient = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
        error = float((gradient - expected).norm() / expected.norm())
        model = copy.deepcopy(start)
        way(model, [batch] * steps)
        with torch.no_grad():
            before, after = (float(dice(m, encode(m, batch))) for m in (start, model))
        print(
            f"{name}: peak {memory.peak_bytes / 2**20:.1f} MiB, first gradient off from float64 by {error:.0e}",
            end=", ",
        )
        print(f"dice loss of the batch {before:.3f} -> {after:.3f}")


if __name__ == "__main__":
    torch.set_num_threads(1)  # on a busy machine more threads wait for each other
    main()
