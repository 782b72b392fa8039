# Fine-tunes a detector as it is usually done: BatchNorm in evaluation mode from the start, the first stage frozen, ten
# times the rate for the head, and one group that waits with a rate of zero.
import argparse

import torch
from torch import nn


class Stage(nn.Sequential):
    def __init__(self, inside, outside):
        super().__init__(
            nn.Conv2d(inside, outside, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(outside), nn.ReLU()
        )


class Detector(nn.Module):
    def __init__(self):
        super().__init__()
        self.stage1, self.stage2, self.stage3 = Stage(3, 12), Stage(12, 24), Stage(24, 24)
        self.boxes = nn.Linear(24, 4)
        self.scores = nn.Linear(24, 3)

    def forward(self, x):
        x = self.stage3(self.stage2(self.stage1(x))).mean((2, 3))
        return self.boxes(x), self.scores(x)

    def train(self, mode=True):
        super().train(mode)
        for module in self.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.eval()
        return self


parser = argparse.ArgumentParser()
parser.add_argument("--seed", type=int, default=0)
args = parser.parse_args()
torch.manual_seed(args.seed)
detector = Detector()
for module in detector.modules():
    if isinstance(module, nn.BatchNorm2d):
        module.running_var.fill_(0.3)
detector.stage1.requires_grad_(False)
detector.train()
optimizer = torch.optim.SGD(
    [
        {"params": detector.stage2.parameters(), "lr": 0.0},
        {"params": detector.stage3.parameters(), "lr": 0.005},
        {"params": [*detector.boxes.parameters(), *detector.scores.parameters()], "lr": 0.05},
    ],
    lr=0.005,
    momentum=0.9,
    weight_decay=1e-4,
)
for it in range(80):
    kind = torch.randint(3, (8,))
    image = torch.randn(8, 3, 16, 16) * 0.5
    image[torch.arange(8), kind] += 1.0
    box = torch.stack([image.mean((1, 2, 3)), image.std((1, 2, 3)), image[:, 0].mean((1, 2)), image.amax((1, 2, 3))], 1)
    boxes, scores = detector(image)
    loss = nn.functional.cross_entropy(scores, kind) + nn.functional.smooth_l1_loss(boxes, box)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if it % 16 == 0:
        print(it, loss.item())
