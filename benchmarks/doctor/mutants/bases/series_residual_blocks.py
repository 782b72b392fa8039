# Forecasts several steps ahead by stacked blocks that explain what the ones before left over.
import sys

import torch
from torch import nn

BACK, AHEAD = 24, 6


class Basis(nn.Module):
    def __init__(self, width=48):
        super().__init__()
        self.fc1 = nn.Linear(BACK, width)
        self.fc2 = nn.Linear(width, width)
        self.backcast = nn.Linear(width, BACK)
        self.forecast = nn.Linear(width, AHEAD)

    def forward(self, x):
        h = torch.relu(self.fc2(torch.relu(self.fc1(x))))
        return self.backcast(h), self.forecast(h)


class Stack(nn.Module):
    def __init__(self, blocks=3):
        super().__init__()
        self.blocks = nn.ModuleList([Basis() for _ in range(blocks)])

    def forward(self, x):
        total = 0
        for block in self.blocks:
            back, ahead = block(x)
            x = x - back
            total = total + ahead
        return total


def load(n):
    amplitude, trend = torch.rand(n, 1) + 0.5, 0.02 * torch.randn(n, 1)
    t = torch.arange(BACK + AHEAD).float()
    series = amplitude * torch.sin(6.283 * t / 12 + 6.28 * torch.rand(n, 1)) + trend * t
    series = 40 + 10 * (series + 0.1 * torch.randn(n, BACK + AHEAD))
    return (series - 40) / 10


def fit(model, steps=250):
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    for step in range(steps):
        series = load(64)
        past, future = series[:, :BACK], series[:, BACK:]
        loss = (model(past) - future).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 50 == 49:
            print(f"step {step + 1}: {loss.item():.5f}")


def score(model):
    series = load(500)
    with torch.no_grad():
        error = (model(series[:, :BACK]) - series[:, BACK:]).pow(2).mean()
    return 1 - (error / series[:, BACK:].var()).item()


torch.manual_seed(int(sys.argv[-1]) if len(sys.argv) > 1 else 0)
stack = Stack()
fit(stack)
print(f"metric {score(stack):.4f}")
