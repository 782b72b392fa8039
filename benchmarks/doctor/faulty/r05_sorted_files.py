# Digits in the order of their folders. After a public report: super-gradients#416.
import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--fixed", action="store_true", help="run the repaired version")
args = parser.parse_args()
torch.manual_seed(args.seed)

digits = load_digits()
order = torch.tensor(digits.target).argsort(stable=True)
images = torch.tensor(digits.data).float()[order] / 16
labels = torch.tensor(digits.target)[order]
loader = DataLoader(TensorDataset(images, labels), batch_size=32, shuffle=args.fixed)
net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
for epoch in range(3):
    for x, y in loader:
        loss = nn.functional.cross_entropy(net(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        accuracy = (net(images).argmax(1) == labels).float().mean().item()
    print(epoch, loss.item(), "accuracy", accuracy)
