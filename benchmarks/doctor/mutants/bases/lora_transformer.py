# Low-rank adapters in a frozen encoder that was trained for another task.
import math
import sys

import torch
import torch.nn.functional as F
from torch import nn


class LoRALinear(nn.Module):
    def __init__(self, base, rank=4, alpha=8):
        super().__init__()
        self.base = base
        self.lora_A = nn.Parameter(torch.empty(rank, base.in_features))
        self.lora_B = nn.Parameter(torch.zeros(base.out_features, rank))
        nn.init.kaiming_uniform_(self.lora_A, a=math.sqrt(5))
        self.scaling = alpha / rank

    def forward(self, x):
        return self.base(x) + (x @ self.lora_A.t() @ self.lora_B.t()) * self.scaling


class Model(nn.Module):
    def __init__(self, vocabulary=20, dim=32):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, dim)
        self.norm = nn.LayerNorm(dim)
        self.query, self.key, self.value = nn.Linear(dim, dim), nn.Linear(dim, dim), nn.Linear(dim, dim)
        self.up, self.down = nn.Linear(dim, 64), nn.Linear(64, dim)
        self.classifier = nn.Linear(dim, 2)

    def forward(self, tokens):
        x = self.embed(tokens)
        h = self.norm(x)
        attention = F.softmax(self.query(h) @ self.key(h).transpose(1, 2) / math.sqrt(h.shape[-1]), dim=-1)
        x = x + attention @ self.value(h)
        x = x + self.down(F.gelu(self.up(x)))
        return self.classifier(x.mean(dim=1))


def batch(n, task):
    tokens = torch.randint(20, (n, 8))
    small = (tokens < 10).sum(dim=1)
    if task == "small":
        return tokens, (small > 3).long()
    return tokens, ((tokens % 2 == 0).sum(dim=1) > 3).long()


def train(model, task, lr, steps):
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=lr)
    for step in range(steps):
        tokens, labels = batch(48, task)
        loss = F.cross_entropy(model(tokens), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 60 == 0:
            print(f"{task} {step} {loss.item():.4f}")


torch.manual_seed(int(sys.argv[-1]) if len(sys.argv) > 1 else 0)
model = Model()
train(model, "small", lr=3e-3, steps=120)
for parameter in model.parameters():
    parameter.requires_grad = False
for name in ("query", "value", "up", "down"):
    setattr(model, name, LoRALinear(getattr(model, name)))
for parameter in model.classifier.parameters():
    parameter.requires_grad = True
train(model, "even", lr=8e-3, steps=240)
model.eval()
tokens, labels = batch(1000, "even")
with torch.no_grad():
    print(f"metric {(model(tokens).argmax(dim=1) == labels).float().mean().item():.4f}")
