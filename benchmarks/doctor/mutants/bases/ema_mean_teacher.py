# Semi-supervised: few labels, and a teacher that is the average of the student and is agreed with.
import argparse
import copy

import torch
import torch.nn.functional as F
from torch import nn


class EMA:
    def __init__(self, model, decay):
        self.model = copy.deepcopy(model)
        self.decay = decay
        for parameter in self.model.parameters():
            parameter.requires_grad_(False)

    def update(self, model):
        with torch.no_grad():
            for slow, fast in zip(self.model.parameters(), model.parameters(), strict=True):
                slow.copy_(self.decay * slow + (1 - self.decay) * fast)


def network():
    return nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))


def moons(n):
    y = torch.randint(2, (n,))
    t = torch.rand(n) * 3.1416
    x = torch.stack([torch.where(y == 0, t.cos(), 1 - t.cos()), torch.where(y == 0, t.sin(), 0.5 - t.sin())], dim=1)
    return x + 0.12 * torch.randn(n, 2), y


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    labelled_x, labelled_y = moons(40)
    unlabelled, _ = moons(2000)
    student = network()
    teacher = EMA(student, decay=0.95)
    optimizer = torch.optim.Adam(student.parameters(), lr=5e-3)
    for step in range(300):
        student.train()
        x = unlabelled[torch.randint(2000, (64,))]
        with torch.no_grad():
            target = F.softmax(teacher.model(x + 0.1 * torch.randn_like(x)), dim=1)
        class_loss = F.cross_entropy(student(labelled_x), labelled_y)
        consistency = F.mse_loss(F.softmax(student(x + 0.1 * torch.randn_like(x)), dim=1), target)
        weight = 2.0 * min(1.0, step / 100)
        loss = class_loss + weight * consistency
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        teacher.update(student)
        if step % 75 == 0:
            print(f"{step} class {class_loss.item():.4f} consistency {consistency.item():.4f}")
    teacher.model.eval()
    with torch.no_grad():
        x, y = moons(1500)
        accuracy = (teacher.model(x).argmax(dim=1) == y).float().mean()
    print(f"metric {accuracy.item():.4f}")


main()
