# Logistic regression with features, fitted by LBFGS and its closure.
import sys

import torch
from torch import nn

torch.manual_seed(int(sys.argv[-1]) if len(sys.argv) > 1 else 0)


def features(x):
    return torch.cat([x, x**2, x[:, :1] * x[:, 1:]], dim=1)


def points(n):
    x = torch.randn(n, 2)
    inside = (x.pow(2) * torch.tensor([1.0, 2.0])).sum(dim=1) + x[:, 0] * x[:, 1] < 1.5
    flip = torch.rand(n) < 0.03
    return features(x), (inside ^ flip).float()


train_x, train_y = points(800)
test_x, test_y = points(800)
model = nn.Linear(5, 1)
criterion = nn.BCEWithLogitsLoss()
optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4, history_size=8)


def closure():
    optimizer.zero_grad()
    loss = criterion(model(train_x).squeeze(1), train_y) + 1e-3 * model.weight.pow(2).sum()
    loss.backward()
    return loss


for iteration in range(25):
    loss = optimizer.step(closure)
    if iteration % 5 == 0:
        print(f"iteration {iteration} loss {loss.item():.5f}")
with torch.no_grad():
    accuracy = ((model(test_x).squeeze(1) > 0).float() == test_y).float().mean()
print(f"metric {accuracy.item():.4f}")
