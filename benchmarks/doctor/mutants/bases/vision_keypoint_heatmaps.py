# Finds two points in a picture through heat maps, whose soft centres are compared with the truth.
import sys

import torch
import torch.nn.functional as F
from torch import nn

N = 14


def blobs(n):
    points = torch.rand(n, 2, 2) * (N - 5) + 2
    grid = torch.arange(N).float()
    dy = (grid.view(1, 1, -1, 1) - points[:, :, 1].view(n, 2, 1, 1)) ** 2
    dx = (grid.view(1, 1, 1, -1) - points[:, :, 0].view(n, 2, 1, 1)) ** 2
    spots = torch.exp(-(dx + dy) / 2)
    image = spots[:, 0] - spots[:, 1] + 0.1 * torch.randn(n, N, N)
    return image.unsqueeze(1), points / N


class Pose(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, 5, padding=2)
        self.conv2 = nn.Conv2d(16, 16, 3, padding=1)
        self.heat = nn.Conv2d(16, 2, 1)
        self.register_buffer("grid", torch.arange(N).float() / N)

    def forward(self, x):
        x = F.relu(self.conv1(x))
        x = F.relu(self.conv2(x))
        maps = F.softmax(self.heat(x).view(len(x), 2, N * N), dim=2).view(len(x), 2, N, N)
        px = (maps.sum(dim=2) * self.grid).sum(dim=2)
        py = (maps.sum(dim=3) * self.grid).sum(dim=2)
        return torch.stack([px, py], dim=2)


torch.manual_seed(int(sys.argv[-1]) if len(sys.argv) > 1 else 0)
pose = Pose()
optim = torch.optim.Adam(pose.parameters(), lr=5e-3, betas=(0.9, 0.99))
history = []
for it in range(160):
    image, points = blobs(24)
    loss = F.l1_loss(pose(image), points)
    optim.zero_grad()
    loss.backward()
    optim.step()
    history.append(loss.item())
print("loss at first and at last", history[0], history[-1])
image, points = blobs(300)
with torch.no_grad():
    distance = (pose(image) - points).norm(dim=2).mean().item()
print(f"metric {1 - distance / 0.36:.4f}")
