# Denoising score matching at several levels of noise; the score is compared with the true one of a mixture.
import argparse

import torch
import torch.nn as nn
import torch.nn.functional as F

SIGMAS = torch.tensor([0.2, 0.5, 1.0])
CENTERS = torch.tensor([[1.5, 0.0], [-1.5, 0.5]])


class ScoreNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin1 = nn.Linear(3, 64)
        self.lin2 = nn.Linear(64, 64)
        self.lin3 = nn.Linear(64, 2)

    def forward(self, x, sigma):
        h = F.softplus(self.lin1(torch.cat([x, sigma.log()], dim=1)))
        h = F.softplus(self.lin2(h))
        return self.lin3(h) / sigma


def draw(n):
    return CENTERS[torch.randint(2, (n,))] + 0.3 * torch.randn(n, 2)


def true_score(x, sigma):
    variance = 0.09 + sigma**2
    gap = CENTERS[None] - x[:, None]
    weight = (-gap.pow(2).sum(-1) / (2 * variance)).softmax(dim=1)
    return (weight.unsqueeze(-1) * gap).sum(1) / variance


def dsm_loss(net, x):
    sigma = SIGMAS[torch.randint(3, (len(x), 1))]
    noise = torch.randn_like(x)
    score = net(x + sigma * noise, sigma)
    return ((sigma * score + noise) ** 2).sum(dim=1).mean()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=0)
    torch.manual_seed(parser.parse_args().seed)
    net = ScoreNet()
    optimizer = torch.optim.Adam(net.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=400)
    for step in range(400):
        loss = dsm_loss(net, draw(192))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        if step % 100 == 0:
            print(step, loss.item())
    x = draw(1000) + 0.5 * torch.randn(1000, 2)
    sigma = torch.full((1000, 1), 0.5)
    with torch.no_grad():
        truth = true_score(x, 0.5)
        error = (net(x, sigma) - truth).pow(2).mean() / truth.pow(2).mean()
    print(f"metric {1 - error.item():.4f}")


main()
