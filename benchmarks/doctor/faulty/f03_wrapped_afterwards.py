# A trainer that prepares the model for the device it gets. After public reports: accelerate#2665, accelerate#3256,
# practical-pytorch#9, pytorch/pytorch#14467.
import argparse
import copy

import torch
from torch import nn


class Prepared(nn.Module):
    """Runs a copy of a module, so that the one of the caller keeps its weights."""

    def __init__(self, module):
        super().__init__()
        self.module = copy.deepcopy(module)

    def forward(self, *inputs):
        return self.module(*inputs)


class Trainer:
    def __init__(self, net, lr, early):
        if early:
            self.net = Prepared(net)
            self.opt = torch.optim.SGD(self.net.parameters(), lr=lr, momentum=0.9)
        else:
            self.opt = torch.optim.SGD(net.parameters(), lr=lr, momentum=0.9)
            self.net = Prepared(net)
        self.history = []

    def fit(self, inputs, targets, steps):
        for _ in range(steps):
            pick = torch.randint(len(inputs), (50,))
            self.net.zero_grad()
            loss = nn.functional.mse_loss(self.net(inputs[pick]), targets[pick])
            loss.backward()
            self.opt.step()
            self.history.append(loss.item())
        return self.history


def run(seed, fixed):
    torch.manual_seed(seed)
    inputs = torch.randn(400, 12)
    targets = torch.sin(inputs[:, :3]).sum(1, keepdim=True)
    net = nn.Sequential(nn.Linear(12, 40), nn.Tanh(), nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 1))
    history = Trainer(net, lr=0.02, early=fixed).fit(inputs, targets, steps=100)
    print("first", history[0], "last", history[-1])


if __name__ == "__main__":
    cli = argparse.ArgumentParser()
    cli.add_argument("--seed", type=int, default=0)
    cli.add_argument("--fixed", action="store_true", help="run the repaired version")
    options = cli.parse_args()
    run(options.seed, options.fixed)
