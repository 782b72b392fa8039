"""Small trainings that the recorder is attached to; each gives everything that must be the same without it."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

Outcome = dict[str, Any]


def finished(*modules: torch.nn.Module, losses: list[float]) -> Outcome:
    """Returns weights, buffers, losses and the state of the random numbers."""
    states = [{name: value.clone() for name, value in module.state_dict().items()} for module in modules]
    return {"states": states, "losses": losses, "random": torch.get_rng_state()}


def mlp(steps: int = 12) -> Outcome:
    """Trains with dropout, batch norm, clipping and a schedule."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(6, 16), torch.nn.BatchNorm1d(16), torch.nn.ReLU(), torch.nn.Dropout(0.5), torch.nn.Linear(16, 3)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=4)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(torch.randn(8, 6)), torch.randint(0, 3, (8,)))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        losses.append(loss.item())
    return finished(model, losses=losses)


def gan(steps: int = 8) -> Outcome:
    """Trains two networks with an optimizer each."""
    torch.manual_seed(1)
    generator = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    critic = torch.nn.Sequential(torch.nn.Linear(2, 8), torch.nn.LeakyReLU(), torch.nn.Linear(8, 1))
    for_generator = torch.optim.Adam(generator.parameters(), lr=1e-3)
    for_critic = torch.optim.Adam(critic.parameters(), lr=1e-3)
    losses = []
    for _ in range(steps):
        fake = generator(torch.randn(8, 3))
        for_critic.zero_grad()
        real = F.softplus(-critic(torch.randn(8, 2))).mean()
        (real + F.softplus(critic(fake.detach())).mean()).backward()
        for_critic.step()
        for_generator.zero_grad()
        loss = F.softplus(-critic(fake)).mean()
        loss.backward()
        for_generator.step()
        losses += [real.item(), loss.item()]
    return finished(generator, critic, losses=losses)


def lbfgs(steps: int = 4) -> Outcome:
    """Trains with a closure that is called several times in a step."""
    torch.manual_seed(2)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4)
    x, y = torch.randn(16, 4), torch.randn(16, 1)
    losses = []

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        return loss

    for _ in range(steps):
        losses.append(optimizer.step(closure).item())
    return finished(model, losses=losses)


class Recomputed(torch.nn.Module):
    """Has a block that is computed again in the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.block = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.3), torch.nn.Tanh())
        self.head = torch.nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(checkpoint(self.block, x, use_reentrant=False))
        return out


def recomputing(steps: int = 5) -> Outcome:
    """Trains with a checkpoint that is not reentrant."""
    torch.manual_seed(3)
    model = Recomputed()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(torch.randn(8, 4)).pow(2).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return finished(model, losses=losses)


def accumulating(steps: int = 5) -> Outcome:
    """Adds the gradients of three micro-batches, by hand-made clearing."""
    torch.manual_seed(4)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.GELU(), torch.nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.01)
    losses = []
    for _ in range(steps):
        for _ in range(3):
            loss = F.cross_entropy(model(torch.randn(4, 4)), torch.randint(0, 2, (4,)))
            (loss / 3).backward()
            losses.append(loss.item())
        optimizer.step()
        for parameter in model.parameters():
            parameter.grad = None
    return finished(model, losses=losses)


def scaled(steps: int = 6) -> Outcome:
    """Trains with a scaler on a CPU, which overflows once."""
    torch.manual_seed(5)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = model(torch.randn(8, 4)).pow(2).mean() * (float("inf") if step == 2 else 1.0)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    return finished(model, losses=losses)


def by_hand(steps: int = 15) -> Outcome:
    """Trains without an optimizer."""
    torch.manual_seed(6)
    weight = torch.randn(4, 1, requires_grad=True)
    losses = []
    for _ in range(steps):
        loss = (torch.randn(8, 4) @ weight).pow(2).mean()
        loss.backward()
        with torch.no_grad():
            assert weight.grad is not None
            weight -= 0.1 * weight.grad
            weight.grad.zero_()
        losses.append(loss.item())
    return {"states": [{"weight": weight.detach().clone()}], "losses": losses, "random": torch.get_rng_state()}


def forward_itself(steps: int = 4) -> Outcome:
    """Calls ``forward`` and never the model."""
    torch.manual_seed(7)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model.forward(torch.randn(8, 4)).pow(2).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return finished(model, losses=losses)


PROGRAMS: dict[str, Callable[[], Outcome]] = {
    "mlp": mlp,
    "gan": gan,
    "lbfgs": lbfgs,
    "recomputing": recomputing,
    "accumulating": accumulating,
    "scaled": scaled,
    "by hand": by_hand,
    "forward itself": forward_itself,
}
