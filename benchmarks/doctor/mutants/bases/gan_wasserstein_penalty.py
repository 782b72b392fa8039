# A Wasserstein critic with gradient penalty, three critic steps for one of the generator.
import argparse

import torch
from torch import autograd, nn

parser = argparse.ArgumentParser()
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--lambda_gp", type=float, default=5.0)
parser.add_argument("--n_critic", type=int, default=3)
opt = parser.parse_args()


def mlp(inside, outside):
    return nn.Sequential(nn.Linear(inside, 40), nn.Tanh(), nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, outside))


def real_batch(n):
    centers = torch.tensor([[2.0, 1.0], [-1.0, 2.0], [0.0, -1.0]])
    return centers[torch.randint(3, (n,))] + 0.2 * torch.randn(n, 2)


def gradient_penalty(critic, real, fake):
    alpha = torch.rand(len(real), 1)
    between = (alpha * real + (1 - alpha) * fake).requires_grad_(True)
    scores = critic(between)
    gradients = autograd.grad(scores, between, torch.ones_like(scores), create_graph=True, retain_graph=True)[0]
    return ((gradients.norm(2, dim=1) - 1) ** 2).mean()


def main():
    torch.manual_seed(opt.seed)
    generator, critic = mlp(3, 2), mlp(2, 1)
    opt_g = torch.optim.Adam(generator.parameters(), lr=2e-3, betas=(0.0, 0.9))
    opt_c = torch.optim.Adam(critic.parameters(), lr=4e-3, betas=(0.0, 0.9))
    for step in range(160):
        for _ in range(opt.n_critic):
            real = real_batch(64)
            with torch.no_grad():
                fake = generator(torch.randn(64, 3))
            penalty = gradient_penalty(critic, real, fake)
            loss_c = critic(fake).mean() - critic(real).mean() + opt.lambda_gp * penalty
            opt_c.zero_grad()
            loss_c.backward()
            opt_c.step()
        loss_g = -critic(generator(torch.randn(64, 3))).mean()
        opt_g.zero_grad()
        loss_g.backward()
        opt_g.step()
        if step % 40 == 0:
            print(f"step {step}: critic {loss_c.item():.3f}, generator {loss_g.item():.3f}")
    with torch.no_grad():
        a, b = generator(torch.randn(600, 3)), real_batch(600)
        energy = 2 * torch.cdist(a, b).mean() - torch.cdist(a, a).mean() - torch.cdist(b, b).mean()
    print(f"metric {-energy.item():.4f}")


main()
