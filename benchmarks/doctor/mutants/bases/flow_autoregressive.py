# A masked autoregressive density of binary strings; each bit depends on those before it.
import argparse

import torch
import torch.nn.functional as F
from torch import nn

BITS = 10


class MaskedLinear(nn.Linear):
    def __init__(self, inside, outside, mask):
        super().__init__(inside, outside)
        self.register_buffer("mask", mask)

    def forward(self, x):
        return F.linear(x, self.weight * self.mask, self.bias)


class MADE(nn.Module):
    def __init__(self, hidden=60):
        super().__init__()
        degree = torch.arange(hidden) % (BITS - 1)
        self.first = MaskedLinear(BITS, hidden, (degree[:, None] >= torch.arange(BITS)[None, :]).float())
        self.second = MaskedLinear(hidden, BITS, (torch.arange(BITS)[:, None] > degree[None, :]).float())

    def forward(self, bits):
        return self.second(torch.relu(self.first(bits)))


def strings(n):
    bits = [torch.randint(2, (n,)), torch.randint(2, (n,))]
    for _ in range(BITS - 2):
        following = bits[-1] ^ bits[-2]
        bits.append(torch.where(torch.rand(n) < 0.1, 1 - following, following))
    return torch.stack(bits, dim=1).float()


def nll(model, bits):
    return F.binary_cross_entropy_with_logits(model(bits), bits, reduction="none").sum(dim=1).mean()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=0)
    torch.manual_seed(parser.parse_args().seed)
    model = MADE()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for step in range(400):
        bits = strings(96)
        loss = nll(model, bits)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 100 == 0:
            print(f"{step}: {loss.item():.4f} nats")
    with torch.no_grad():
        loss = nll(model, strings(2000)).item()
    print(f"metric {1 - loss / (BITS * 0.6931):.4f}")


if __name__ == "__main__":
    main()
