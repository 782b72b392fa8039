# Predicts links by attention over neighbours and inner products, with sampled pairs that are no links.
import argparse

import torch
from torch import nn
from torch.nn import functional as F


class GraphAttention(nn.Module):
    def __init__(self, inside, outside):
        super().__init__()
        self.value = nn.Linear(inside, outside)
        self.source = nn.Linear(outside, 1)
        self.target = nn.Linear(outside, 1)

    def forward(self, x, adjacency):
        h = self.value(x)
        scores = F.leaky_relu(self.source(h) + self.target(h).t(), 0.2)
        scores = scores.masked_fill(adjacency == 0, float("-inf"))
        return torch.softmax(scores, dim=1) @ h


class LinkModel(nn.Module):
    def __init__(self, inside):
        super().__init__()
        self.attention1 = GraphAttention(inside, 24)
        self.attention2 = GraphAttention(24, 16)

    def encode(self, x, adjacency):
        return self.attention2(F.elu(self.attention1(x, adjacency)), adjacency)

    def score(self, z, pairs):
        return (z[pairs[0]] * z[pairs[1]]).sum(dim=-1)


def world(n=150):
    position = torch.rand(n, 3)
    distance = torch.cdist(position, position)
    links = ((distance < 0.28) & ~torch.eye(n, dtype=torch.bool)).nonzero().t()
    links = links[:, links[0] < links[1]]
    features = torch.cat([position, 0.3 * torch.randn(n, 5)], dim=1) - 0.3
    return features, links[:, torch.randperm(links.shape[1])]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=0)
    torch.manual_seed(parser.parse_args().seed)
    features, links = world()
    known, hidden = links[:, : int(links.shape[1] * 0.8)], links[:, int(links.shape[1] * 0.8) :]
    adjacency = torch.eye(len(features))
    adjacency[known[0], known[1]] = adjacency[known[1], known[0]] = 1
    model = LinkModel(features.shape[1])
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    for epoch in range(160):
        z = model.encode(features, adjacency)
        wrong = torch.randint(len(features), known.shape)
        positive = model.score(z, known)
        negative = model.score(z, wrong)
        loss = F.binary_cross_entropy_with_logits(positive, torch.ones_like(positive))
        loss = loss + F.binary_cross_entropy_with_logits(negative, torch.zeros_like(negative))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if epoch % 40 == 0:
            print(f"{epoch}: {loss.item():.4f}")
    with torch.no_grad():
        z = model.encode(features, adjacency)
        true, false = model.score(z, hidden), model.score(z, torch.randint(len(features), (2, 500)))
    print(f"metric {(true[:, None] > false[None, :]).float().mean().item():.4f}")


main()
