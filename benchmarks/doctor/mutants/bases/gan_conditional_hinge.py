# A conditional network with a hinge loss: for each class the generator has to give its own curve.
import sys

import torch
import torch.nn.functional as F
from torch import nn


class ConditionalGenerator(nn.Module):
    def __init__(self, classes=3, noise=4, points=8):
        super().__init__()
        self.label = nn.Embedding(classes, 8)
        self.fc1 = nn.Linear(noise + 8, 48)
        self.norm = nn.BatchNorm1d(48)
        self.fc2 = nn.Linear(48, points)

    def forward(self, z, kind):
        h = torch.cat([z, self.label(kind)], dim=1)
        return self.fc2(F.relu(self.norm(self.fc1(h))))


class ConditionalDiscriminator(nn.Module):
    def __init__(self, classes=3, points=8):
        super().__init__()
        self.label = nn.Embedding(classes, 48)
        self.fc1 = nn.Linear(points, 48)
        self.fc2 = nn.Linear(48, 48)
        self.out = nn.Linear(48, 1)

    def forward(self, curve, kind):
        h = F.leaky_relu(self.fc2(F.leaky_relu(self.fc1(curve), 0.2)), 0.2)
        return self.out(h).squeeze(1) + (h * self.label(kind)).sum(dim=1) / 7


def curves(n):
    kind = torch.randint(3, (n,))
    t = torch.linspace(0, 3.14, 8)
    wave = torch.sin((kind.float()[:, None] + 1) * t + 0.3 * torch.randn(n, 1))
    return wave + 0.05 * torch.randn(n, 8), kind


class Game:
    def __init__(self):
        self.G, self.D = ConditionalGenerator(), ConditionalDiscriminator()
        self.g_opt = torch.optim.Adam(self.G.parameters(), lr=2e-3, betas=(0.5, 0.9))
        self.d_opt = torch.optim.Adam(self.D.parameters(), lr=4e-3, betas=(0.5, 0.9))

    def discriminator_step(self, real, kind):
        fake = self.G(torch.randn(len(real), 4), kind).detach()
        loss = F.relu(1 - self.D(real, kind)).mean() + F.relu(1 + self.D(fake, kind)).mean()
        self.d_opt.zero_grad()
        loss.backward()
        self.d_opt.step()
        return loss.item()

    def generator_step(self, n):
        kind = torch.randint(3, (n,))
        loss = -self.D(self.G(torch.randn(n, 4), kind), kind).mean()
        self.g_opt.zero_grad()
        loss.backward()
        self.g_opt.step()
        return loss.item()


torch.manual_seed(int(sys.argv[-1]) if len(sys.argv) > 1 else 0)
game = Game()
for step in range(300):
    real, kind = curves(64)
    d_loss = game.discriminator_step(real, kind)
    g_loss = game.generator_step(64)
    if step % 60 == 0:
        print(f"{step} d {d_loss:.3f} g {g_loss:.3f}")
game.G.eval()
error = 0.0
with torch.no_grad():
    for k in range(3):
        made = game.G(torch.randn(200, 4), torch.full((200,), k)).mean(dim=0)
        truth = torch.sin((k + 1) * torch.linspace(0, 3.14, 8)) * 0.956
        error += (made - truth).pow(2).mean().item() / 3
print(f"metric {1 - error / 0.45:.4f}")
