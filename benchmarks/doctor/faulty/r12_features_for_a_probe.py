# Trains a linear probe on the features of a fixed backbone. After public reports of features made ahead.
import argparse

import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--fixed", action="store_true", help="run the repaired version")
args = parser.parse_args()
torch.manual_seed(args.seed)

backbone = nn.Sequential(nn.Linear(12, 64), nn.ReLU(), nn.Linear(64, 32)).eval()
probe = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 3))
x = torch.randn(600, 12)
y = x[:, :3].argmax(1)
if args.fixed:
    with torch.no_grad():
        features = backbone(x)
else:
    with torch.inference_mode():
        features = backbone(x)

optimizer = torch.optim.Adam(probe.parameters(), lr=5e-3)
for epoch in range(10):
    loss = nn.functional.cross_entropy(probe(features), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(epoch, loss.item())
