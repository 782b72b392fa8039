# A decoder-only model with its own attention and an explicit mask learns to repeat what it has read.
import math
import sys

import torch
from torch import nn
from torch.nn import functional as F

VOCAB, HALF = 10, 6


class SelfAttention(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.q = nn.Linear(dim, dim)
        self.k = nn.Linear(dim, dim)
        self.v = nn.Linear(dim, dim)
        self.o = nn.Linear(dim, dim)

    def forward(self, x):
        length = x.shape[1]
        mask = torch.tril(torch.ones(length, length))
        scores = self.q(x) @ self.k(x).transpose(-2, -1) / math.sqrt(x.shape[-1])
        scores = scores.masked_fill(mask == 0, float("-inf"))
        return self.o(F.softmax(scores, dim=-1) @ self.v(x))


class Copier(nn.Module):
    def __init__(self, dim=48):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, dim)
        self.place = nn.Embedding(2 * HALF, dim)
        self.attention = nn.ModuleList([SelfAttention(dim) for _ in range(2)])
        self.feed = nn.ModuleList([nn.Sequential(nn.Linear(dim, 96), nn.ReLU(), nn.Linear(96, dim)) for _ in range(2)])
        self.norms = nn.ModuleList([nn.LayerNorm(dim) for _ in range(4)])
        self.out = nn.Linear(dim, VOCAB)

    def forward(self, ids):
        x = self.embed(ids) + self.place(torch.arange(ids.shape[1]))
        for i in range(2):
            x = x + self.attention[i](self.norms[2 * i](x))
            x = x + self.feed[i](self.norms[2 * i + 1](x))
        return self.out(x)


def copies(n):
    half = torch.randint(VOCAB, (n, HALF))
    return torch.cat([half, half], dim=1)


torch.manual_seed(int(sys.argv[-1]) if len(sys.argv) > 1 else 0)
model = Copier()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
warmup = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 20))
for step in range(260):
    ids = copies(48)
    logits = model(ids[:, :-1])
    loss = F.cross_entropy(logits.transpose(1, 2), ids[:, 1:])
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    warmup.step()
    if step % 65 == 0:
        print(f"step {step} loss {loss.item():.4f}")
ids = copies(200)
with torch.no_grad():
    guess = model(ids[:, :-1]).argmax(dim=-1)
print(f"metric {(guess[:, HALF - 1 :] == ids[:, HALF:]).float().mean().item():.4f}")
