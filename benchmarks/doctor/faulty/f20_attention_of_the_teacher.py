# Distils the attention maps of a teacher. After a public report: bboylyg/NAD#8.
import argparse

import torch
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits


class Net(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.block1 = nn.Sequential(nn.Conv2d(1, channels, 3, padding=1), nn.ReLU())
        self.block2 = nn.Sequential(nn.Conv2d(channels, channels, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2))
        self.fc = nn.Linear(channels * 16, 10)

    def forward(self, x):
        a1 = self.block1(x)
        a2 = self.block2(a1)
        return a1, a2, self.fc(a2.flatten(1))


def attention_map(activation):
    return F.normalize(activation.pow(2).mean(1).flatten(1))


def distance(student_map, teacher_map):
    return (attention_map(student_map) - attention_map(teacher_map)).pow(2).mean()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--beta", type=float, default=20.0)
    parser.add_argument("--fixed", action="store_true", help="run the repaired version")
    args = parser.parse_args()
    torch.manual_seed(args.seed)

    digits = load_digits()
    images, labels = torch.tensor(digits.images).float()[:, None] / 16, torch.tensor(digits.target)
    teacher, student = Net(12).eval().requires_grad_(False), Net(6)
    optimizer = torch.optim.SGD(student.parameters(), lr=0.03, momentum=0.9)
    for iteration in range(60):
        chosen = torch.randint(len(images), (32,))
        s1, s2, logits = student(images[chosen])
        with torch.no_grad():
            t1, t2, _ = teacher(images[chosen])
        cls_loss = F.cross_entropy(logits, labels[chosen])
        if args.fixed:
            at_loss = distance(s1, t1) + distance(s2, t2)
        else:
            at_loss = distance(s1.detach(), t1.detach()) + distance(s2.detach(), t2.detach())
        loss = cls_loss + args.beta * at_loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if iteration % 12 == 0:
            print(iteration, "cls", round(cls_loss.item(), 3), "at", round(at_loss.item(), 5))


if __name__ == "__main__":
    main()
