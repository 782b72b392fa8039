# A network that begins with equal weights. After a public report: TheDeepChecker (wrong_init).
import argparse

import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--fixed", action="store_true", help="run the repaired version")
args = parser.parse_args()
torch.manual_seed(args.seed)


def start(layer):
    if isinstance(layer, nn.Linear):
        if args.fixed:
            nn.init.xavier_uniform_(layer.weight)
        else:
            nn.init.constant_(layer.weight, 0.05)
        nn.init.zeros_(layer.bias)


mlp = nn.Sequential(nn.Linear(10, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1)).apply(start)
optimizer = torch.optim.Adam(mlp.parameters(), lr=5e-3)
x = torch.randn(600, 10)
y = x[:, :1] * x[:, 1:2] + x[:, 2:3]
for step in range(120):
    rows = torch.randint(600, (50,))
    loss = nn.functional.mse_loss(mlp(x[rows]), y[rows])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 24 == 0:
        print(step, loss.item(), "rank of the middle", torch.linalg.matrix_rank(mlp[2].weight, rtol=1e-4).item())
