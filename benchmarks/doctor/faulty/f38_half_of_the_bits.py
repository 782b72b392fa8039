# Continues the training of a language model whose weights are bfloat16. After public reports: ml-by-hand#85,
# torchtune#2254.
import argparse

import torch
from torch import nn
from torch.nn import functional as F


class Norm(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(dim))

    def forward(self, x):
        return self.scale * x * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6).to(x.dtype)


class Block(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm1, self.norm2 = Norm(dim), Norm(dim)
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.o = nn.Linear(dim, dim, bias=False)
        self.up = nn.Linear(dim, 2 * dim, bias=False)
        self.down = nn.Linear(2 * dim, dim, bias=False)

    def forward(self, x):
        q, k, v = self.qkv(self.norm1(x)).chunk(3, -1)
        x = x + self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True))
        return x + self.down(F.silu(self.up(self.norm2(x))))


class Llama(nn.Module):
    def __init__(self, vocab=50, dim=48):
        super().__init__()
        self.tok = nn.Embedding(vocab, dim)
        self.blocks = nn.ModuleList([Block(dim), Block(dim)])
        self.norm = Norm(dim)
        self.output = nn.Linear(dim, vocab, bias=False)

    def forward(self, tokens):
        x = self.tok(tokens)
        for block in self.blocks:
            x = block(x)
        return self.output(self.norm(x))


def train(seed, fixed, lr=2e-5, steps=60):
    torch.manual_seed(seed)
    llama = Llama()
    if not fixed:
        llama = llama.to(torch.bfloat16)
    optimizer = torch.optim.AdamW(llama.parameters(), lr=lr, weight_decay=0.0)
    for step in range(steps):
        start = torch.randint(50, (16, 1))
        tokens = (start + 7 * torch.arange(17)) % 50
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=fixed):
            logits = llama(tokens[:, :-1])
        loss = F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 15 == 0:
            moved = int((llama.norm.scale != 1).sum())
            print(f"step {step} loss {loss.item():.4f} scales that moved {moved}")


if __name__ == "__main__":
    cli = argparse.ArgumentParser()
    cli.add_argument("--seed", type=int, default=0)
    cli.add_argument("--fixed", action="store_true", help="run the repaired version")
    given = cli.parse_args()
    train(given.seed, given.fixed)
