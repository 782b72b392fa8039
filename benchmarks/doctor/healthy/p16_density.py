# The negative logarithm of a density may fall below zero: a mean and a variance for each input.
import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Heteroscedastic(nn.Module):
    def __init__(self):
        super().__init__()
        self.hidden = nn.Sequential(nn.Linear(1, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh())
        self.mean = nn.Linear(64, 1)
        self.log_var = nn.Linear(64, 1)

    def forward(self, x):
        h = self.hidden(x)
        return self.mean(h), self.log_var(h).exp()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=0)
    torch.manual_seed(parser.parse_args().seed)
    x = torch.rand(1000, 1) * 2 - 1
    y = 0.3 * torch.sin(4 * x) + (0.01 + 0.05 * x.abs()) * torch.randn(1000, 1)
    network = Heteroscedastic()
    objective = nn.GaussianNLLLoss()
    optimizer = torch.optim.Adam(network.parameters(), lr=2e-3)
    for epoch in range(12):
        for inputs, values in DataLoader(TensorDataset(x, y), batch_size=50, shuffle=True):
            mean, var = network(inputs)
            loss = objective(mean, values, var)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if epoch % 2 == 0:
            print(epoch, loss.item())


if __name__ == "__main__":
    main()
