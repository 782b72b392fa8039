# Pools the frames of a clip by learned weights. After public reports: world-models#10, capsnet_pytorch#1.
import argparse

import torch
from torch import nn
from torch.nn import functional as F


class AttentivePooling(nn.Module):
    def __init__(self, size, dim):
        super().__init__()
        self.query = nn.Linear(size, 1)
        self.dim = dim

    def forward(self, frames):  # rows, frames, size
        weights = F.softmax(self.query(frames).squeeze(-1), dim=self.dim)
        return (weights.unsqueeze(-1) * frames).sum(1)


class ClipModel(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.frame = nn.Sequential(nn.Linear(10, 32), nn.ReLU())
        self.pool = AttentivePooling(32, dim)
        self.label = nn.Linear(32, 4)

    def forward(self, clip):
        return self.label(self.pool(self.frame(clip)))


def clips(rows):
    label = torch.randint(4, (rows,))
    clip = torch.randn(rows, 8, 10) * 0.4
    place = torch.randint(8, (rows,))
    clip[torch.arange(rows), place, label] += 3.0
    return clip, label


def main(options):
    torch.manual_seed(options.seed)
    model = ClipModel(dim=-1 if options.fixed else 0)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    for step in range(80):
        clip, label = clips(32)
        loss = F.cross_entropy(model(clip), label)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 20 == 0:
            print(step, loss.item())
    clip, _ = clips(6)
    model.eval()
    with torch.no_grad():
        print("alone and in a batch:", (model(clip)[0] - model(clip[:1])[0]).abs().max().item())


if __name__ == "__main__":
    ap = argparse.ArgumentParser()
    ap.add_argument("--seed", type=int, default=0)
    ap.add_argument("--fixed", action="store_true", help="run the repaired version")
    main(ap.parse_args())
