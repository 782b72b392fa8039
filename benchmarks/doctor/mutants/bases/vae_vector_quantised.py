# An autoencoder with a codebook: the gradient passes the nearest code straight through.
import sys

import torch
import torch.nn as nn
import torch.nn.functional as F


class Quantizer(nn.Module):
    def __init__(self, codes=32, dim=8, beta=0.25):
        super().__init__()
        self.codebook = nn.Embedding(codes, dim)
        nn.init.uniform_(self.codebook.weight, -0.5, 0.5)
        self.beta = beta

    def forward(self, z):
        distance = torch.cdist(z, self.codebook.weight)
        index = distance.argmin(dim=1)
        q = self.codebook(index)
        loss = F.mse_loss(q, z.detach()) + self.beta * F.mse_loss(z, q.detach())
        q = z + (q - z).detach()
        return q, loss, index


class VQVAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(16, 48), nn.ReLU(), nn.Linear(48, 16))
        self.quantizer = Quantizer()
        self.decoder = nn.Sequential(nn.Linear(16, 48), nn.ReLU(), nn.Linear(48, 16))

    def forward(self, x):
        z = self.encoder(x).view(-1, 8)
        q, vq_loss, index = self.quantizer(z)
        return self.decoder(q.view(len(x), 16)), vq_loss, index


def signals(n):
    t = torch.linspace(0, 1, 16)
    kind = torch.randint(2, (n, 1)).float()
    frequency = 1 + torch.randint(4, (n, 1)).float()
    wave = torch.sin(6.283 * frequency * t)
    return kind * wave + (1 - kind) * wave.sign() + 0.05 * torch.randn(n, 16)


torch.manual_seed(int(sys.argv[-1]) if len(sys.argv) > 1 else 0)
model = VQVAE()
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
used = set()
for step in range(320):
    batch = signals(64)
    restored, vq_loss, index = model(batch)
    recon_loss = F.mse_loss(restored, batch)
    loss = recon_loss + vq_loss
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    used.update(index.tolist())
    if step % 80 == 0:
        print(f"step {step} reconstruction {recon_loss.item():.4f} codes used {len(used)}")
with torch.no_grad():
    batch = signals(400)
    restored, _, _ = model(batch)
    error = (restored - batch).pow(2).mean() / batch.var()
print(f"metric {1 - error.item():.4f}")
