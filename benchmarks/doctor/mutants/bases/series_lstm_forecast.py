# Forecasts the next value of noisy oscillations with an LSTM; windows come from a loader.
import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Forecaster(nn.Module):
    def __init__(self, hidden=24):
        super().__init__()
        self.rnn = nn.LSTM(1, hidden, batch_first=True)
        self.head = nn.Linear(hidden, 1)

    def forward(self, window):
        states, _ = self.rnn(window)
        return self.head(states[:, -1]).squeeze(-1)


def make_series(length):
    t = torch.arange(float(length))
    return torch.sin(0.35 * t) + 0.5 * torch.sin(0.11 * t + 1) + 0.1 * torch.randn(length)


def windows(series, size=16):
    unfolded = series.unfold(0, size + 1, 1)
    return unfolded[:, :-1].unsqueeze(-1), unfolded[:, -1]


def main():
    torch.manual_seed(int(sys.argv[-1]) if len(sys.argv) > 1 else 0)
    series = make_series(1400)
    mean, std = series[:1100].mean(), series[:1100].std()
    series = (series - mean) / std
    train_x, train_y = windows(series[:1100])
    test_x, test_y = windows(series[1100:])
    loader = DataLoader(TensorDataset(train_x, train_y), batch_size=64, shuffle=True, drop_last=True)
    model = Forecaster()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    criterion = nn.MSELoss()
    for epoch in range(7):
        model.train()
        for window, value in loader:
            optimizer.zero_grad()
            prediction = model(window)
            loss = criterion(prediction, value)
            loss.backward()
            optimizer.step()
        print(f"epoch {epoch}: mse {loss.item():.4f}")
    model.eval()
    with torch.no_grad():
        residual = (model(test_x) - test_y).pow(2).mean()
    print(f"metric {1 - (residual / test_y.var()).item():.4f}")


if __name__ == "__main__":
    main()
