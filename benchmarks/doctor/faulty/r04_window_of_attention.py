# A causal language model with a sliding window. After a public report: transformers#31673.
import argparse

import torch
from torch import nn
from torch.nn import functional as F

parser = argparse.ArgumentParser()
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--fixed", action="store_true", help="run the repaired version")
args = parser.parse_args()
torch.manual_seed(args.seed)


class Windowed(nn.Module):
    def __init__(self, dim, heads, window):
        super().__init__()
        self.heads, self.window = heads, window
        self.norm = nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)

    def forward(self, x):
        rows, length, dim = x.shape
        q, k, v = self.qkv(self.norm(x)).view(rows, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        i, j = torch.arange(length)[:, None], torch.arange(length)
        if args.fixed:
            window = (i - j >= 0) & (i - j < self.window)
        else:
            window = (i - j).abs() < self.window
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=window)
        return x + self.out(mixed.transpose(1, 2).reshape(rows, length, dim))


class Mistral(nn.Module):
    def __init__(self, vocab=40, dim=32):
        super().__init__()
        self.tokens = nn.Embedding(vocab, dim)
        self.positions = nn.Embedding(32, dim)
        self.blocks = nn.Sequential(Windowed(dim, 4, 4), Windowed(dim, 4, 4))
        self.lm_head = nn.Linear(dim, vocab)

    def forward(self, ids):
        return self.lm_head(self.blocks(self.tokens(ids) + self.positions.weight[: ids.shape[1]]))


lm = Mistral()
optimizer = torch.optim.AdamW(lm.parameters(), lr=5e-3)
for step in range(80):
    ids = (torch.randint(40, (24, 1)) + (torch.randint(2, (24, 16)) * 4 + 1).cumsum(1)) % 40
    logits = lm(ids[:, :-1])
    loss = F.cross_entropy(logits.reshape(-1, 40), ids[:, 1:].reshape(-1))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 16 == 0:
        print(step, f"{loss.item():.4f}, no less than 0.693 without the future")
