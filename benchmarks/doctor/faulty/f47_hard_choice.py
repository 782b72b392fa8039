# A coarse decision in front of a fine one. After public reports: pytorch/pytorch#1339,
# Deep_Hierarchical_Classification#6.
import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F

parser = argparse.ArgumentParser()
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--fixed", action="store_true", help="run the repaired version")
args = parser.parse_args()
torch.manual_seed(args.seed)


class Hierarchy(nn.Module):
    def __init__(self, codes=12):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, codes))
        self.codebook = nn.Embedding(codes, 32)
        self.decoder = nn.Sequential(nn.Linear(32, 48), nn.ReLU(), nn.Linear(48, 10))

    def forward(self, x):
        scores = self.encoder(x)
        if args.fixed:
            chosen = F.gumbel_softmax(scores, tau=1.0, hard=True) @ self.codebook.weight
        else:
            chosen = self.codebook(scores.argmax(dim=-1))
        return self.decoder(chosen)


digits = load_digits()
x, y = torch.tensor(digits.data).float() / 16, torch.tensor(digits.target)
hierarchy = Hierarchy()
optimizer = torch.optim.Adam(hierarchy.parameters(), lr=3e-3)
for step in range(150):
    rows = torch.randint(len(x), (64,))
    logits = hierarchy(x[rows])
    loss = F.cross_entropy(logits, y[rows])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 30 == 0:
        print(step, f"{loss.item():.4f}")
