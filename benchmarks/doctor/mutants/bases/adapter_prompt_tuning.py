# Soft prompts before the input of a frozen language model, trained to steer what it says next.
import argparse

import torch
from torch import nn
from torch.nn import functional as F


class TinyLM(nn.Module):
    def __init__(self, vocabulary=12, dim=32, length=16):
        super().__init__()
        self.tok = nn.Embedding(vocabulary, dim)
        self.pos = nn.Embedding(length, dim)
        layer = nn.TransformerEncoderLayer(dim, 4, 64, dropout=0.0, batch_first=True)
        self.body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(dim, vocabulary)

    def forward(self, embedded):
        n = embedded.shape[1]
        mask = torch.triu(torch.ones(n, n, dtype=torch.bool), diagonal=1)
        return self.head(self.body(embedded + self.pos(torch.arange(n)), mask=mask))


def counting(n, stride, length=8):
    start = torch.randint(12, (n, 1))
    return (start + stride * torch.arange(length)) % 12


def pretrain(lm):
    optimizer = torch.optim.Adam(lm.parameters(), lr=3e-3)
    for _ in range(180):
        stride = torch.randint(1, 4, (32, 1))
        ids = counting(32, stride)
        logits = lm(lm.tok(ids[:, :-1]))
        loss = F.cross_entropy(logits.reshape(-1, 12), ids[:, 1:].reshape(-1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=0)
    torch.manual_seed(parser.parse_args().seed)
    lm = TinyLM()
    pretrain(lm)
    for parameter in lm.parameters():
        parameter.requires_grad_(False)
    prompt = nn.Parameter(0.1 * torch.randn(4, 32))
    optimizer = torch.optim.Adam([prompt], lr=5e-2)
    for step in range(150):
        ids = counting(32, 3, length=2)
        embedded = torch.cat([prompt.expand(32, -1, -1), lm.tok(ids[:, :1])], dim=1)
        logits = lm(embedded)[:, -1]
        loss = F.cross_entropy(logits, ids[:, 1])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 50 == 0:
            print(f"step {step} loss {loss.item():.4f}")
    with torch.no_grad():
        ids = counting(400, 3, length=2)
        logits = lm(torch.cat([prompt.expand(400, -1, -1), lm.tok(ids[:, :1])], dim=1))[:, -1]
    print(f"metric {(logits.argmax(1) == ids[:, 1]).float().mean().item():.4f}")


main()
