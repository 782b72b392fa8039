# A text classifier that drops words and features. After public reports: facebookresearch/DME#3, transformers#33844,
# torchtune#1803.
import argparse

import torch
import torch.nn.functional as F
from torch import nn


class MetaEmbedding(nn.Module):
    def __init__(self, dropout, fixed):
        super().__init__()
        self.dropout = dropout
        self.fixed = fixed
        self.one = nn.Embedding(50, 16)
        self.two = nn.Embedding(50, 16)
        self.lstm = nn.LSTM(32, 24, batch_first=True)
        self.classify = nn.Linear(24, 2)

    def forward(self, words):
        vectors = torch.cat([self.one(words), self.two(words)], -1)
        out, _ = self.lstm(vectors)
        if self.fixed:
            pooled = F.dropout(out.amax(1), p=self.dropout, training=self.training)
        else:
            pooled = F.dropout(out.amax(1), p=self.dropout)
        return self.classify(pooled)


def sentences(n):
    words = torch.randint(50, (n, 9))
    return words, ((words < 5).sum(1) > (words > 44).sum(1)).long()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--fixed", action="store_true", help="run the repaired version")
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    net = MetaEmbedding(0.5, args.fixed)
    adam = torch.optim.Adam(net.parameters(), lr=5e-3)
    held_out = sentences(200)
    for epoch in range(4):
        net.train()
        for _ in range(20):
            words, label = sentences(32)
            loss = F.cross_entropy(net(words), label)
            adam.zero_grad()
            loss.backward()
            adam.step()
        net.eval()
        with torch.no_grad():
            first, second = net(held_out[0]), net(held_out[0])
        accuracy = (first.argmax(1) == held_out[1]).float().mean().item()
        print(epoch, round(loss.item(), 4), accuracy, "difference of two runs", (first - second).abs().max().item())
