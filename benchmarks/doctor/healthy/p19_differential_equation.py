# A network that solves u'' + u = 0: its inputs require gradients, and the loss holds second derivatives.
import argparse
import math

import torch
from torch import nn


class Solution(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))

    def forward(self, t):
        return self.net(t)


def residual(u, t):
    value = u(t)
    (first,) = torch.autograd.grad(value.sum(), t, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), t, create_graph=True)
    return second + value


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    u = Solution()
    optimizer = torch.optim.Adam(u.parameters(), lr=5e-3)
    start = torch.zeros(1, 1, requires_grad=True)
    for step in range(150):
        t = (torch.rand(64, 1) * math.pi).requires_grad_(True)
        inside = residual(u, t).square().mean()
        begin = u(start)
        (slope,) = torch.autograd.grad(begin, start, create_graph=True)
        boundary = begin.square().sum() + (slope - 1).square().sum()
        loss = inside + 10 * boundary
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 30 == 0:
            print(step, loss.item())
