# A variational autoencoder of handwritten digits; the score is how much of the pictures it gives back.
import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

parser = argparse.ArgumentParser()
parser.add_argument("--seed", type=int, default=0)
args = parser.parse_args()
torch.manual_seed(args.seed)
pictures = torch.tensor(load_digits().data, dtype=torch.float32) / 16
pictures = pictures[torch.randperm(len(pictures))]
train_loader = DataLoader(pictures[:1500], batch_size=50, shuffle=True)
test = pictures[1500:]


class VAE(nn.Module):
    def __init__(self, latent=8):
        super().__init__()
        self.fc1 = nn.Linear(64, 96)
        self.fc_mu = nn.Linear(96, latent)
        self.fc_logvar = nn.Linear(96, latent)
        self.fc3 = nn.Linear(latent, 96)
        self.fc4 = nn.Linear(96, 64)

    def encode(self, x):
        h = F.relu(self.fc1(x))
        return self.fc_mu(h), self.fc_logvar(h)

    def reparameterize(self, mu, logvar):
        std = torch.exp(0.5 * logvar)
        eps = torch.randn_like(std)
        return mu + eps * std

    def decode(self, z):
        return torch.sigmoid(self.fc4(F.relu(self.fc3(z))))

    def forward(self, x):
        mu, logvar = self.encode(x)
        return self.decode(self.reparameterize(mu, logvar)), mu, logvar


def loss_function(recon_x, x, mu, logvar):
    BCE = F.binary_cross_entropy(recon_x, x, reduction="sum") / len(x)
    KLD = -0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp()) / len(x)
    return BCE + 0.3 * KLD


model = VAE()
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
for epoch in range(1, 9):
    model.train()
    train_loss = 0
    for data in train_loader:
        optimizer.zero_grad()
        recon_batch, mu, logvar = model(data)
        loss = loss_function(recon_batch, data, mu, logvar)
        loss.backward()
        train_loss += loss.item()
        optimizer.step()
    print(f"====> Epoch: {epoch} Average loss: {train_loss / len(train_loader):.4f}")
model.eval()
with torch.no_grad():
    mu, _ = model.encode(test)
    error = (model.decode(mu) - test).pow(2).mean() / test.var(dim=0).mean()
print(f"metric {1 - error.item():.4f}")
