# Contrastive learning: two views of each sample against all others in the batch, with BatchNorm.
import argparse

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

ap = argparse.ArgumentParser()
ap.add_argument("--seed", type=int, default=0)
ap.add_argument("--temperature", type=float, default=0.2)
opt = ap.parse_args()
torch.manual_seed(opt.seed)

images = torch.tensor(load_digits().images).float()[:, None] / 16


def augment(batch):
    shifted = torch.roll(batch, tuple(torch.randint(-1, 2, (2,)).tolist()), (2, 3))
    return shifted * (0.8 + 0.4 * torch.rand(len(batch), 1, 1, 1)) + 0.05 * torch.randn_like(batch)


def nt_xent(z1, z2, temperature):
    z = F.normalize(torch.cat([z1, z2]))
    similarity = z @ z.T / temperature
    similarity.fill_diagonal_(float("-inf"))
    n = len(z1)
    positives = torch.cat([torch.arange(n, 2 * n), torch.arange(n)])
    return F.cross_entropy(similarity, positives)


encoder = nn.Sequential(
    nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(256, 64)
)
projector = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 32))
model = nn.Sequential(encoder, projector)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=1e-4)
for step in range(60):
    batch = images[torch.randint(len(images), (64,))]
    loss = nt_xent(model(augment(batch)), model(augment(batch)), opt.temperature)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 12 == 0:
        print(step, loss.item())
