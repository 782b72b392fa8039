# Self-distillation: the teacher's branch is stopped, and its weights follow the student's slowly.
import argparse
import copy

import torch
import torch.nn.functional as F
from torch import nn


class Byol(nn.Module):
    def __init__(self):
        super().__init__()
        self.online = nn.Sequential(nn.Linear(20, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 32))
        self.predictor = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32))
        self.target = copy.deepcopy(self.online)
        for p in self.target.parameters():
            p.requires_grad = False

    @torch.no_grad()
    def follow(self, momentum=0.99):
        for slow, fast in zip(self.target.parameters(), self.online.parameters(), strict=True):
            slow.data.mul_(momentum).add_(fast.data, alpha=1 - momentum)

    def half(self, one, two):
        guess = F.normalize(self.predictor(self.online(one)))
        with torch.no_grad():
            goal = F.normalize(self.target(two))
        return 2 - 2 * (guess * goal.detach()).sum(1).mean()

    def forward(self, one, two):
        return self.half(one, two) + self.half(two, one)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    byol = Byol()
    optimizer = torch.optim.Adam([*byol.online.parameters(), *byol.predictor.parameters()], lr=2e-3)
    mixing = torch.randn(5, 20)
    for it in range(90):
        clean = torch.randn(64, 5) @ mixing
        loss = byol(clean + 0.3 * torch.randn(64, 20), clean + 0.3 * torch.randn(64, 20))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        byol.follow()
        if it % 15 == 0:
            print(it, loss.item())
