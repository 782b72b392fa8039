# Finds what does not belong: an autoencoder of normal measurements, judged by the error of what it gives back.
import sys

import torch
from torch import nn
from torch.utils.data import DataLoader


class AutoEncoder(nn.Module):
    def __init__(self, size=24, code=3):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(size, 32), nn.ReLU(), nn.Linear(32, code))
        self.decoder = nn.Sequential(nn.Linear(code, 32), nn.ReLU(), nn.Linear(32, size))

    def forward(self, x):
        return self.decoder(self.encoder(x))


class Detector:
    """Fits the autoencoder and scores new rows."""

    def __init__(self, epochs=15, lr=4e-3):
        self.model, self.epochs, self.lr = AutoEncoder(), epochs, lr

    def fit(self, rows):
        self.mean, self.std = rows.mean(dim=0), rows.std(dim=0) + 1e-6
        loader = DataLoader((rows - self.mean) / self.std, batch_size=50, shuffle=True)
        optimizer = torch.optim.NAdam(self.model.parameters(), lr=self.lr)
        for epoch in range(self.epochs):
            total = 0.0
            for batch in loader:
                loss = nn.functional.mse_loss(self.model(batch), batch)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                total += loss.item()
            if epoch % 3 == 0:
                print(f"epoch {epoch} loss {total / len(loader):.4f}")
        return self

    @torch.no_grad()
    def score(self, rows):
        rows = (rows - self.mean) / self.std
        return (self.model(rows) - rows).pow(2).mean(dim=1)


torch.manual_seed(int(sys.argv[-1]) if len(sys.argv) > 1 else 0)
loading = torch.randn(3, 24) * torch.rand(24) * 20
sensors = lambda n: torch.tanh(torch.randn(n, 3)) @ loading + 100 + 0.3 * torch.randn(n, 24)  # noqa: E731
detector = Detector().fit(sensors(1000))
usual, strange = sensors(400), sensors(400)
strange = strange[:, torch.randperm(24)] * 0.2 + sensors(400) * 0.8
low, high = detector.score(usual), detector.score(strange)
print(f"metric {(high[:, None] > low[None, :]).float().mean().item():.4f}")
