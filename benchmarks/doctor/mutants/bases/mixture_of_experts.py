# A mixture of experts with a gate and a loss that balances them.
import sys

import torch
import torch.nn.functional as F
from torch import nn


class MoE(nn.Module):
    def __init__(self, experts=4, inside=6, width=24):
        super().__init__()
        self.gate = nn.Linear(inside, experts)
        self.experts = nn.ModuleList(
            [nn.Sequential(nn.Linear(inside, width), nn.ReLU(), nn.Linear(width, 1)) for _ in range(experts)]
        )

    def forward(self, x):
        probabilities = F.softmax(self.gate(x), dim=-1)
        outputs = torch.stack([expert(x) for expert in self.experts], dim=1).squeeze(-1)
        y = (probabilities * outputs).sum(dim=1)
        load = probabilities.mean(dim=0)
        balance = len(self.experts) * load.pow(2).sum()
        return y, balance


def regime_data(n):
    x = torch.randn(n, 6)
    regime = (x[:, 0] > 0).long() * 2 + (x[:, 1] > 0).long()
    slopes = torch.tensor([[1.0, -1.0], [-2.0, 0.5], [0.5, 2.0], [-1.0, -1.5]])
    return x, (x[:, 2:4] * slopes[regime]).sum(dim=1) + 0.1 * torch.randn(n)


def main(seed):
    torch.manual_seed(seed)
    model = MoE()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for step in range(350):
        x, y = regime_data(96)
        prediction, balance = model(x)
        task_loss = F.mse_loss(prediction, y)
        loss = task_loss + 0.01 * balance
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 70 == 0:
            print(f"{step} task {task_loss.item():.4f} balance {balance.item():.4f}")
    with torch.no_grad():
        x, y = regime_data(2000)
        error = (model(x)[0] - y).pow(2).mean() / y.var()
    print(f"metric {1 - error.item():.4f}")


main(int(sys.argv[-1]) if len(sys.argv) > 1 else 0)
