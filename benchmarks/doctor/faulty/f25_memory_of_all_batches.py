# A running summary of everything seen so far is an input of the head. After a public report: cnslab_fmri#4.
import argparse
import time

import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--fixed", action="store_true", help="run the repaired version")
args = parser.parse_args()
torch.manual_seed(args.seed)


class WithMemory(nn.Module):
    def __init__(self, features, width):
        super().__init__()
        self.proj = nn.Linear(features, width)
        self.read = nn.Linear(2 * width, 1)

    def forward(self, x, memory):
        encoded = torch.tanh(self.proj(x))
        memory = 0.9 * memory + 0.1 * encoded.mean(0)
        joined = torch.cat([encoded, memory.expand_as(encoded)], 1)
        return self.read(joined).squeeze(1), memory


net = WithMemory(20, 64)
optimizer = torch.optim.Adam(net.parameters(), lr=2e-3)
memory = torch.zeros(64)
drift = torch.zeros(20)
for step in range(120):
    started = time.perf_counter()
    drift = drift + 0.05 * torch.randn(20)
    x = torch.randn(64, 20) + drift
    target = (x - drift)[:, :4].sum(1)
    if args.fixed:
        memory = memory.detach()
    output, memory = net(x, memory)
    loss = (output - target).square().mean()
    optimizer.zero_grad()
    if args.fixed:
        loss.backward()
    else:
        loss.backward(retain_graph=True)
    optimizer.step()
    if step % 20 == 0:
        print(f"{step} loss {loss.item():.3f} {1e3 * (time.perf_counter() - started):.1f} ms")
