# A detector's settings for eight devices, on one with a small batch. After public reports: mmdetection#351, #3240.
import argparse

import torch
from torch import nn

config = {
    "optimizer": {"lr": 0.4, "momentum": 0.9, "weight_decay": 1e-4},
    "batch": 2,
    "iterations": 60,
}


class Backbone(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 16, 3, stride=2, padding=1)
        self.conv2 = nn.Conv2d(16, 32, 3, stride=2, padding=1)
        self.conv3 = nn.Conv2d(32, 32, 3, padding=1)

    def forward(self, x):
        for conv in (self.conv1, self.conv2, self.conv3):
            x = nn.functional.relu(conv(x))
        return x


class OneStage(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = Backbone()
        self.cls = nn.Conv2d(32, 3, 1)
        self.reg = nn.Conv2d(32, 4, 1)

    def forward(self, x):
        maps = self.backbone(x)
        return self.cls(maps).mean((2, 3)), self.reg(maps).mean((2, 3))


def sample(n):
    kind = torch.randint(3, (n,))
    image = torch.randn(n, 3, 16, 16) + nn.functional.one_hot(kind, 3)[:, :, None, None] * 2.0
    box = torch.rand(n, 4) * 8
    return image + box.mean(1)[:, None, None, None] / 8, kind, box


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--fixed", action="store_true", help="run the repaired version")
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    settings = dict(config["optimizer"])
    if args.fixed:
        settings["lr"] = settings["lr"] / 64
    detector = OneStage()
    optimizer = torch.optim.SGD(detector.parameters(), **settings)
    for it in range(config["iterations"]):
        image, kind, box = sample(config["batch"])
        scores, boxes = detector(image)
        loss = nn.functional.cross_entropy(scores, kind) + nn.functional.mse_loss(boxes, box) / 8
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if it % 10 == 0:
            print(f"iteration {it} loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
