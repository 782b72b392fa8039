# Fits a curve. After a public report: StackOverflow 44998910.
import argparse
import math

import torch

parser = argparse.ArgumentParser()
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--lr", type=float, default=10.0, help="in units of --unit")
parser.add_argument("--fixed", action="store_true", help="run the repaired version")
args = parser.parse_args()
torch.manual_seed(args.seed)
unit = 1e-3 if args.fixed else 1e-9

t = torch.linspace(-1, 1, 256)[:, None]
curve = torch.sin(math.pi * t) + 0.5 * t
fit = torch.nn.Sequential(
    torch.nn.Linear(1, 50), torch.nn.Tanh(), torch.nn.Linear(50, 50), torch.nn.Tanh(), torch.nn.Linear(50, 1)
)
adam = torch.optim.Adam(fit.parameters(), lr=args.lr * unit)
for k in range(250):
    adam.zero_grad()
    residual = (fit(t) - curve).pow(2).mean()
    residual.backward()
    adam.step()
    if k % 50 == 0:
        print(k, residual.item())
