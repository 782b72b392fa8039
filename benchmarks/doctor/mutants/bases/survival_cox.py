# Survival analysis: the partial likelihood of Cox with a network for the risk; some times are censored.
import argparse

import torch
from torch import nn


class Risk(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer1 = nn.Linear(8, 32)
        self.layer2 = nn.Linear(32, 1)

    def forward(self, x):
        return self.layer2(torch.tanh(self.layer1(x))).squeeze(-1)


def patients(n):
    x = torch.randn(n, 8)
    risk = x[:, 0] - 0.8 * x[:, 1] + 0.7 * x[:, 2] * x[:, 3]
    time = -torch.log(torch.rand(n)) * torch.exp(-1.5 * risk)
    limit = -torch.log(torch.rand(n)) * 2.0
    return x, torch.minimum(time, limit), (time <= limit).float()


def cox_loss(risk, time, event):
    order = time.argsort(descending=True)
    risk, event = risk[order], event[order]
    log_sum = torch.logcumsumexp(risk, dim=0)
    return -((risk - log_sum) * event).sum() / event.sum().clamp(min=1)


def concordance(risk, time, event):
    earlier = (time[:, None] < time[None, :]) & (event[:, None] == 1)
    return (risk[:, None] > risk[None, :])[earlier].float().mean().item()


parser = argparse.ArgumentParser()
parser.add_argument("--seed", type=int, default=0)
torch.manual_seed(parser.parse_args().seed)
model = Risk()
optimizer = torch.optim.Adam(model.parameters(), lr=5e-3, weight_decay=1e-4)
train_set = patients(1500)
for step in range(250):
    x, time, event = (part[torch.arange(step * 100, step * 100 + 100) % 1500] for part in train_set)
    loss = cox_loss(model(x), time, event)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 50 == 0:
        print(f"step {step} loss {loss.item():.4f}")
x, time, event = patients(500)
with torch.no_grad():
    print(f"metric {concordance(model(x), time, event):.4f}")
