"""A generative adversarial network: two optimizers, and a discriminator that stays clean in the generator's step.

In the generator's step the gradient goes through the discriminator, and people's loop leaves it there: ``backward()``
fills the discriminator's ``.grad`` as well, at the cost of computing it, and it is right only because ``zero_grad()``
comes in between. In a loop that accumulates, or logs gradients, it is not. The loop also makes the false images once
for both steps, so that the generator's graph waits in memory while the discriminator trains.

With anybatch each step names the tensors that get a gradient: ``inputs=``. No other ``.grad`` is
computed or touched, without ``requires_grad_(False)`` and back. Each step runs in as many micro-batches as fit.

    python examples/gan.py
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


class Model(nn.Module):
    """Both players."""

    def __init__(self, width: int = 256) -> None:
        super().__init__()
        self.generator = nn.Sequential(
            nn.Linear(16, width), nn.LeakyReLU(0.2), nn.Linear(width, width), nn.LeakyReLU(0.2), nn.Linear(width, 64)
        )
        self.discriminator = nn.Sequential(
            nn.Linear(64, width), nn.LeakyReLU(0.2), nn.Linear(width, width), nn.LeakyReLU(0.2), nn.Linear(width, 1)
        )

    def optimizers(self) -> tuple[torch.optim.Optimizer, torch.optim.Optimizer]:
        """One for each player."""
        return (
            torch.optim.Adam(self.generator.parameters(), lr=5e-4, betas=(0.5, 0.999)),
            torch.optim.Adam(self.discriminator.parameters(), lr=5e-4, betas=(0.5, 0.999)),
        )


def digits(steps: int, samples: int = 1797) -> list[Batch]:
    """The same images of digits for each step, with new noise."""
    generator = torch.Generator().manual_seed(0)
    real = torch.tensor(load_digits().data[:samples]).float() / 8 - 1
    return [{"real": real, "noise": torch.randn(samples, 16, generator=generator)} for _ in range(steps)]


def by_hand(model: Model, batches: Sequence[Batch]) -> list[float]:
    """The loop people write."""
    optimizer_g, optimizer_d = model.optimizers()
    history = []
    for batch in batches:
        fake = model.generator(batch["noise"]).tanh()
        optimizer_d.zero_grad()
        loss_d = F.softplus(-model.discriminator(batch["real"])).mean()
        loss_d = loss_d + F.softplus(model.discriminator(fake.detach())).mean()
        loss_d.backward()
        optimizer_d.step()
        optimizer_g.zero_grad()
        loss_g = F.softplus(-model.discriminator(fake)).mean()
        loss_g.backward()  # fills the discriminator's .grad as well
        optimizer_g.step()
        history += [loss_d.item(), loss_g.item()]
    return history


def tells_apart(model: Model, batch: Batch) -> dict[str, Tensor]:
    """What the discriminator is trained for."""
    with torch.no_grad():
        fake = model.generator(batch["noise"]).tanh()
    return {
        "real": F.softplus(-model.discriminator(batch["real"])).mean(),
        "fake": F.softplus(model.discriminator(fake)).mean(),
    }


def fools(model: Model, batch: Batch) -> Tensor:
    """What the generator is trained for."""
    return F.softplus(-model.discriminator(model.generator(batch["noise"]).tanh())).mean()


def with_anybatch(model: Model, batches: Sequence[Batch], micro_batch_size: int = 200) -> list[float]:
    """The same loop."""
    optimizer_g, optimizer_d = model.optimizers()
    step_d = anybatch.TrainStep(
        model, tells_apart, optimizer_d, inputs=model.discriminator.parameters(), micro_batch_size=micro_batch_size
    )
    step_g = anybatch.TrainStep(
        model, fools, optimizer_g, inputs=model.generator.parameters(), micro_batch_size=micro_batch_size
    )
    history = []
    for batch in batches:
        history += [step_d(batch).loss, step_g(batch).loss]
    return history


def gradient(model: nn.Module) -> Tensor:
    """The gradient of all its parameters."""
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def distance(found: Tensor, expected: Tensor) -> float:
    """The error relative to what was expected."""
    return float((found - expected).norm() / expected.norm())


def main(steps: int = 60) -> None:
    """Trains in each way, from the same weights."""
    torch.manual_seed(0)
    start, batches = Model(), digits(steps)
    clean = copy.deepcopy(start)
    torch.stack([*tells_apart(clean, batches[0]).values()]).sum().backward()
    ways: dict[str, Callable[[Model, Sequence[Batch]], list[float]]] = {
        "by hand": by_hand,
        "with anybatch, 200 at a time": with_anybatch,
    }
    expected = None
    for name, way in ways.items():
        model = copy.deepcopy(start)
        memory = anybatch.measure(partial(way, model, batches[:1]))
        expected = gradient(model.generator) if expected is None else expected
        history = way(copy.deepcopy(start), batches)
        print(f"{name}: peak {memory.peak_bytes / 2**20:.1f} MiB", end=", ")
        print(f"discriminator {history[0]:.3f} -> {history[-2]:.3f}, generator {history[1]:.3f} -> {history[-1]:.3f}")
        print(f"  first gradient of the generator off by {distance(gradient(model.generator), expected):.0e}", end=", ")
        left = distance(gradient(model.discriminator), gradient(clean.discriminator))
        print(f"what is left in the discriminator's by {left:.0e}")


if __name__ == "__main__":
    torch.set_num_threads(1)  # on a busy machine more threads wait for each other
    main()
