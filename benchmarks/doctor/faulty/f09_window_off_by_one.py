# Accumulates four micro-batches. After public reports: accelerate#435, minimind#691, dLLM-RL#7.
import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Sums(Dataset):
    def __init__(self, n):
        self.x = torch.randint(0, 10, (n, 5))
        self.y = self.x.sum(1) % 7

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.x[i], self.y[i]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(10, 16)
        self.body = nn.Sequential(nn.Linear(80, 64), nn.GELU(), nn.Linear(64, 7))

    def forward(self, x):
        return self.body(self.table(x).flatten(1))


def fit(model, loader, accumulation, fixed):
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    losses = []
    for i, (x, y) in enumerate(loader):
        loss = nn.functional.cross_entropy(model(x), y) / accumulation
        loss.backward()
        losses.append(loss.item() * accumulation)
        full = (i + 1) % accumulation == 0 if fixed else i % accumulation == 0
        if full:
            optimizer.step()
            optimizer.zero_grad()
        if i % 40 == 0:
            print(i, sum(losses) / len(losses))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--fixed", action="store_true", help="run the repaired version")
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    fit(Net(), DataLoader(Sums(2560), batch_size=16), accumulation=4, fixed=args.fixed)


if __name__ == "__main__":
    main()
