# Predicts clicks from categories and numbers: embeddings, crossed features and a small network beside.
import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class ClickModel(nn.Module):
    def __init__(self, sizes, numbers, dim=8):
        super().__init__()
        self.embeddings = nn.ModuleList([nn.Embedding(size, dim) for size in sizes])
        self.linear = nn.ModuleList([nn.Embedding(size, 1) for size in sizes])
        self.deep = nn.Sequential(nn.Linear(dim * len(sizes) + numbers, 32), nn.ReLU(), nn.Linear(32, 1))
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, categories, numbers):
        vectors = torch.stack([table(categories[:, i]) for i, table in enumerate(self.embeddings)], dim=1)
        crossed = 0.5 * (vectors.sum(dim=1).pow(2) - vectors.pow(2).sum(dim=1)).sum(dim=1)
        wide = torch.stack([table(categories[:, i]).squeeze(1) for i, table in enumerate(self.linear)], dim=1).sum(
            dim=1
        )
        deep = self.deep(torch.cat([vectors.flatten(1), numbers], dim=1)).squeeze(1)
        return crossed + wide + deep + self.bias


def table(n, sizes, effect, cross):
    categories = torch.stack([torch.randint(size, (n,)) for size in sizes], dim=1)
    numbers = torch.stack([torch.rand(n) * 50, torch.randn(n) * 3 + 20], dim=1)
    score = sum(effect[i][categories[:, i]] for i in range(len(sizes))) + cross[categories[:, 0], categories[:, 1]]
    score = score + (numbers[:, 0] - 25) / 15 - 0.5
    clicked = (torch.rand(n) < torch.sigmoid(1.5 * score)).float()
    return categories, numbers, clicked


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=0)
    torch.manual_seed(parser.parse_args().seed)
    sizes = [12, 8, 5]
    effect, cross = [torch.randn(size) * 0.5 for size in sizes], torch.randn(12, 8)
    train, test = table(3000, sizes, effect, cross), table(1000, sizes, effect, cross)
    mean, std = train[1].mean(dim=0), train[1].std(dim=0)
    train_numbers, test_numbers = (train[1] - mean) / std, (test[1] - mean) / std
    loader = DataLoader(TensorDataset(train[0], train_numbers, train[2]), batch_size=64, shuffle=True)
    model = ClickModel(sizes, 2)
    criterion = nn.BCEWithLogitsLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3, weight_decay=1e-5)
    for epoch in range(4):
        for categories, numbers, clicked in loader:
            optimizer.zero_grad()
            loss = criterion(model(categories, numbers), clicked)
            loss.backward()
            optimizer.step()
        print(f"epoch {epoch} loss {loss.item():.4f}")
    with torch.no_grad():
        scores = model(test[0], test_numbers)
    clicked = test[2] == 1
    print(f"metric {(scores[clicked][:, None] > scores[~clicked][None, :]).float().mean().item():.4f}")


if __name__ == "__main__":
    main()
