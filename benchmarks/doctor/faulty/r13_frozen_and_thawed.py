# Freezes a backbone and hands the model to a training function. After a public report: yolov5#1213.
import argparse

import torch
from torch import nn


class Yolo(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(nn.Conv2d(1, 10, 3, stride=2), nn.SiLU(), nn.Conv2d(10, 10, 3), nn.SiLU())
        self.detect = nn.Linear(10, 3)

    def forward(self, x):
        return self.detect(self.backbone(x).amax((2, 3)))


def build(freeze):
    model = Yolo()
    for name, parameter in model.named_parameters():
        if any(name.startswith(part) for part in freeze):
            parameter.requires_grad = False
    return model


def train(model, fixed, steps=50):
    if not fixed:
        for parameter in model.parameters():
            parameter.requires_grad = True
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=2e-3)
    for step in range(steps):
        kind = torch.randint(3, (16,))
        image = torch.randn(16, 1, 12, 12) * 0.4
        image[torch.arange(16), 0, 3 * kind + 1] += 1.5
        loss = nn.functional.cross_entropy(model(image), kind)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 10 == 0:
            print(step, loss.item())


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--fixed", action="store_true", help="run the repaired version")
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    model = build(freeze=("backbone",))
    before = model.backbone[0].weight.detach().clone()
    train(model, args.fixed)
    print("backbone moved by", (model.backbone[0].weight - before).abs().max().item())
