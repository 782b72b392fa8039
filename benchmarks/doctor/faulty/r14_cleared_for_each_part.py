# Four micro-batches a step. A classic of accumulation, without a single report.
import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--fixed", action="store_true", help="run the repaired version")
args = parser.parse_args()
torch.manual_seed(args.seed)

x = torch.randn(1600, 12)
y = (x @ torch.randn(12, 3)).argmax(1)
loader = DataLoader(TensorDataset(x, y), batch_size=10)
model = nn.Sequential(nn.Linear(12, 40), nn.ReLU(), nn.Linear(40, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
for number, (inputs, labels) in enumerate(loader, 1):
    if not args.fixed or number % 4 == 1:
        optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(inputs), labels) / 4
    loss.backward()
    if number % 4 == 0:
        optimizer.step()
    if number % 32 == 0:
        print(number, 4 * loss.item())
