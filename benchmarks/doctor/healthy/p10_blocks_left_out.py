# Stochastic depth: every block is left out in half of the steps, so that it has no gradient in them.
import argparse
import random

import torch
from torch import nn


class Layer(nn.Module):
    def __init__(self, dim, survive):
        super().__init__()
        self.survive = survive
        self.norm = nn.LayerNorm(dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def forward(self, x):
        if self.training and random.random() > self.survive:
            return x
        update = self.mlp(self.norm(x))
        return x + (update / self.survive if self.training else update)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    random.seed(args.seed)
    torch.manual_seed(args.seed)
    net = nn.Sequential(nn.Linear(8, 32), *[Layer(32, 0.5) for _ in range(6)], nn.LayerNorm(32), nn.Linear(32, 4))
    x = torch.randn(1024, 8)
    y = (x[:, 0] > 0).long() + 2 * (x[:, 1] * x[:, 2] > 0).long()
    optimizer = torch.optim.AdamW(net.parameters(), lr=2e-3)
    for epoch in range(4):
        for rows in torch.randperm(1024).split(32):
            optimizer.zero_grad(set_to_none=True)
            loss = nn.functional.cross_entropy(net(x[rows]), y[rows])
            loss.backward()
            optimizer.step()
        print(epoch, loss.item())


if __name__ == "__main__":
    main()
