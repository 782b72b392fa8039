# Regression on a table: standardised by the training part, rate by plateau, stop when nothing improves.
import argparse
import copy

import torch
from sklearn.datasets import load_diabetes
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Regressor(nn.Module):
    def __init__(self, inputs):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(inputs, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 1)
        )

    def forward(self, x):
        return self.layers(x).squeeze(1)


def prepare():
    table, target = load_diabetes(return_X_y=True)
    table, target = torch.tensor(table).float(), torch.tensor(target).float()
    synthetic = torch.randn(900, table.shape[1])
    weights = torch.randn(table.shape[1])
    values = 150 + 60 * torch.tanh(synthetic @ weights / 2) + 8 * torch.randn(900)
    order = torch.randperm(900)
    x, y = synthetic[order] * table.std(dim=0) + table.mean(dim=0), values[order]
    return x[:600], y[:600], x[600:750], y[600:750], x[750:], y[750:]


def validate(model, x, y):
    model.eval()
    with torch.no_grad():
        return nn.functional.mse_loss(model(x), y).item()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    train_x, train_y, val_x, val_y, test_x, test_y = prepare()
    mean, std = train_x.mean(dim=0), train_x.std(dim=0)
    train_x, val_x, test_x = ((part - mean) / std for part in (train_x, val_x, test_x))
    y_mean, y_std = train_y.mean(), train_y.std()
    train_y, val_y, test_y = ((part - y_mean) / y_std for part in (train_y, val_y, test_y))
    loader = DataLoader(TensorDataset(train_x, train_y), batch_size=32, shuffle=True)
    model = Regressor(train_x.shape[1])
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, mode="min", factor=0.5, patience=2)
    best, best_state, waited = float("inf"), None, 0
    for epoch in range(20):
        model.train()
        for x, y in loader:
            loss = nn.functional.mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        val_loss = validate(model, val_x, val_y)
        scheduler.step(val_loss)
        if val_loss < best:
            best, best_state, waited = val_loss, copy.deepcopy(model.state_dict()), 0
        else:
            waited += 1
        if waited > 6:
            break
        print(f"epoch {epoch} validation {val_loss:.4f}")
    model.load_state_dict(best_state)
    print(f"metric {1 - validate(model, test_x, test_y) / test_y.var().item():.4f}")


if __name__ == "__main__":
    main()
