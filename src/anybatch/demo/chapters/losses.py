"""Six losses on one trunk, yielded where people call backward()."""

import copy

import torch
from torch import nn
from torch.nn import functional as F

import anybatch

torch.manual_seed(0)
model = nn.ModuleDict({"trunk": nn.Sequential(nn.Linear(64, 256), nn.Tanh())})
model["heads"] = nn.ModuleList(
    nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 8))
    for _ in range(6)
)
batch = {"x": torch.randn(512, 64), "y": torch.randint(8, (512, 6))}


def summed(model, batch):
    features = model["trunk"](batch["x"])
    return sum(
        F.cross_entropy(head(features), y)
        for head, y in zip(model["heads"], batch["y"].T, strict=True)
    )


def one_by_one(model, batch):
    with anybatch.cut(model["trunk"](batch["x"])) as features:
        for head, y in zip(model["heads"], batch["y"].T, strict=True):
            yield F.cross_entropy(head(features), y)


other = copy.deepcopy(model)
together = anybatch.measure(lambda: summed(model, batch).backward())
apart = anybatch.measure(lambda: anybatch.backward(other, one_by_one, batch))
pairs = zip(model.parameters(), other.parameters(), strict=True)
error = max((a.grad - b.grad).abs().max() for a, b in pairs)
print(f"peak, all losses summed: {together.peak_bytes / 2**20:.0f} MiB")
print(f"peak, one at a time:     {apart.peak_bytes / 2**20:.0f} MiB")
print(f"largest difference of a gradient: {error:.0e}")
