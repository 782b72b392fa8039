# Accumulates over three batches, and an epoch has eleven. A classic of accumulation, without a single report.
import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def train(model, loader, epochs, every, fixed):
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for epoch in range(epochs):
        for i, (x, y) in enumerate(loader):
            loss = nn.functional.mse_loss(model(x), y) / every
            loss.backward()
            last = fixed and i + 1 == len(loader)
            if (i + 1) % every == 0 or last:
                optimizer.step()
                optimizer.zero_grad()
        print(epoch, every * loss.item())


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--fixed", action="store_true", help="run the repaired version")
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    x = torch.randn(352, 7)
    y = x[:, :2].prod(1, keepdim=True) + x[:, 2:3]
    model = nn.Sequential(nn.Linear(7, 48), nn.SiLU(), nn.Linear(48, 1))
    train(model, DataLoader(TensorDataset(x, y), batch_size=32), epochs=12, every=3, fixed=args.fixed)


if __name__ == "__main__":
    main()
