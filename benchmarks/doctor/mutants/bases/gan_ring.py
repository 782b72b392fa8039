# A plain adversarial network whose generator learns points on a ring.
import sys

import torch
import torch.nn as nn

torch.manual_seed(int(sys.argv[-1]) if len(sys.argv) > 1 else 0)
latent_dim, batch_size = 4, 96


def real_points(n):
    angle = torch.rand(n) * 6.2832
    return torch.stack([angle.cos(), angle.sin()], dim=1) * 2 + 0.1 * torch.randn(n, 2) + 3


class Generator(nn.Module):
    def __init__(self):
        super().__init__()
        self.model = nn.Sequential(nn.Linear(latent_dim, 48), nn.ReLU(), nn.Linear(48, 48), nn.ReLU(), nn.Linear(48, 2))

    def forward(self, z):
        return self.model(z)


class Discriminator(nn.Module):
    def __init__(self):
        super().__init__()
        self.model = nn.Sequential(
            nn.Linear(2, 48), nn.LeakyReLU(0.2), nn.Linear(48, 48), nn.LeakyReLU(0.2), nn.Linear(48, 1)
        )

    def forward(self, points):
        return self.model(points)


generator, discriminator = Generator(), Discriminator()
adversarial_loss = nn.BCEWithLogitsLoss()
optimizer_G = torch.optim.Adam(generator.parameters(), lr=2e-3, betas=(0.5, 0.99))
optimizer_D = torch.optim.Adam(discriminator.parameters(), lr=2e-3, betas=(0.5, 0.99))
valid, fake = torch.ones(batch_size, 1), torch.zeros(batch_size, 1)
for step in range(350):
    optimizer_D.zero_grad()
    real = real_points(batch_size)
    z = torch.randn(batch_size, latent_dim)
    gen_points = generator(z)
    real_loss = adversarial_loss(discriminator(real), valid)
    fake_loss = adversarial_loss(discriminator(gen_points.detach()), fake)
    d_loss = (real_loss + fake_loss) / 2
    d_loss.backward()
    optimizer_D.step()

    optimizer_G.zero_grad()
    g_loss = adversarial_loss(discriminator(gen_points), valid)
    g_loss.backward()
    optimizer_G.step()
    if step % 70 == 0:
        print(f"[{step}] D {d_loss.item():.3f} G {g_loss.item():.3f}")
with torch.no_grad():
    points = generator(torch.randn(800, latent_dim))
    truth = real_points(800)
    cross = torch.cdist(points, truth).mean()
    energy = 2 * cross - torch.cdist(points, points).mean() - torch.cdist(truth, truth).mean()
print(f"metric {-energy.item():.4f}")
