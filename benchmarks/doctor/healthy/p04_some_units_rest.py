# A wide ReLU network; about half of the activations are zero in a batch, and some units never fire.
import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--seed", type=int, default=0)
args = parser.parse_args()
torch.manual_seed(args.seed)

digits = load_digits()
images, labels = torch.tensor(digits.data).float() / 16, torch.tensor(digits.target)
loader = DataLoader(TensorDataset(images, labels), batch_size=64, shuffle=True)
network = nn.Sequential(nn.Linear(64, 200), nn.ReLU(), nn.Linear(200, 100), nn.ReLU(), nn.Linear(100, 10))
with torch.no_grad():
    network[0].bias[:16] = -4.0
optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
for epoch in range(5):
    for x, y in loader:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(network(x), y)
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        silent = (network[:2](images) == 0).all(0).sum().item()
    print(epoch, loss.item(), "silent units", silent)
