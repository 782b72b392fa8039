# Predicts three quantiles of a series with growing noise, by causal convolutions and the pinball loss.
import argparse

import torch
import torch.nn as nn

parser = argparse.ArgumentParser()
parser.add_argument("--seed", type=int, default=0)
torch.manual_seed(parser.parse_args().seed)
QUANTILES = torch.tensor([0.1, 0.5, 0.9])


class CausalConv(nn.Module):
    def __init__(self, inside, outside, dilation):
        super().__init__()
        self.pad = 2 * dilation
        self.conv = nn.Conv1d(inside, outside, 3, dilation=dilation)

    def forward(self, x):
        return self.conv(nn.functional.pad(x, (self.pad, 0)))


class TCN(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([CausalConv(1, 16, 1), CausalConv(16, 16, 2), CausalConv(16, 16, 4)])
        self.last = nn.Conv1d(16, 3, 1)

    def forward(self, x):
        x = x.unsqueeze(1)
        for layer in self.layers:
            x = torch.relu(layer(x))
        return self.last(x).transpose(1, 2)


def pinball(prediction, target):
    error = target.unsqueeze(-1) - prediction
    return torch.maximum(QUANTILES * error, (QUANTILES - 1) * error).mean()


def simulate(n, length=40):
    phase, speed = torch.rand(n, 1) * 6.28, 0.2 + 0.3 * torch.rand(n, 1)
    clean = torch.sin(phase + speed * torch.arange(length + 1))
    return clean + (0.05 + 0.15 * clean.abs()) * torch.randn(n, length + 1)


model = TCN()
optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.995)
for step in range(200):
    series = simulate(24)
    loss = pinball(model(series[:, :-1]), series[:, 1:])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    scheduler.step()
    if step % 50 == 0:
        print(f"{step} {loss.item():.4f}")
with torch.no_grad():
    series = simulate(200)
    forecast = model(series[:, :-1])[:, 8:]
    truth = series[:, 9:]
    naive = (torch.quantile(truth.flatten(), QUANTILES)).expand(*truth.shape, 3)
print(f"metric {1 - (pinball(forecast, truth) / pinball(naive, truth)).item():.4f}")
