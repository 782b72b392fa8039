# Translates one kind of signal into another, with an adversarial term. After a public report: image2reverb#37.
import argparse

import torch
from torch import nn
from torch.nn import functional as F

parser = argparse.ArgumentParser()
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--fixed", action="store_true", help="run the repaired version")
args = parser.parse_args()
torch.manual_seed(args.seed)

generator = nn.Sequential(nn.Linear(16, 64), nn.LeakyReLU(0.2), nn.Linear(64, 64), nn.LeakyReLU(0.2), nn.Linear(64, 16))
discriminator = nn.Sequential(nn.Linear(16, 48), nn.LeakyReLU(0.2), nn.Linear(48, 1))
opt_g = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.999))
opt_d = torch.optim.Adam(discriminator.parameters(), lr=1e-3, betas=(0.5, 0.999))


def pair(n):
    source = torch.randn(n, 16)
    return source, torch.cumsum(source, 1) / 4 + 0.1 * torch.randn(n, 16)


for step in range(100):
    source, real = pair(32)
    fake = generator(source)

    d_real, d_fake = discriminator(real), discriminator(fake.detach())
    d_loss = F.softplus(-d_real).mean() + F.softplus(d_fake).mean()
    opt_d.zero_grad()
    d_loss.backward()
    opt_d.step()

    if args.fixed:
        judged = discriminator(fake)
    else:
        judged = discriminator(fake.detach())
    adversarial = F.softplus(-judged).mean()
    reconstruction = F.l1_loss(fake, real)
    g_loss = 10 * reconstruction + adversarial
    opt_g.zero_grad()
    g_loss.backward()
    opt_g.step()
    if step % 20 == 0:
        print(f"D {d_loss.item():.3f} G {g_loss.item():.3f} adversarial {adversarial.item():.3f}")
