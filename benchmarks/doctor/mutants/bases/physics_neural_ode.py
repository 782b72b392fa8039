# Learns the right-hand side of a differential equation from trajectories, by Runge-Kutta steps in the graph.
import argparse

import torch
from torch import nn


class Dynamics(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 48), nn.Tanh(), nn.Linear(48, 2))

    def forward(self, y):
        return self.net(y)


def rk4(f, y, h):
    k1 = f(y)
    k2 = f(y + h / 2 * k1)
    k3 = f(y + h / 2 * k2)
    k4 = f(y + h * k3)
    return y + h / 6 * (k1 + 2 * k2 + 2 * k3 + k4)


def integrate(f, y, steps, h=0.15):
    path = [y]
    for _ in range(steps):
        path.append(rk4(f, path[-1], h))
    return torch.stack(path, dim=1)


def pendulum(y):
    return torch.stack([y[:, 1], -2 * torch.sin(y[:, 0]) - 0.2 * y[:, 1]], dim=1)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=0)
    torch.manual_seed(parser.parse_args().seed)
    starts = torch.randn(100, 2)
    with torch.no_grad():
        truth = integrate(pendulum, starts, 6) + 0.01 * torch.randn(100, 7, 2)
    model = Dynamics()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for step in range(150):
        pick = torch.randperm(100)[:40]
        path = integrate(model, truth[pick, 0], 6)
        loss = (path - truth[pick]).abs().mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 30 == 0:
            print(f"step {step} loss {loss.item():.4f}")
    with torch.no_grad():
        y = torch.randn(500, 2)
        error = (model(y) - pendulum(y)).pow(2).mean() / pendulum(y).var()
    print(f"metric {1 - error.item():.4f}")


main()
