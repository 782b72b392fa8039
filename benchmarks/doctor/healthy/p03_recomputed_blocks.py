# Activation checkpointing without re-entering autograd; blocks run again in the backward pass.
import argparse

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.wide = nn.Linear(width, 3 * width)
        self.narrow = nn.Linear(3 * width, width)
        self.drop = nn.Dropout(0.1)

    def forward(self, x):
        return x + self.drop(self.narrow(torch.nn.functional.gelu(self.wide(self.norm(x)))))


class Stack(nn.Module):
    def __init__(self, width=32, depth=5):
        super().__init__()
        self.inp = nn.Linear(10, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.out = nn.Linear(width, 1)

    def forward(self, x):
        x = self.inp(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.training else block(x)
        return self.out(x)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=0)
    torch.manual_seed(parser.parse_args().seed)
    stack = Stack()
    optimizer = torch.optim.AdamW(stack.parameters(), lr=1e-3)
    x = torch.randn(512, 10)
    y = (x[:, :2].prod(1, keepdim=True) + x[:, 2:3]).tanh()
    for epoch in range(6):
        stack.train()
        for rows in torch.randperm(512).split(32):
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(stack(x[rows]), y[rows])
            loss.backward()
            optimizer.step()
        stack.eval()
        with torch.no_grad():
            print(epoch, nn.functional.mse_loss(stack(x), y).item())


if __name__ == "__main__":
    main()
