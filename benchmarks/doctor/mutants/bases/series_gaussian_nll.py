# Regression with an uncertainty of its own: mean and variance from one network, negative log likelihood.
import math
import sys

import torch
from torch import nn


def sample(n):
    x = torch.rand(n, 1) * 6 - 3
    return x, torch.sin(2 * x) + (0.1 + 0.2 * (x > 0).float()) * torch.randn(n, 1)


class Heteroscedastic(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(1, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh())
        self.mean = nn.Linear(64, 1)
        self.log_var = nn.Linear(64, 1)

    def forward(self, x):
        h = self.body(x)
        return self.mean(h), self.log_var(h).clamp(min=-8, max=4)


def nll(mean, log_var, y):
    return 0.5 * (log_var + (y - mean) ** 2 / log_var.exp() + math.log(2 * math.pi)).mean()


torch.manual_seed(int(sys.argv[-1]) if len(sys.argv) > 1 else 0)
network = Heteroscedastic()
optimizer = torch.optim.Adam(network.parameters(), lr=5e-3, weight_decay=1e-6)
for iteration in range(400):
    x, y = sample(128)
    mean, log_var = network(x)
    loss = nll(mean, log_var, y)
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(network.parameters(), 5.0)
    optimizer.step()
    if iteration % 100 == 0:
        print(iteration, loss.item())
with torch.no_grad():
    x, y = sample(2000)
    gain = 0.5 * (math.log(2 * math.pi) + y.var().log() + 1) - nll(*network(x), y)
print(f"metric {gain.item():.4f}")
