# Prints the mean loss of an epoch. After public reports: google/brax#152, labelmodels#4, tntorch#19.
import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def label_model():
    return nn.Sequential(nn.Linear(30, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 3))


def run_epoch(model, loader, optimizer, fixed):
    total_loss = 0.0
    for votes, truth in loader:
        loss = nn.functional.cross_entropy(model(votes), truth)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if fixed:
            total_loss += loss.item()
        else:
            total_loss += loss
    return total_loss / len(loader)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--fixed", action="store_true", help="run the repaired version")
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    truth = torch.randint(3, (2000,))
    votes = (torch.rand(2000, 30) < 0.3 + 0.2 * (truth[:, None] == torch.arange(30) % 3)).float()
    loader = DataLoader(TensorDataset(votes, truth), batch_size=32, shuffle=True)
    model = label_model()
    optimizer = torch.optim.Adam(model.parameters())
    for epoch in range(2):
        mean = run_epoch(model, loader, optimizer, args.fixed)
        print(f"epoch {epoch}: {float(mean):.4f}")


if __name__ == "__main__":
    main()
