# Decays the learning rate tenfold an epoch. After public reports: ivadomed#55, Auto-PyTorch#210.
import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn, optim
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset, random_split

parser = argparse.ArgumentParser()
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--fixed", action="store_true", help="run the repaired version")
args = parser.parse_args()
torch.manual_seed(args.seed)

raw = load_digits()
everything = TensorDataset(torch.tensor(raw.data).float() / 16, torch.tensor(raw.target))
train_set, valid_set = random_split(everything, [1400, len(everything) - 1400])
train_loader = DataLoader(train_set, batch_size=40, shuffle=True)
valid_loader = DataLoader(valid_set, batch_size=200)

mlp = nn.Sequential(nn.Linear(64, 100), nn.ReLU(), nn.Dropout(0.1), nn.Linear(100, 10))
optimizer = optim.Adam(mlp.parameters(), lr=1e-2)
scheduler = StepLR(optimizer, step_size=1, gamma=0.1)

for epoch in range(args.epochs):
    mlp.train()
    for x, y in train_loader:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(mlp(x), y)
        loss.backward()
        optimizer.step()
        if not args.fixed:
            scheduler.step()
    if args.fixed:
        scheduler.step()
    mlp.eval()
    with torch.no_grad():
        right = sum((mlp(x).argmax(1) == y).sum().item() for x, y in valid_loader)
    print(epoch, "lr", scheduler.get_last_lr()[0], "loss", loss.item(), "accuracy", right / len(valid_set))
