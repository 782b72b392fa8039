# Snapshot ensembles: the learning rate falls to zero along a cosine, a snapshot is kept, and a new cycle begins with
# a new optimizer.
import argparse
import copy

import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR


def cycle(model, x, y, length):
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    schedule = CosineAnnealingLR(optimizer, T_max=length)
    for _ in range(length):
        rows = torch.randint(len(x), (64,))
        loss = nn.functional.binary_cross_entropy_with_logits(model(x[rows]).squeeze(1), y[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return loss.item(), schedule.get_last_lr()[0]


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cycles", type=int, default=4)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    x = torch.randn(800, 5)
    y = (x.pow(2).sum(1) > 5).float()
    model = nn.Sequential(nn.Linear(5, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
    snapshots = []
    for number in range(args.cycles):
        print(number, *cycle(model, x, y, 40))
        snapshots.append(copy.deepcopy(model).eval())
    with torch.no_grad():
        votes = torch.stack([snapshot(x).squeeze(1) for snapshot in snapshots]).mean(0)
    print("accuracy of the ensemble", ((votes > 0).float() == y).float().mean().item())
