# A convolutional autoencoder that takes the noise off waves; the score is the share of the noise that is gone.
import sys

import torch
from torch import nn


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 12, 3, stride=2, padding=1)
        self.conv2 = nn.Conv2d(12, 24, 3, stride=2, padding=1)

    def forward(self, x):
        return torch.relu(self.conv2(torch.relu(self.conv1(x))))


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.deconv1 = nn.ConvTranspose2d(24, 12, 4, stride=2, padding=1)
        self.deconv2 = nn.ConvTranspose2d(12, 1, 4, stride=2, padding=1)

    def forward(self, z):
        return self.deconv2(torch.relu(self.deconv1(z)))


def clean_pictures(n):
    grid = torch.arange(16.0) / 16
    a, b, phase = torch.rand(3, n, 1, 1) * 6
    return torch.sin(a * grid.view(1, -1, 1) + b * grid.view(1, 1, -1) + phase).unsqueeze(1)


def train(seed):
    torch.manual_seed(seed)
    encoder, decoder = Encoder(), Decoder()
    parameters = list(encoder.parameters()) + list(decoder.parameters())
    optimizer = torch.optim.Adam(parameters, lr=3e-3)
    criterion = nn.MSELoss()
    for step in range(220):
        target = clean_pictures(24)
        noisy = target + 0.5 * torch.randn_like(target)
        restored = decoder(encoder(noisy))
        loss = criterion(restored, target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 55 == 0:
            print(f"step {step} loss {loss.item():.4f}")
    with torch.no_grad():
        target = clean_pictures(200)
        noisy = target + 0.5 * torch.randn_like(target)
        error = (decoder(encoder(noisy)) - target).pow(2).mean()
    return 1 - error.item() / 0.25


print(f"metric {train(int(sys.argv[-1]) if len(sys.argv) > 1 else 0):.4f}")
