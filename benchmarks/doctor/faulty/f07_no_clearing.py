# A small regressor in a loop. After public reports: StackOverflow 60335387, wekws#72, pytorch/pytorch#47175.
import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def make_data():
    x = torch.rand(320, 6) * 2 - 1
    return x, (x**2).sum(1, keepdim=True)


def train(regressor, loader, fixed, epochs=8, lr=0.01):
    sgd = torch.optim.SGD(regressor.parameters(), lr=lr)
    objective = nn.SmoothL1Loss()
    for epoch in range(epochs):
        total = 0.0
        for features, target in loader:
            if fixed:
                sgd.zero_grad()
            prediction = regressor(features)
            loss = objective(prediction, target)
            loss.backward()
            sgd.step()
            total += loss.item()
        norm = nn.utils.get_total_norm([p.grad for p in regressor.parameters()])
        print(f"epoch {epoch} loss {total / len(loader):.4f} gradient {norm:.3f}")


if __name__ == "__main__":
    p = argparse.ArgumentParser()
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--fixed", action="store_true", help="run the repaired version")
    a = p.parse_args()
    torch.manual_seed(a.seed)
    x, y = make_data()
    net = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 1))
    train(net, DataLoader(TensorDataset(x, y), batch_size=32, shuffle=True), a.fixed)
