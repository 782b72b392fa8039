# An MLP of variable depth on the digits. After a public report: pytorch/pytorch#38639.
import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--depth", type=int, default=3)
parser.add_argument("--fixed", action="store_true", help="run the repaired version")
args = parser.parse_args()
torch.manual_seed(args.seed)


class DeepClassifier(nn.Module):
    def __init__(self, width, depth, fixed):
        super().__init__()
        self.stem = nn.Linear(64, width)
        blocks = [nn.Linear(width, width) for _ in range(depth)]
        self.blocks = nn.ModuleList(blocks) if fixed else blocks
        self.head = nn.Linear(width, 10)

    def forward(self, x):
        x = torch.relu(self.stem(x))
        for block in self.blocks:
            x = torch.relu(block(x))
        return self.head(x)


digits = load_digits()
features = torch.tensor(digits.data, dtype=torch.float32) / 16
labels = torch.tensor(digits.target)
loader = DataLoader(TensorDataset(features, labels), batch_size=64, shuffle=True)

model = DeepClassifier(48, args.depth, args.fixed)
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
criterion = nn.CrossEntropyLoss()

for epoch in range(4):
    running = 0.0
    for x, y in loader:
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        loss.backward()
        optimizer.step()
        running += loss.item()
    print(f"epoch {epoch} loss {running / len(loader):.4f}")
