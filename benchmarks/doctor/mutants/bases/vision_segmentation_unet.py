# Segments discs in noisy pictures with a U-Net of two levels; the loss is cross entropy and Dice.
import sys

import torch
import torch.nn.functional as F
from torch import nn


def conv(inside, outside):
    return nn.Sequential(nn.Conv2d(inside, outside, 3, padding=1), nn.GroupNorm(2, outside), nn.ReLU())


class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.down1 = conv(1, 8)
        self.down2 = conv(8, 16)
        self.up = nn.ConvTranspose2d(16, 8, 2, stride=2)
        self.merge = conv(16, 8)
        self.out = nn.Conv2d(8, 1, 1)

    def forward(self, x):
        first = self.down1(x)
        second = self.down2(F.max_pool2d(first, 2))
        joined = torch.cat([first, self.up(second)], dim=1)
        return self.out(self.merge(joined))


def scenes(n, size=16):
    grid = torch.arange(size).float()
    cx, cy = torch.rand(2, n, 1, 1) * 8 + 4
    radius = torch.rand(n, 1, 1) * 2 + 2.5
    mask = ((grid.view(1, -1, 1) - cy) ** 2 + (grid.view(1, 1, -1) - cx) ** 2 < radius**2).float()
    image = mask * (0.5 + torch.rand(n, 1, 1)) + 0.35 * torch.randn(n, size, size)
    return image.unsqueeze(1), mask.unsqueeze(1)


def dice_loss(logits, mask):
    p = torch.sigmoid(logits)
    overlap = 2 * (p * mask).sum(dim=(1, 2, 3))
    return 1 - ((overlap + 1) / (p.sum(dim=(1, 2, 3)) + mask.sum(dim=(1, 2, 3)) + 1)).mean()


def main(seed):
    torch.manual_seed(seed)
    model = UNet()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=1e-2)
    for step in range(120):
        image, mask = scenes(16)
        logits = model(image)
        loss = F.binary_cross_entropy_with_logits(logits, mask) + 0.5 * dice_loss(logits, mask)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 40 == 0:
            print(f"{step} {loss.item():.4f}")
    with torch.no_grad():
        image, mask = scenes(100)
        guess = (model(image) > 0).float()
        union = ((guess + mask) > 0).float().sum()
        print(f"metric {((guess * mask).sum() / union).item():.4f}")


main(int(sys.argv[-1]) if len(sys.argv) > 1 else 0)
