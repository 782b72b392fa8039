# A stateful LSTM over consecutive pieces of a series. After public reports: MorvanZhou/PyTorch-Tutorial#57, darts#56.
import argparse

import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--fixed", action="store_true", help="run the repaired version")
args = parser.parse_args()
torch.manual_seed(args.seed)


class Forecaster(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(1, 24, batch_first=True)
        self.linear = nn.Linear(24, 1)

    def forward(self, piece, state):
        out, state = self.lstm(piece, state)
        return self.linear(out), state


series = torch.sin(torch.arange(0, 120, 0.1)).reshape(1, -1, 1)
forecaster = Forecaster()
optimizer = torch.optim.Adam(forecaster.parameters(), lr=5e-3)
state = None
for k in range(50):
    piece, following = series[:, 20 * k : 20 * k + 20], series[:, 20 * k + 1 : 20 * k + 21]
    prediction, state = forecaster(piece, state)
    if args.fixed:
        state = tuple(s.detach() for s in state)
    loss = nn.functional.mse_loss(prediction, following)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if k % 10 == 0:
        print(k, loss.item())
