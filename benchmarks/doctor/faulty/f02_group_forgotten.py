# A tagger with a learning rate of its own for each part. After public reports: zjunlp/HVPNeT#5, arcface-pytorch#20.
import argparse

import torch
import torch.nn.functional as F
from torch import nn


class Tagger(nn.Module):
    def __init__(self, vocab=60, tags=5):
        super().__init__()
        self.embed = nn.Embedding(vocab, 24)
        self.encoder = nn.GRU(24, 24, batch_first=True, bidirectional=True)
        self.emission = nn.Linear(48, tags)
        self.crf = Transitions(tags)

    def forward(self, words):
        hidden, _ = self.encoder(self.embed(words))
        return self.crf(self.emission(hidden))


class Transitions(nn.Module):
    """Scores of following tags, added to the emissions of both neighbours."""

    def __init__(self, tags):
        super().__init__()
        self.score = nn.Parameter(torch.randn(tags, tags) * 0.5)
        self.begin = nn.Parameter(torch.zeros(tags))

    def forward(self, emissions):
        before = emissions[:, :-1].softmax(-1) @ self.score
        first = emissions[:, :1] + self.begin
        return torch.cat([first, emissions[:, 1:] + before], 1)


def parameter_groups(tagger, fixed):
    slow = [p for name, p in tagger.named_parameters() if name.startswith(("embed", "encoder"))]
    groups = [{"params": slow, "lr": 1e-3, "weight_decay": 1e-2}]
    groups.append({"params": tagger.emission.parameters(), "lr": 5e-3})
    fast = {"params": tagger.crf.parameters(), "lr": 2e-2}
    if fixed:
        groups.append(fast)
    return groups


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--fixed", action="store_true", help="run the repaired version")
    args = parser.parse_args()
    torch.manual_seed(args.seed)

    words = torch.randint(60, (512, 12))
    gold = (words % 5 + torch.roll(words, 1, 1) % 2) % 5
    tagger = Tagger()
    optim = torch.optim.AdamW(parameter_groups(tagger, args.fixed))
    for it in range(80):
        rows = torch.randint(512, (32,))
        logits = tagger(words[rows])
        loss = F.cross_entropy(logits.flatten(0, 1), gold[rows].flatten())
        optim.zero_grad()
        loss.backward()
        optim.step()
        if it % 20 == 0:
            print(it, round(loss.item(), 4))
    print("transitions", tagger.crf.score.detach().flatten()[:5].tolist())


if __name__ == "__main__":
    main()
