# Matrix factorisation for ranking: what a user took has to stand before what the user did not take.
import sys

import torch
from torch import nn
from torch.nn import functional as F

USERS, ITEMS = 150, 100


class Factorisation(nn.Module):
    def __init__(self, dim=12):
        super().__init__()
        self.user = nn.Embedding(USERS, dim)
        self.item = nn.Embedding(ITEMS, dim)
        self.bias = nn.Embedding(ITEMS, 1)
        nn.init.normal_(self.user.weight, std=0.1)
        nn.init.normal_(self.item.weight, std=0.1)
        nn.init.zeros_(self.bias.weight)

    def forward(self, users, items):
        return (self.user(users) * self.item(items)).sum(dim=-1) + self.bias(items).squeeze(-1)


def make_taste():
    score = torch.randn(USERS, 4) @ torch.randn(4, ITEMS)
    liked = score + 0.5 * torch.randn(USERS, ITEMS) > 1.8
    users, items = liked.nonzero().t()
    order = torch.randperm(len(users))
    return liked, users[order], items[order]


torch.manual_seed(int(sys.argv[-1]) if len(sys.argv) > 1 else 0)
liked, users, items = make_taste()
cut = int(0.8 * len(users))
model = Factorisation()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, weight_decay=1e-5)
for epoch in range(30):
    order = torch.randperm(cut)
    total = 0.0
    for pick in order.split(256):
        u, positive = users[pick], items[pick]
        negative = torch.randint(ITEMS, (len(pick),))
        loss = -F.logsigmoid(model(u, positive) - model(u, negative)).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.item() * len(pick)
    if epoch % 6 == 0:
        print(f"epoch {epoch} loss {total / cut:.4f}")
with torch.no_grad():
    u, positive = users[cut:], items[cut:]
    negative = torch.randint(ITEMS, u.shape)
    fair = ~liked[u, negative]
    better = model(u, positive) > model(u, negative)
print(f"metric {better[fair].float().mean().item():.4f}")
