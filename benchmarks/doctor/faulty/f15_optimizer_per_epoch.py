# An epoch is a function of its own. After a public report: deepsensor#47.
import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Process(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh())
        self.mean = nn.Linear(64, 1)

    def forward(self, where):
        return self.mean(self.trunk(where))


def train_epoch(model, batches, lr, opt=None):
    if opt is None:
        opt = torch.optim.Adam(model.parameters(), lr=lr)
    losses = []
    for where, value in batches:
        opt.zero_grad()
        loss = ((model(where) - value) ** 2).mean()
        loss.backward()
        opt.step()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--fixed", action="store_true", help="run the repaired version")
    args = parser.parse_args()
    torch.manual_seed(args.seed)

    points = torch.rand(600, 4)
    values = torch.sin(points * 2).sum(1, keepdim=True)
    batches = DataLoader(TensorDataset(points, values), batch_size=50, shuffle=True)
    model = Process()
    kept = torch.optim.Adam(model.parameters(), lr=5e-3) if args.fixed else None
    for epoch in range(8):
        losses = train_epoch(model, batches, 5e-3, kept)
        print(epoch, f"first batch {losses[0]:.4f} last batch {losses[-1]:.4f}")
