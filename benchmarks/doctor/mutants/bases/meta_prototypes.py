# Few-shot classification: a query belongs to the class whose mean embedding is nearest.
import sys

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(int(sys.argv[-1]) if len(sys.argv) > 1 else 0)
WAYS, SHOTS, QUERIES = 5, 3, 6
world = torch.randn(30, 60)


class Embedding(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(30, 64)
        self.bn = nn.BatchNorm1d(64)
        self.fc2 = nn.Linear(64, 24)

    def forward(self, x):
        return self.fc2(F.relu(self.bn(self.fc1(x))))


def episode(classes):
    chosen = classes[torch.randperm(len(classes))[:WAYS]]
    signal = world[:, chosen].t().repeat_interleave(SHOTS + QUERIES, dim=0)
    nuisance = 2.5 * torch.randn(len(signal), 3) @ torch.ones(3, 30).cumsum(0) / 3
    x = (signal + nuisance + 0.9 * torch.randn_like(signal)).view(WAYS, SHOTS + QUERIES, 30)
    support, query = x[:, :SHOTS].reshape(-1, 30), x[:, SHOTS:].reshape(-1, 30)
    return support, query, torch.arange(WAYS).repeat_interleave(QUERIES)


def episode_logits(model, support, query):
    prototypes = model(support).view(WAYS, SHOTS, -1).mean(dim=1)
    return -(torch.cdist(model(query), prototypes) ** 2)


model = Embedding()
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
train_classes, test_classes = torch.arange(40), torch.arange(40, 60)
for step in range(250):
    model.train()
    support, query, labels = episode(train_classes)
    loss = F.cross_entropy(episode_logits(model, support, query), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 50 == 0:
        print(f"episode {step} loss {loss.item():.4f}")
model.eval()
right = 0.0
with torch.no_grad():
    for _ in range(100):
        support, query, labels = episode(test_classes)
        right += (episode_logits(model, support, query).argmax(dim=1) == labels).float().mean().item()
print(f"metric {right / 100:.4f}")
