# Says which of five patterns are in a picture, each of them or none: a sigmoid per label.
import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Patterns(Dataset):
    def __init__(self, count, generator, templates):
        self.present = (torch.rand(count, 5, generator=generator) < 0.3).float()
        noise = torch.randn(count, 8, 8, generator=generator)
        self.pictures = torch.einsum("nk,kij->nij", self.present, templates) + 0.6 * noise

    def __len__(self):
        return len(self.present)

    def __getitem__(self, index):
        return self.pictures[index], self.present[index]


def build():
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(64, 64),
        nn.LeakyReLU(0.1),
        nn.Dropout(0.1),
        nn.Linear(64, 32),
        nn.LeakyReLU(0.1),
        nn.Linear(32, 5),
    )


def evaluate(model, loader):
    model.eval()
    hits, total = 0.0, 0
    with torch.no_grad():
        for pictures, present in loader:
            guess = (torch.sigmoid(model(pictures)) > 0.5).float()
            hits += 2 * (guess * present).sum().item()
            total += (guess.sum() + present.sum()).item()
    return hits / max(total, 1)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    generator = torch.Generator().manual_seed(args.seed)
    templates = torch.randn(5, 8, 8, generator=generator).mul(0.8)
    train_loader = DataLoader(Patterns(1500, generator, templates), batch_size=50, shuffle=True)
    test_loader = DataLoader(Patterns(400, generator, templates), batch_size=100)
    model = build()
    criterion = nn.BCEWithLogitsLoss(pos_weight=torch.full((5,), 1.5))
    optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3)
    for epoch in range(6):
        model.train()
        running = 0.0
        for pictures, present in train_loader:
            optimizer.zero_grad()
            loss = criterion(model(pictures), present)
            loss.backward()
            optimizer.step()
            running += loss.item()
        print(f"epoch {epoch} loss {running / len(train_loader):.4f}")
    print(f"metric {evaluate(model, test_loader):.4f}")


if __name__ == "__main__":
    main()
