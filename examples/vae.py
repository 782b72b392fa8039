"""A variational autoencoder with two losses, each with its own denominator.

People write the mean over all pixels for the reconstruction and a sum for the divergence, each divided as the framework
happens to do it. On one batch that is only an odd weight. As soon as the loop accumulates and divides by the number of
micro-batches, the sum shrinks by that number and the mean does not: the model trains with another weight of the
divergence for each size of micro-batch, and nothing says so.

With anybatch a loss function gives each loss as what it is meant to be, a mean over samples, under its name. They go
back together through one graph, weighted by the samples of the micro-batch, and are reported by name.

    python examples/vae.py
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
LATENT = 8


class Model(nn.Module):
    """An encoder to means and logarithms of variances, and a decoder to pixels."""

    def __init__(self, width: int = 256) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(64, width), nn.GELU(), nn.Linear(width, 2 * LATENT))
        self.decoder = nn.Sequential(nn.Linear(LATENT, width), nn.GELU(), nn.Linear(width, 64))


def digits(samples: int = 1797) -> Batch:
    """Images of digits, and the noise that their codes get: in the batch, so that every split has the same."""
    images = torch.tensor(load_digits().data[:samples]).float() / 16
    return {"x": images, "noise": torch.randn(samples, LATENT, generator=torch.Generator().manual_seed(0))}


def both_losses(model: Model, batch: Batch) -> tuple[Tensor, Tensor]:
    """The cross entropy of every pixel, and the divergence of every code (Kingma and Welling 2014, appendix B)."""
    mean, log_variance = model.encoder(batch["x"]).chunk(2, 1)
    pixels = model.decoder(mean + batch["noise"] * (log_variance / 2).exp())
    reconstruction = F.binary_cross_entropy_with_logits(pixels, batch["x"], reduction="none")
    divergence = (mean.square() + log_variance.exp() - 1 - log_variance) / 2
    return reconstruction, divergence


def by_hand(model: Model, batches: Sequence[Batch], micro_batch_size: int | None = None) -> list[float]:
    """The loop people write: a mean, and a sum with a weight that suits the whole batch."""
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    history = []
    for batch in batches:
        samples, total = len(batch["x"]), 0.0
        images, noises = (batch[name].split(micro_batch_size or samples) for name in ("x", "noise"))
        optimizer.zero_grad()
        for x, noise in zip(images, noises, strict=True):
            reconstruction, divergence = both_losses(model, {"x": x, "noise": noise})
            loss = reconstruction.mean() + divergence.sum() / (64 * samples)
            (loss / len(images)).backward()
            total += loss.item() / len(images)
        optimizer.step()
        history.append(total)
    return history


def two_means(model: Model, batch: Batch) -> dict[str, Tensor]:
    """The same two losses, each a mean over samples."""
    reconstruction, divergence = both_losses(model, batch)
    return {"reconstruction": reconstruction.mean(), "divergence": divergence.sum(1).mean() / 64}


def with_anybatch(model: Model, batches: Sequence[Batch], micro_batch_size: int = 200) -> list[float]:
    """The same loop; ``step(batch).losses`` has both by name."""
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    step = anybatch.TrainStep(model, two_means, optimizer, micro_batch_size=micro_batch_size)
    return [step(batch).loss for batch in batches]


def main(steps: int = 60) -> None:
    """Trains in each way, from the same weights."""
    torch.manual_seed(0)
    start, batch, expected = Model(), digits(), None
    ways: dict[str, Callable[[Model, Sequence[Batch]], list[float]]] = {
        "by hand, the whole batch": by_hand,
        "by hand, accumulated over 200 at a time": partial(by_hand, micro_batch_size=200),
        "with anybatch, 200 at a time": with_anybatch,
    }
    for name, way in ways.items():
        model = copy.deepcopy(start)
        memory = anybatch.measure(partial(way, model, [batch]))
        gradient = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
        expected = gradient if expected is None else expected
        error = float((gradient - expected).norm() / expected.norm())
        model = copy.deepcopy(start)
        way(model, [batch] * steps)
        pixels, codes = two_means(model, batch).values()
        print(f"{name}: peak {memory.peak_bytes / 2**20:.1f} MiB, first gradient off by {error:.0e}", end=", ")
        print(f"after training reconstruction {pixels.item():.4f}, divergence {codes.item():.4f}")


if __name__ == "__main__":
    torch.set_num_threads(1)  # on a busy machine more threads wait for each other
    main()
