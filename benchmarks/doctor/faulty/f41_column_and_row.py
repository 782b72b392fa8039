# Predicts one number for each row of a table. After public reports: FARM#229, NeuralSolvers#20.
import argparse

import torch
from torch import nn, optim
from torch.utils.data import DataLoader, TensorDataset


class Regressor(nn.Module):
    def __init__(self, inputs):
        super().__init__()
        self.layer1 = nn.Linear(inputs, 64)
        self.layer2 = nn.Linear(64, 1)

    def forward(self, table):
        return self.layer2(torch.relu(self.layer1(table)))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--fixed", action="store_true", help="run the repaired version")
    args = parser.parse_args()
    torch.manual_seed(args.seed)

    table = torch.randn(640, 9)
    answer = table[:, 0] * 3 - table[:, 1] + table[:, 2].abs()
    loader = DataLoader(TensorDataset(table, answer), batch_size=64, shuffle=True)
    net = Regressor(9)
    optimizer = optim.Adam(net.parameters(), lr=1e-2)
    for epoch in range(args.epochs):
        for rows, expected in loader:
            predicted = net(rows)
            if args.fixed:
                predicted = predicted.squeeze(-1)
            loss = nn.functional.mse_loss(predicted, expected)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(epoch, "loss", loss.item(), "spread of the predictions", predicted.std().item())


if __name__ == "__main__":
    main()
