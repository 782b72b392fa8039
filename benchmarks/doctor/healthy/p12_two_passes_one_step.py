# Two tasks, two backward passes, one step; the gradients are meant to add up.
import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class MultiTask(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(15, 48), nn.ReLU(), nn.Linear(48, 48), nn.ReLU())
        self.kind = nn.Linear(48, 4)
        self.amount = nn.Linear(48, 1)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--weight", type=float, default=0.5)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    x = torch.randn(960, 15)
    kind = x[:, :4].argmax(1)
    amount = x[:, 4:7].sum(1, keepdim=True)
    loader = DataLoader(TensorDataset(x, kind, amount), batch_size=48, shuffle=True)
    net = MultiTask()
    optimizer = torch.optim.Adam(net.parameters(), lr=2e-3)
    for epoch in range(5):
        for inputs, kinds, amounts in loader:
            optimizer.zero_grad()
            first = nn.functional.cross_entropy(net.kind(net.trunk(inputs)), kinds)
            first.backward()
            second = args.weight * nn.functional.mse_loss(net.amount(net.trunk(inputs)), amounts)
            second.backward()
            optimizer.step()
        print(epoch, first.item(), second.item())
