# An energy that is low where data are: samples come from Langevin steps on the inputs.
import argparse

import torch
import torch.nn as nn


class Energy(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(2, 48)
        self.fc2 = nn.Linear(48, 48)
        self.fc3 = nn.Linear(48, 1)

    def forward(self, x):
        h = nn.functional.silu(self.fc1(x))
        return self.fc3(nn.functional.silu(self.fc2(h))).squeeze(1)


def langevin(energy, x, steps=12, size=0.1):
    for parameter in energy.parameters():
        parameter.requires_grad_(False)
    for _ in range(steps):
        x = x.detach().requires_grad_(True)
        slope = torch.autograd.grad(energy(x).sum(), x)[0]
        x = x - size * slope.clamp(-1, 1) + 0.05 * torch.randn_like(x)
    for parameter in energy.parameters():
        parameter.requires_grad_(True)
    return x.detach()


def data(n):
    angle = torch.rand(n) * 6.2832
    return torch.stack([angle.cos(), 0.5 * angle.sin()], dim=1) + 0.08 * torch.randn(n, 2)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=0)
    torch.manual_seed(parser.parse_args().seed)
    energy = Energy()
    optimizer = torch.optim.Adam(energy.parameters(), lr=3e-3, betas=(0.5, 0.99))
    for step in range(150):
        real = data(96)
        fake = langevin(energy, torch.rand(96, 2) * 4 - 2)
        real_energy, fake_energy = energy(real), energy(fake)
        loss = real_energy.mean() - fake_energy.mean() + 0.1 * (real_energy**2 + fake_energy**2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 30 == 0:
            print(f"step {step} loss {loss.item():.4f}")
    with torch.no_grad():
        low, high = energy(data(400)), energy(torch.rand(400, 2) * 4 - 2)
    print(f"metric {(low[:, None] < high[None, :]).float().mean().item():.4f}")


main()
