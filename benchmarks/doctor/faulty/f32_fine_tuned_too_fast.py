# Pretrains a small text encoder and fine-tunes it. After public reports: transformers#735, StackOverflow 48934338.
import argparse

import torch
from torch import nn
from torch.nn import functional as F

WORDS, LENGTH, MASK = 60, 12, 0


class Encoder(nn.Module):
    def __init__(self, dim=64, depth=4):
        super().__init__()
        self.tokens = nn.Embedding(WORDS, dim)
        self.positions = nn.Embedding(LENGTH, dim)
        layer = nn.TransformerEncoderLayer(dim, 4, 2 * dim, dropout=0.1, activation="gelu", batch_first=True)
        self.layers = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)

    def forward(self, ids):
        return self.layers(self.tokens(ids) + self.positions.weight)


def small_normal(module):
    if isinstance(module, (nn.Linear, nn.Embedding)):
        nn.init.normal_(module.weight, std=0.02)
    elif isinstance(module, nn.MultiheadAttention):
        nn.init.normal_(module.in_proj_weight, std=0.02)


class ForClassification(nn.Module):
    def __init__(self, encoder):
        super().__init__()
        self.encoder = encoder
        self.pooler = nn.Linear(64, 64)
        self.classifier = nn.Linear(64, 2)

    def forward(self, ids):
        return self.classifier(torch.tanh(self.pooler(self.encoder(ids)[:, 0])))


def sentences(n):
    start = torch.randint(1, WORDS, (n, 1))
    return (start + 3 * torch.arange(LENGTH)) % (WORDS - 1) + 1


def pretrain(encoder, steps):
    decoder = nn.Linear(64, WORDS)
    optimizer = torch.optim.AdamW([*encoder.parameters(), *decoder.parameters()], lr=1e-3)
    for step in range(steps):
        ids = sentences(24)
        hidden = torch.rand(ids.shape) < 0.2
        logits = decoder(encoder(ids.masked_fill(hidden, MASK)))
        loss = F.cross_entropy(logits[hidden], ids[hidden])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 30 == 0:
            print("pretraining", step, loss.item())


def finetune(model, lr, steps):
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    for step in range(steps):
        ids = sentences(24)
        loss = F.cross_entropy(model(ids), (ids[:, 0] > WORDS // 2).long())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 10 == 0:
            print("fine-tuning", step, loss.item())


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--lr", type=float, default=1e-2)
    parser.add_argument("--fixed", action="store_true", help="run the repaired version")
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    encoder = Encoder().apply(small_normal)
    pretrain(encoder, 80)
    finetune(ForClassification(encoder), 3e-4 if args.fixed else args.lr, 50)
