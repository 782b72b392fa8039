# A loop with Lightning's Fabric.
import argparse
import warnings

import torch
from lightning.fabric import Fabric
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

warnings.filterwarnings("ignore")


def housing(n, weights):
    x = torch.cat([torch.rand(n, 3) * 100, torch.randn(n, 5)], dim=1)
    scaled = (x - torch.tensor([50.0] * 3 + [0.0] * 5)) / torch.tensor([29.0] * 3 + [1.0] * 5)
    price = (torch.relu(scaled @ weights)).sum(dim=1) + 0.2 * torch.randn(n)
    return scaled, price


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    fabric = Fabric(accelerator="cpu", devices=1)
    fabric.seed_everything(args.seed, verbose=False)
    weights = torch.randn(8, 4) * 0.6
    x, y = housing(2000, weights)
    model = nn.Sequential(nn.Linear(8, 48), nn.ReLU(), nn.Linear(48, 48), nn.ReLU(), nn.Linear(48, 1), nn.Flatten(0))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=1e-3)
    model, optimizer = fabric.setup(model, optimizer)
    loader = fabric.setup_dataloaders(DataLoader(TensorDataset(x, y), batch_size=64, shuffle=True))
    for epoch in range(8):
        model.train()
        for inputs, targets in loader:
            loss = nn.functional.smooth_l1_loss(model(inputs), targets)
            optimizer.zero_grad()
            fabric.backward(loss)
            fabric.clip_gradients(model, optimizer, max_norm=5.0)
            optimizer.step()
        fabric.print(f"epoch {epoch} loss {loss.item():.4f}")
    model.eval()
    x, y = housing(800, weights)
    with torch.no_grad():
        error = (model(x) - y).pow(2).mean() / y.var()
    print(f"metric {1 - error.item():.4f}")


main()
