# Embeds voices so that those of one speaker are near each other: a triplet loss with a margin.
import sys

import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(int(sys.argv[-1]) if len(sys.argv) > 1 else 0)
mixing = torch.randn(40, 24)
speakers = torch.randn(60, 6)


def voices(who):
    content = torch.randn(len(who), 18)
    return torch.tanh(torch.cat([1.2 * speakers[who], content], dim=1) @ mixing.t() / 3)


class Embedder(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer1 = nn.Linear(40, 96)
        self.layer2 = nn.Linear(96, 96)
        self.layer3 = nn.Linear(96, 12)

    def forward(self, x):
        x = F.relu(self.layer1(x))
        x = F.relu(self.layer2(x))
        return F.normalize(self.layer3(x), dim=1)


def triplet_loss(anchor, positive, negative, margin=0.4):
    near = (anchor - positive).pow(2).sum(dim=1)
    far = (anchor - negative).pow(2).sum(dim=1)
    return F.relu(near - far + margin).mean()


embedder = Embedder()
optimizer = torch.optim.Adam(embedder.parameters(), lr=2e-3)
for step in range(300):
    who = torch.randint(50, (64,))
    other = (who + torch.randint(1, 50, (64,))) % 50
    anchor, positive, negative = embedder(voices(who)), embedder(voices(who)), embedder(voices(other))
    loss = triplet_loss(anchor, positive, negative)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 75 == 0:
        print(f"{step} {loss.item():.4f}")
with torch.no_grad():
    who = torch.randint(50, 60, (400,))
    other = 50 + (who - 50 + torch.randint(1, 10, (400,))) % 10
    a, p, n = embedder(voices(who)), embedder(voices(who)), embedder(voices(other))
    right = (a - p).norm(dim=1) < (a - n).norm(dim=1)
print(f"metric {right.float().mean().item():.4f}")
