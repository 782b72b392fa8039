# Low-rank adapters whose second factor begins at zero, on a frozen base.
import argparse

import torch
from torch import nn
from torch.nn import functional as F

parser = argparse.ArgumentParser()
parser.add_argument("--seed", type=int, default=0)
args = parser.parse_args()
torch.manual_seed(args.seed)


class LoRALinear(nn.Module):
    def __init__(self, base, rank, alpha):
        super().__init__()
        self.base = base
        self.base.requires_grad_(False)
        self.a = nn.Linear(base.in_features, rank, bias=False)
        self.b = nn.Linear(rank, base.out_features, bias=False)
        nn.init.zeros_(self.b.weight)
        self.scale = alpha / rank

    def forward(self, x):
        return self.base(x) + self.scale * self.b(self.a(x))


class Base(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(200, 128)
        self.fc1 = nn.Linear(128, 512)
        self.fc2 = nn.Linear(512, 128)
        self.norm = nn.LayerNorm(128)
        self.out = nn.Linear(128, 20)

    def forward(self, ids):
        x = self.embed(ids).mean(1)
        return self.out(self.norm(x + self.fc2(F.gelu(self.fc1(x)))))


model = Base().requires_grad_(False)
model.fc1 = LoRALinear(model.fc1, 2, 8)
model.fc2 = LoRALinear(model.fc2, 2, 8)
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=3e-3)
ids = torch.randint(200, (600, 6))
label = (ids.float().mean(1) // 10).long()
for step in range(100):
    rows = torch.randint(600, (32,))
    loss = F.cross_entropy(model(ids[rows]), label[rows])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 20 == 0:
        print(step, loss.item())
