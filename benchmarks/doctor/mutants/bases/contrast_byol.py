# Predicts the slow teacher's view of the same thing, without negatives.
import copy
import sys

import torch
from torch import nn
from torch.nn import functional as F


def projector(inside, outside):
    return nn.Sequential(nn.Linear(inside, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, outside))


class Student(nn.Module):
    def __init__(self):
        super().__init__()
        self.online = projector(20, 16)
        self.predictor = projector(16, 16)

    def forward(self, x):
        return self.predictor(self.online(x))


def regression_loss(prediction, target):
    return 2 - 2 * F.cosine_similarity(prediction, target.detach(), dim=-1).mean()


def main(seed, steps=260, tau=0.97):
    torch.manual_seed(seed)
    classes = torch.randn(6, 20)
    student = Student()
    teacher = copy.deepcopy(student.online)
    teacher.requires_grad_(False)
    optimizer = torch.optim.Adam(student.parameters(), lr=2e-3)
    for step in range(steps):
        x = classes[torch.randint(6, (64,))] + 0.3 * torch.randn(64, 20)
        one, two = x + 0.6 * torch.randn_like(x), x + 0.6 * torch.randn_like(x)
        loss = regression_loss(student(one), teacher(two)) + regression_loss(student(two), teacher(one))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for slow, fast in zip(teacher.parameters(), student.online.parameters(), strict=True):
                slow.mul_(tau).add_(fast, alpha=1 - tau)
        if step % 65 == 0:
            print(f"step {step} loss {loss.item():.4f}")
    student.eval()
    with torch.no_grad():
        kind = torch.randint(6, (400,))
        x = classes[kind] + 0.5 * torch.randn(400, 20)
        z = student.online(x)
        z = F.normalize(z - z.mean(dim=0), dim=1)
        same = kind[:, None] == kind[None, :]
        similarity = z @ z.t()
        gap = similarity[same].mean() - similarity[~same].mean()
    print(f"metric {gap.item():.4f}")


main(int(sys.argv[-1]) if len(sys.argv) > 1 else 0)
