# Gradient accumulation by hand in an ordinary loop over a loader.
import sys

import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset


def dataset(n, mapping):
    x = torch.randn(n, 16)
    return TensorDataset(x, torch.sin(x @ mapping).sum(dim=1, keepdim=True))


def run(seed, accumulation_steps=3):
    torch.manual_seed(seed)
    mapping = torch.randn(16, 2) * 0.25
    loader = DataLoader(dataset(1800, mapping), batch_size=20, shuffle=True)
    x_test, y_test = dataset(500, mapping).tensors
    model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.08, momentum=0.9)
    criterion = nn.MSELoss()
    model.train()
    for epoch in range(8):
        optimizer.zero_grad()
        for batch_idx, (inputs, targets) in enumerate(loader):
            outputs = model(inputs)
            loss = criterion(outputs, targets)
            loss = loss / accumulation_steps
            loss.backward()
            if (batch_idx + 1) % accumulation_steps == 0:
                optimizer.step()
                optimizer.zero_grad()
        print(f"epoch {epoch}: {loss.item() * accumulation_steps:.4f}")
    model.eval()
    with torch.no_grad():
        error = (model(x_test) - y_test).pow(2).mean() / y_test.var()
    return 1 - error.item()


print(f"metric {run(int(sys.argv[-1]) if len(sys.argv) > 1 else 0):.4f}")
