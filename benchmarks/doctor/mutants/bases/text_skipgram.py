# Word vectors by skip-gram with negative samples; words of one topic stand beside each other.
import sys

import torch
import torch.nn.functional as F
from torch import nn

TOPICS, PER_TOPIC = 6, 8
WORDS = TOPICS * PER_TOPIC


class SkipGram(nn.Module):
    def __init__(self, dim=12):
        super().__init__()
        self.center = nn.Embedding(WORDS, dim)
        self.context = nn.Embedding(WORDS, dim)
        nn.init.uniform_(self.center.weight, -0.5 / dim, 0.5 / dim)

    def forward(self, center, context, negatives):
        vector = self.center(center)
        positive = (vector * self.context(context)).sum(dim=1)
        negative = torch.bmm(self.context(negatives), vector.unsqueeze(2)).squeeze(2)
        return -(F.logsigmoid(positive) + F.logsigmoid(-negative).sum(dim=1)).mean()


def draw(n):
    topic = torch.randint(TOPICS, (n,))
    center = topic * PER_TOPIC + torch.randint(PER_TOPIC, (n,))
    near = topic * PER_TOPIC + torch.randint(PER_TOPIC, (n,))
    stray = torch.randint(WORDS, (n,))
    context = torch.where(torch.rand(n) < 0.9, near, stray)
    return center, context, torch.randint(WORDS, (n, 5))


torch.manual_seed(int(sys.argv[-1]) if len(sys.argv) > 1 else 0)
model = SkipGram()
optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
losses = []
for step in range(300):
    center, context, negatives = draw(256)
    loss = model(center, context, negatives)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.detach())
    if (step + 1) % 100 == 0:
        print(step + 1, torch.stack(losses[-100:]).mean().item())
vectors = F.normalize(model.center.weight.detach(), dim=1)
similar = vectors @ vectors.t()
similar.fill_diagonal_(-1)
neighbours = similar.topk(3, dim=1).indices // PER_TOPIC
truth = torch.arange(WORDS).unsqueeze(1) // PER_TOPIC
print(f"metric {(neighbours == truth).float().mean().item():.4f}")
