# Segments one picture at a time, with GroupNorm, losses at two depths and a soft Dice score on probabilities.
import argparse

import torch
import torch.nn.functional as F
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--seed", type=int, default=0)
args = parser.parse_args()
torch.manual_seed(args.seed)


def double(inside, outside):
    return nn.Sequential(
        nn.Conv2d(inside, outside, 3, padding=1),
        nn.GroupNorm(4, outside),
        nn.ReLU(inplace=True),
        nn.Conv2d(outside, outside, 3, padding=1),
        nn.GroupNorm(4, outside),
        nn.ReLU(inplace=True),
    )


class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.down1, self.down2, self.up1 = double(1, 8), double(8, 16), double(24, 8)
        self.deep, self.full = nn.Conv2d(16, 1, 1), nn.Conv2d(8, 1, 1)

    def forward(self, x):
        a = self.down1(x)
        b = self.down2(F.max_pool2d(a, 2))
        c = self.up1(torch.cat([a, F.interpolate(b, scale_factor=2)], 1))
        return torch.sigmoid(self.full(c)), torch.sigmoid(self.deep(b))


def dice_loss(probability, mask):
    overlap = (probability * mask).sum((1, 2, 3))
    return (1 - (2 * overlap + 1) / (probability.sum((1, 2, 3)) + mask.sum((1, 2, 3)) + 1)).mean()


unet = UNet()
optimizer = torch.optim.Adam(unet.parameters(), lr=2e-3)
for step in range(80):
    mask = torch.zeros(1, 1, 24, 24)
    row, col = torch.randint(2, 14, (2,)).tolist()
    mask[..., row : row + 8, col : col + 8] = 1
    picture = mask + 0.4 * torch.randn_like(mask)
    full, deep = unet(picture)
    loss = dice_loss(full, mask) + 0.4 * dice_loss(deep, F.max_pool2d(mask, 2))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 16 == 0:
        print(step, loss.item())
