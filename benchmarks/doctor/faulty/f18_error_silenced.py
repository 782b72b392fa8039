# Minimises the number of errors. After public reports: arcface-pytorch#56, pytorch/pytorch#1339.
import argparse

import torch
from torch import nn, optim
from torch.utils.data import DataLoader, TensorDataset


def points(n=400):
    xy = torch.randn(n, 2)
    return xy, (xy.norm(dim=1) > 1.1).long()


def errors(scores, label, fixed):
    if fixed:
        return nn.functional.cross_entropy(scores, label)
    predicted = scores.argmax(dim=1)
    loss = (predicted != label).float().mean()
    loss.requires_grad = True
    return loss


def main(seed, fixed):
    torch.manual_seed(seed)
    loader = DataLoader(TensorDataset(*points()), batch_size=40, shuffle=True)
    classifier = nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 2))
    optimizer = optim.SGD(classifier.parameters(), lr=0.2, momentum=0.9)
    for epoch in range(6):
        seen = []
        for xy, label in loader:
            optimizer.zero_grad()
            loss = errors(classifier(xy), label, fixed)
            loss.backward()
            optimizer.step()
            seen.append(loss.item())
        print(f"epoch {epoch}: {sum(seen) / len(seen):.4f}")


if __name__ == "__main__":
    ap = argparse.ArgumentParser()
    ap.add_argument("--seed", type=int, default=0)
    ap.add_argument("--fixed", action="store_true", help="run the repaired version")
    ns = ap.parse_args()
    main(ns.seed, ns.fixed)
