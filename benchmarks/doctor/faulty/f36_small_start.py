# A network of 34 layers with weights of its own making. After public reports: AutoTrainer (Motivation, DyingReLU).
import argparse

import torch
from torch import nn


def build(depth, width, fixed):
    layers = [nn.Linear(24, width), nn.ReLU()]
    for _ in range(depth - 2):
        layers += [nn.Linear(width, width), nn.ReLU()]
    layers.append(nn.Linear(width, 6))
    network = nn.Sequential(*layers)
    for layer in network:
        if isinstance(layer, nn.Linear):
            if fixed:
                nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
                nn.init.zeros_(layer.bias)
            else:
                nn.init.normal_(layer.weight, std=0.02)
                nn.init.normal_(layer.bias, mean=-0.1, std=0.02)
    return network


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--fixed", action="store_true", help="run the repaired version")
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    centres = torch.randn(6, 24)
    network = build(34, 40, args.fixed)
    optimizer = torch.optim.Adam(network.parameters(), lr=5e-4)
    for iteration in range(80):
        which = torch.randint(6, (64,))
        inputs = centres[which] + 0.3 * torch.randn(64, 24)
        loss = nn.functional.cross_entropy(network(inputs), which)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if iteration % 20 == 0:
            print(iteration, loss.item())


if __name__ == "__main__":
    main()
