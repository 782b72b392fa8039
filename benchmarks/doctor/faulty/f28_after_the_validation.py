# Validates after each epoch. After public reports: pytorch-fcn#57, shubhamagarwal92/mmd#14.
import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(nn.Linear(64, 128), nn.BatchNorm1d(128), nn.ReLU(), nn.Dropout(0.5))
        self.logits = nn.Linear(128, 10)

    def forward(self, x):
        return self.logits(self.features(x))


def evaluate(model, loader):
    model.eval()
    hits = 0
    with torch.no_grad():
        for x, y in loader:
            hits += (model(x).argmax(1) == y).sum().item()
    return hits / len(loader.dataset)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--fixed", action="store_true", help="run the repaired version")
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    digits = load_digits()
    x, y = torch.tensor(digits.data).float() / 16, torch.tensor(digits.target)
    training = DataLoader(TensorDataset(x[:1400], y[:1400]), batch_size=100, shuffle=True)
    validation = DataLoader(TensorDataset(x[1400:], y[1400:]), batch_size=397)

    model = Model()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    model.train()
    for epoch in range(5):
        if args.fixed:
            model.train()
        for inputs, labels in training:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(inputs), labels)
            loss.backward()
            optimizer.step()
        print(epoch, "loss", loss.item(), "accuracy", evaluate(model, validation), "training", model.training)


if __name__ == "__main__":
    main()
