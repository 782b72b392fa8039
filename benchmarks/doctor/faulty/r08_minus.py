# Maximum likelihood by hand. After a public report: TheDeepChecker (wrong sign).
import argparse

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn


def likelihood(model, x, y):
    return F.nll_loss(F.log_softmax(model(x), dim=1), y)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--fixed", action="store_true", help="run the repaired version")
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    digits = load_digits()
    x, y = torch.tensor(digits.data).float() / 16, torch.tensor(digits.target)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    for step in range(80):
        rows = torch.randint(len(x), (64,))
        if args.fixed:
            loss = likelihood(model, x[rows], y[rows])
        else:
            loss = -likelihood(model, x[rows], y[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 16 == 0:
            print(step, loss.item())


if __name__ == "__main__":
    main()
