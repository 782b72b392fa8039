# A normalising flow of affine couplings that learns the density of two moons.
import sys

import torch
from torch import nn


class Coupling(nn.Module):
    def __init__(self, flip):
        super().__init__()
        self.flip = flip
        self.net = nn.Sequential(nn.Linear(1, 48), nn.Tanh(), nn.Linear(48, 2))

    def forward(self, x):
        a, b = x.chunk(2, dim=1)
        if self.flip:
            a, b = b, a
        log_scale, shift = self.net(a).chunk(2, dim=1)
        log_scale = torch.tanh(log_scale) * 2
        b = b * log_scale.exp() + shift
        joined = torch.cat([b, a] if self.flip else [a, b], dim=1)
        return joined, log_scale.squeeze(1)


class Flow(nn.Module):
    def __init__(self, depth=6):
        super().__init__()
        self.layers = nn.ModuleList([Coupling(bool(i % 2)) for i in range(depth)])

    def log_prob(self, x):
        log_det = torch.zeros(len(x))
        for layer in self.layers:
            x, extra = layer(x)
            log_det = log_det + extra
        base = -0.5 * (x**2).sum(dim=1) - 1.8379
        return base + log_det


def moons(n):
    angle = torch.rand(n) * 3.1416
    upper = torch.rand(n) < 0.5
    x = torch.where(upper, angle.cos(), 1 - angle.cos())
    y = torch.where(upper, angle.sin(), 0.5 - angle.sin())
    return torch.stack([x - 0.5, y - 0.25], dim=1) * 1.5 + 0.1 * torch.randn(n, 2)


torch.manual_seed(int(sys.argv[-1]) if len(sys.argv) > 1 else 0)
flow = Flow()
optimizer = torch.optim.Adam(flow.parameters(), lr=5e-3, weight_decay=1e-5)
for step in range(300):
    loss = -flow.log_prob(moons(128)).mean()
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(flow.parameters(), 10.0)
    optimizer.step()
    if step % 75 == 0:
        print(f"step {step} nll {loss.item():.4f}")
with torch.no_grad():
    print(f"metric {flow.log_prob(moons(2000)).mean().item():.4f}")
