# A frozen backbone with a new head on pictures of another camera. After public reports: pytorch/pytorch#86590,
# mmdetection#560, mmpretrain#702.
import argparse

import torch
from torch import nn, optim

parser = argparse.ArgumentParser()
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--fixed", action="store_true", help="run the repaired version")
args = parser.parse_args()
torch.manual_seed(args.seed)


def conv(inside, outside):
    return nn.Sequential(
        nn.Conv2d(inside, outside, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(outside), nn.ReLU()
    )


class Detector(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(conv(3, 16), conv(16, 32))
        self.neck = nn.Conv2d(32, 32, 1)
        self.bbox_head = nn.Linear(32, 4)

    def forward(self, images):
        maps = torch.relu(self.neck(self.backbone(images)))
        return self.bbox_head(maps.flatten(2).mean(2))


detector = Detector()
detector.backbone.requires_grad_(False)
optimizer = optim.SGD([p for p in detector.parameters() if p.requires_grad], lr=0.02, momentum=0.9)
for epoch in range(3):
    detector.train()
    if args.fixed:
        detector.backbone.eval()
    for _ in range(20):
        images = torch.rand(12, 3, 16, 16) * 0.6 + 0.4
        boxes = images[:, :, 4:8, 4:8].mean((2, 3))
        boxes = torch.cat([boxes, boxes.sum(1, keepdim=True)], 1)
        loss = nn.functional.smooth_l1_loss(detector(images), boxes)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    statistics = detector.backbone[0][1].running_var
    print(f"epoch {epoch} loss {loss.item():.4f} statistics {statistics.mean().item():.4f}")
