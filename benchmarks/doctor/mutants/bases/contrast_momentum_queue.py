# Contrast against a queue of keys from a slowly moving copy of the encoder.
import copy
import sys

import torch
import torch.nn as nn
import torch.nn.functional as F


class MomentumContrast(nn.Module):
    def __init__(self, encoder, dim=16, size=256, momentum=0.95, temperature=0.2):
        super().__init__()
        self.encoder_q = encoder
        self.encoder_k = copy.deepcopy(encoder)
        for parameter in self.encoder_k.parameters():
            parameter.requires_grad = False
        self.momentum, self.temperature = momentum, temperature
        self.register_buffer("queue", F.normalize(torch.randn(dim, size), dim=0))
        self.register_buffer("pointer", torch.zeros(1, dtype=torch.long))

    @torch.no_grad()
    def update_key_encoder(self):
        for q, k in zip(self.encoder_q.parameters(), self.encoder_k.parameters(), strict=True):
            k.data = k.data * self.momentum + q.data * (1 - self.momentum)

    @torch.no_grad()
    def enqueue(self, keys):
        at = int(self.pointer)
        self.queue[:, at : at + len(keys)] = keys.t()
        self.pointer[0] = (at + len(keys)) % self.queue.shape[1]

    def forward(self, view_q, view_k):
        q = F.normalize(self.encoder_q(view_q), dim=1)
        with torch.no_grad():
            self.update_key_encoder()
            k = F.normalize(self.encoder_k(view_k), dim=1)
        positive = (q * k).sum(dim=1, keepdim=True)
        negative = q @ self.queue.clone().detach()
        logits = torch.cat([positive, negative], dim=1) / self.temperature
        labels = torch.zeros(len(logits), dtype=torch.long)
        self.enqueue(k)
        return F.cross_entropy(logits, labels)


def views(x):
    return x + 0.5 * torch.randn_like(x), x + 0.5 * torch.randn_like(x)


torch.manual_seed(int(sys.argv[-1]) if len(sys.argv) > 1 else 0)
basis = torch.randn(10, 24)
model = MomentumContrast(nn.Sequential(nn.Linear(24, 64), nn.ReLU(), nn.Linear(64, 16)))
optimizer = torch.optim.SGD(model.encoder_q.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
for step in range(220):
    x = basis[torch.randint(10, (32,))] + 0.4 * torch.randn(32, 24)
    loss = model(*views(x))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 55 == 0:
        print(step, round(loss.item(), 4))
with torch.no_grad():
    kind = torch.randint(10, (500,))
    a, b = (F.normalize(model.encoder_q(v), dim=1) for v in views(basis[kind] + 0.4 * torch.randn(500, 24)))
    similarity = a @ b.t()
    same = kind[:, None] == kind[None, :]
print(f"metric {(similarity[same].mean() - similarity[~same].mean()).item():.4f}")
