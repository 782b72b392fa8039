# A residual network. After public reports: YOLOv4-pytorch#247, imgclsmob#13.
import argparse

import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--fixed", action="store_true", help="run the repaired version")
args = parser.parse_args()
torch.manual_seed(args.seed)


class Unit(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.activ = nn.ReLU()

    def forward(self, x):
        residual = x
        out = self.activ(self.bn1(self.conv1(x)))
        out = self.activ(self.conv2(out))
        if args.fixed:
            out = out + residual
        else:
            out += residual
        return out


class ResNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 12, 3, padding=1)
        self.unit1 = Unit(12)
        self.unit2 = Unit(12)
        self.out = nn.Linear(12, 4)

    def forward(self, x):
        x = self.unit2(self.unit1(self.stem(x)))
        return self.out(x.mean((2, 3)))


resnet = ResNet()
optimizer = torch.optim.SGD(resnet.parameters(), lr=0.05)
for step in range(30):
    kind = torch.randint(4, (16,))
    pictures = torch.randn(16, 3, 8, 8) + kind.view(-1, 1, 1, 1) * 0.5
    loss = nn.functional.cross_entropy(resnet(pictures), kind)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 10 == 0:
        print(step, loss.item())
