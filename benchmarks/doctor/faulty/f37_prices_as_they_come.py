# Predicts house prices. After public reports: StackOverflow 43436966, StackOverflow 52800582.
import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--fixed", action="store_true", help="run the repaired version")
args = parser.parse_args()
torch.manual_seed(args.seed)

count = 640
area = torch.rand(count) * 180 + 40
year = torch.randint(1900, 2020, (count,)).float()
distance = torch.rand(count) * 20000
rooms = torch.randint(1, 8, (count,)).float()
price = 2500 * area + 900 * (year - 1900) - 6 * distance + 20000 * torch.randn(count) + 150000
house = torch.stack([area, year, distance, rooms], 1)
if args.fixed:
    house = (house - house.mean(0)) / house.std(0)
    price = (price - price.mean()) / price.std()

batches = DataLoader(TensorDataset(house, price[:, None]), batch_size=32, shuffle=True)
regression = nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
optimizer = torch.optim.RMSprop(regression.parameters(), lr=1e-3)
objective = nn.MSELoss()
for epoch in range(5):
    for features, target in batches:
        optimizer.zero_grad()
        loss = objective(regression(features), target)
        loss.backward()
        optimizer.step()
    norm = sum(p.grad.norm().item() ** 2 for p in regression.parameters()) ** 0.5
    print(f"epoch {epoch} loss {loss.item():.4g} gradient {norm:.3g}")
