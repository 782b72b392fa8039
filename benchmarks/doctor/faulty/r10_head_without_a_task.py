# Pretrains with two tasks, one of which was forgotten. After a public report: KERMT#23.
import argparse

import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--fixed", action="store_true", help="run the repaired version")
args = parser.parse_args()
torch.manual_seed(args.seed)


class Molecules(nn.Module):
    def __init__(self):
        super().__init__()
        self.atoms = nn.Embedding(12, 24)
        self.mix = nn.Sequential(nn.Linear(24, 48), nn.ReLU(), nn.Linear(48, 24))
        self.motif = nn.Linear(24, 6)
        self.reconstruct = nn.Sequential(nn.Linear(24, 48), nn.ReLU(), nn.Linear(48, 12))

    def forward(self, ids):
        hidden = self.mix(self.atoms(ids))
        outputs = {"motif": self.motif(hidden.mean(1))}
        if args.fixed:
            outputs["counts"] = self.reconstruct(hidden.mean(1))
        return outputs


molecules = Molecules()
optimizer = torch.optim.Adam(molecules.parameters(), lr=3e-3)
for step in range(80):
    ids = torch.randint(12, (32, 10))
    counts = nn.functional.one_hot(ids, 12).float().mean(1)
    outputs = molecules(ids)
    loss = nn.functional.cross_entropy(outputs["motif"], ids.sum(1) % 6)
    if "counts" in outputs:
        loss = loss + nn.functional.mse_loss(outputs["counts"], counts)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 16 == 0:
        print(step, loss.item())
