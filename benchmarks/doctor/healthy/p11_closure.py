# L-BFGS evaluates its closure several times in a step.
import argparse

import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--seed", type=int, default=0)
args = parser.parse_args()
torch.manual_seed(args.seed)

x = torch.rand(200, 2) * 4 - 2
y = (x[:, :1] ** 2 - x[:, 1:] * x[:, :1]).tanh()
surface = nn.Sequential(nn.Linear(2, 24), nn.Tanh(), nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 1))
lbfgs = torch.optim.LBFGS(surface.parameters(), lr=0.5, max_iter=6, line_search_fn="strong_wolfe")


def closure():
    lbfgs.zero_grad()
    loss = nn.functional.mse_loss(surface(x), y)
    loss.backward()
    return loss


for k in range(30):
    loss = lbfgs.step(closure)
    if k % 5 == 0:
        print(k, loss.item())
