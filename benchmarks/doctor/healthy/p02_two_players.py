# A generative adversarial network on a ring of Gaussians: two optimizers, the generator after the discriminator.
import argparse
import math

import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--seed", type=int, default=0)
args = parser.parse_args()
torch.manual_seed(args.seed)


def real_points(n):
    angle = torch.randint(8, (n,)) * math.pi / 4
    return torch.stack([angle.cos(), angle.sin()], 1) * 2 + 0.1 * torch.randn(n, 2)


net_g = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))
net_d = nn.Sequential(nn.Linear(2, 64), nn.LeakyReLU(0.2), nn.Linear(64, 64), nn.LeakyReLU(0.2), nn.Linear(64, 1))
optimizer_d = torch.optim.Adam(net_d.parameters(), lr=2e-4, betas=(0.5, 0.999))
optimizer_g = torch.optim.Adam(net_g.parameters(), lr=2e-4, betas=(0.5, 0.999))
criterion = nn.BCEWithLogitsLoss()
for i in range(150):
    net_d.zero_grad()
    err_real = criterion(net_d(real_points(64)), torch.ones(64, 1))
    err_real.backward()
    fake = net_g(torch.randn(64, 8))
    err_fake = criterion(net_d(fake.detach()), torch.zeros(64, 1))
    err_fake.backward()
    optimizer_d.step()

    net_g.zero_grad()
    err_g = criterion(net_d(fake), torch.ones(64, 1))
    err_g.backward()
    optimizer_g.step()
    if i % 30 == 0:
        print(f"D {(err_real + err_fake).item():.3f} G {err_g.item():.3f}")
