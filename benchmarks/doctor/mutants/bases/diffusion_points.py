# Denoising diffusion of points on a spiral, with an average of the weights that is used to sample.
import copy
import sys

import torch
from torch import nn

STEPS = 40
betas = torch.linspace(1e-3, 0.2, STEPS)
alphas = 1 - betas
alphas_bar = torch.cumprod(alphas, dim=0)


def data(n):
    t = torch.rand(n) * 2 + 0.3
    return torch.stack([t * torch.cos(3 * t), t * torch.sin(3 * t)], dim=1) / 1.2


class Denoiser(nn.Module):
    def __init__(self, width=96):
        super().__init__()
        self.time = nn.Embedding(STEPS, 16)
        self.net = nn.Sequential(
            nn.Linear(18, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU(), nn.Linear(width, 2)
        )

    def forward(self, x, t):
        return self.net(torch.cat([x, self.time(t)], dim=1))


@torch.no_grad()
def update_ema(ema, model, decay=0.98):
    for averaged, current in zip(ema.parameters(), model.parameters(), strict=True):
        averaged.mul_(decay).add_(current, alpha=1 - decay)


@torch.no_grad()
def sample(model, n):
    x = torch.randn(n, 2)
    for t in reversed(range(STEPS)):
        predicted = model(x, torch.full((n,), t))
        x = (x - betas[t] / (1 - alphas_bar[t]).sqrt() * predicted) / alphas[t].sqrt()
        if t > 0:
            x = x + betas[t].sqrt() * torch.randn(n, 2)
    return x


torch.manual_seed(int(sys.argv[-1]) if len(sys.argv) > 1 else 0)
model = Denoiser()
ema = copy.deepcopy(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
for step in range(400):
    x0 = data(128)
    t = torch.randint(STEPS, (128,))
    noise = torch.randn_like(x0)
    level = alphas_bar[t].unsqueeze(1)
    noisy = level.sqrt() * x0 + (1 - level).sqrt() * noise
    loss = (model(noisy, t) - noise).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    update_ema(ema, model)
    if step % 100 == 0:
        print(f"step {step} loss {loss.item():.4f}")
made, truth = sample(ema, 500), data(500)
energy = 2 * torch.cdist(made, truth).mean() - torch.cdist(made, made).mean() - torch.cdist(truth, truth).mean()
print(f"metric {-energy.item():.4f}")
