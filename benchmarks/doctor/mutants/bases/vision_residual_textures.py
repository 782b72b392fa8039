# Tells apart stripes of four directions in noise, with residual blocks and a cosine schedule.
import sys

import torch
from torch import nn

seed = int(sys.argv[-1]) if len(sys.argv) > 1 else 0
torch.manual_seed(seed)


def stripes(n):
    label = torch.randint(4, (n,))
    angle = label * torch.pi / 4
    grid = torch.arange(12.0)
    u = grid.view(1, 12, 1) * angle.cos().view(-1, 1, 1) + grid.view(1, 1, 12) * angle.sin().view(-1, 1, 1)
    picture = torch.sin(1.3 * u + 6.28 * torch.rand(n, 1, 1)) + 0.8 * torch.randn(n, 12, 12)
    return picture.unsqueeze(1), label


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.conv1 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(width)

    def forward(self, x):
        h = torch.relu(self.norm1(self.conv1(x)))
        h = self.norm2(self.conv2(h))
        return torch.relu(x + h)


class ResNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(1, 12, 3, stride=2, padding=1)
        self.blocks = nn.ModuleList([Block(12) for _ in range(2)])
        self.head = nn.Linear(12, 4)

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(dim=(2, 3)))


net = ResNet()
opt = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=5e-4)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(opt, T_max=120)
for step in range(120):
    net.train()
    images, labels = stripes(48)
    loss = nn.functional.cross_entropy(net(images), labels, label_smoothing=0.05)
    opt.zero_grad()
    loss.backward()
    opt.step()
    schedule.step()
    if step % 30 == 0:
        print(step, round(loss.item(), 4), schedule.get_last_lr()[0])
net.eval()
images, labels = stripes(500)
with torch.no_grad():
    metric = (net(images).argmax(dim=1) == labels).float().mean()
print(f"metric {metric.item():.4f}")
