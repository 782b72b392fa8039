# Adapters on a frozen decoder, with activation checkpointing. After public reports: open-unlearning#178, peft#1142,
# microsoft/LoRA#120.
import argparse
import math

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint


class Adapted(nn.Module):
    def __init__(self, base, rank=4):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.lora_a = nn.Parameter(torch.randn(rank, base.in_features) / math.sqrt(base.in_features))
        self.lora_b = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x):
        return self.base(x) + 2.0 * (x @ self.lora_a.T) @ self.lora_b.T


class Layer(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm = nn.LayerNorm(dim).requires_grad_(False)
        self.fc_in = Adapted(nn.Linear(dim, 2 * dim))
        self.fc_out = Adapted(nn.Linear(2 * dim, dim))

    def forward(self, x):
        return x + self.fc_out(F.gelu(self.fc_in(self.norm(x))))


class Decoder(nn.Module):
    def __init__(self, reentrant, dim=32, vocab=30):
        super().__init__()
        self.reentrant = reentrant
        self.embed_tokens = nn.Embedding(vocab, dim).requires_grad_(False)
        self.layers = nn.ModuleList(Layer(dim) for _ in range(3))
        self.score = nn.Linear(dim, 3)

    def forward(self, ids):
        hidden = self.embed_tokens(ids)
        for layer in self.layers:
            hidden = checkpoint(layer, hidden, use_reentrant=self.reentrant)
        return self.score(hidden.mean(1))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--fixed", action="store_true", help="run the repaired version")
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    decoder = Decoder(reentrant=not args.fixed)
    trainable = [p for p in decoder.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=5e-3)
    ids = torch.randint(30, (256, 10))
    kind = ids.sum(1) % 3
    for step in range(50):
        rows = torch.randint(256, (32,))
        loss = F.cross_entropy(decoder(ids[rows]), kind[rows])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 10 == 0:
            print(step, loss.item(), "largest B", decoder.layers[0].fc_in.lora_b.abs().max().item())
