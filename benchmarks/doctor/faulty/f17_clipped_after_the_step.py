# A recurrent network over noisy sequences. After a public report: VGraphRNN/VGRNN#4.
import argparse

import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--clip", type=float, default=0.5)
parser.add_argument("--fixed", action="store_true", help="run the repaired version")
opts = parser.parse_args()
torch.manual_seed(opts.seed)


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = nn.RNNCell(3, 32)
        self.readout = nn.Linear(32, 1)

    def forward(self, seq):
        h = torch.zeros(seq.shape[1], 32)
        for inputs in seq:
            h = self.cell(inputs, h)
        return self.readout(h).squeeze(-1)


vgrnn = Recurrent()
optimizer = torch.optim.Adam(vgrnn.parameters(), lr=5e-3)
for k in range(100):
    seq = torch.randn(15, 24, 3)
    wanted = 3 * seq[-3:].sum((0, 2))
    loss = (vgrnn(seq) - wanted).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    if opts.fixed:
        nn.utils.clip_grad_norm_(vgrnn.parameters(), opts.clip)
        optimizer.step()
    else:
        optimizer.step()
        nn.utils.clip_grad_norm_(vgrnn.parameters(), opts.clip)
    if k % 20 == 0:
        print("step", k, "loss", loss.item())
