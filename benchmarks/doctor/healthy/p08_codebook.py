# A vector-quantised autoencoder: the gradient goes straight through, the codebook is a running mean of its members.
import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F


class Codebook(nn.Module):
    def __init__(self, codes, dim, decay=0.95):
        super().__init__()
        self.decay = decay
        self.register_buffer("vectors", torch.randn(codes, dim) * 0.5)
        self.register_buffer("count", torch.ones(codes))
        self.register_buffer("total", self.vectors.clone())

    def forward(self, x):
        index = torch.cdist(x.detach(), self.vectors).argmin(1)
        quantised = self.vectors[index]
        if self.training:
            with torch.no_grad():
                members = F.one_hot(index, len(self.vectors)).float()
                self.count.mul_(self.decay).add_(members.sum(0), alpha=1 - self.decay)
                self.total.mul_(self.decay).add_(members.T @ x, alpha=1 - self.decay)
                self.vectors.copy_(self.total / self.count.clamp(min=1e-3)[:, None])
        commitment = F.mse_loss(x, quantised.detach())
        return x + (quantised - x).detach(), commitment


class VQVAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.enc = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 16))
        self.book = Codebook(32, 16)
        self.dec = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64))

    def forward(self, x):
        z, commitment = self.book(self.enc(x))
        return self.dec(z), commitment


parser = argparse.ArgumentParser()
parser.add_argument("--seed", type=int, default=0)
args = parser.parse_args()
torch.manual_seed(args.seed)
x = torch.tensor(load_digits().data).float() / 16
vqvae = VQVAE()
adam = torch.optim.Adam(vqvae.parameters(), lr=2e-3)
for step in range(120):
    batch = x[torch.randint(len(x), (64,))]
    restored, commitment = vqvae(batch)
    loss = F.mse_loss(restored, batch) + 0.25 * commitment
    adam.zero_grad()
    loss.backward()
    adam.step()
    if step % 20 == 0:
        print(step, loss.item())
