# Two noisy views of a thing are pulled together and apart from the rest of the batch; a probe then reads the class.
import sys

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(int(sys.argv[-1]) if len(sys.argv) > 1 else 0)
prototypes = torch.randn(8, 32)


def things(n):
    kind = torch.randint(8, (n,))
    return prototypes[kind] + 0.5 * torch.randn(n, 32), kind


def augment(x):
    keep = (torch.rand_like(x) > 0.2).float()
    return (x + 0.6 * torch.randn_like(x)) * keep


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU())
        self.projector = nn.Linear(32, 16)

    def forward(self, x):
        return F.normalize(self.projector(self.backbone(x)), dim=1)


def nt_xent(a, b, temperature=0.2):
    z = torch.cat([a, b], dim=0)
    similarity = z @ z.t() / temperature
    similarity = similarity.masked_fill(torch.eye(len(z), dtype=torch.bool), float("-inf"))
    partner = torch.arange(len(z)).roll(len(a))
    return F.cross_entropy(similarity, partner)


model = Encoder()
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3, weight_decay=1e-6)
for step in range(150):
    x, _ = things(96)
    loss = nt_xent(model(augment(x)), model(augment(x)))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 50 == 0:
        print(f"step {step} loss {loss.item():.4f}")
model.eval()
with torch.no_grad():
    x, kind = things(600)
    z = model(augment(x))
    same = kind[:, None] == kind[None, :]
    off = ~torch.eye(600, dtype=torch.bool)
    similarity = z @ z.t()
    gap = similarity[same & off].mean() - similarity[~same].mean()
print(f"metric {gap.item():.4f}")
