# Says which patients need care. After a public report: StackOverflow 33969059.
import argparse

import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--fixed", action="store_true", help="run the repaired version")
args = parser.parse_args()
torch.manual_seed(args.seed)

records = torch.randn(500, 8)
care = ((records[:, :2].sum(1) > 0.3).float()).unsqueeze(1)
scorer = nn.Sequential(nn.Linear(8, 24), nn.ReLU(), nn.Linear(24, 1), nn.Sigmoid() if args.fixed else nn.Softmax(dim=1))
optimizer = torch.optim.Adam(scorer.parameters(), lr=1e-2)
for epoch in range(6):
    for rows in torch.randperm(500).split(50):
        probability = scorer(records[rows])
        loss = nn.functional.binary_cross_entropy(probability, care[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(epoch, loss.item())
