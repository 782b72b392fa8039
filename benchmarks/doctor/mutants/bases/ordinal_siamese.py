# Compares two items with one network and learns which is the better one.
import sys

import torch
from torch import nn
from torch.nn import functional as F


class Scorer(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(10, 48), nn.Tanh(), nn.Linear(48, 24), nn.Tanh())
        self.score = nn.Linear(24, 1)

    def forward(self, first, second):
        return (self.score(self.inner(first)) - self.score(self.inner(second))).squeeze(1)


def comparisons(n, taste):
    first, second = torch.randn(2, n, 10)
    quality = lambda x: torch.sin(x @ taste[:, 0]) + x @ taste[:, 1]  # noqa: E731
    better = (quality(first) + 0.1 * torch.randn(n) > quality(second)).float()
    return first, second, better


def epoch(model, optimizer, data, batch=50):
    order = torch.randperm(len(data[0]))
    model.train()
    running = 0.0
    for start in range(0, len(order), batch):
        first, second, better = (part[order[start : start + batch]] for part in data)
        optimizer.zero_grad()
        logits = model(first, second)
        loss = F.binary_cross_entropy_with_logits(logits, better)
        loss.backward()
        optimizer.step()
        running += loss.item()
    return running / (len(order) / batch)


def accuracy(model, data):
    model.eval()
    with torch.no_grad():
        return ((model(data[0], data[1]) > 0).float() == data[2]).float().mean().item()


torch.manual_seed(int(sys.argv[-1]) if len(sys.argv) > 1 else 0)
taste = torch.randn(10, 2) * 0.5
train, test = comparisons(2000, taste), comparisons(800, taste)
model = Scorer()
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, weight_decay=1e-3)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, gamma=0.6)
for number in range(8):
    print(f"epoch {number} loss {epoch(model, optimizer, train):.4f} accuracy {accuracy(model, test):.3f}")
    scheduler.step()
print(f"metric {accuracy(model, test):.4f}")
