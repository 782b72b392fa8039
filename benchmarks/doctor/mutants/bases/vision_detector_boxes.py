# Finds the box of one object and its kind: smooth L1 for the box, cross entropy for the class.
import argparse

import torch
from torch import nn

ap = argparse.ArgumentParser()
ap.add_argument("--seed", type=int, default=0)
cfg = ap.parse_args()
torch.manual_seed(cfg.seed)
SIZE = 20


def make_batch(n):
    images = 0.2 * torch.randn(n, 1, SIZE, SIZE)
    kinds = torch.randint(3, (n,))
    corner = torch.randint(0, 10, (n, 2))
    extent = torch.randint(4, 9, (n, 2))
    for i in range(n):
        (top, left), (height, width) = corner[i].tolist(), extent[i].tolist()
        patch = images[i, 0, top : top + height, left : left + width]
        if kinds[i] == 0:
            patch += 1
        elif kinds[i] == 1:
            patch -= 1
        else:
            patch[::2] += 1.5
    boxes = torch.cat([corner + extent / 2, extent.float()], dim=1) / SIZE
    return images, boxes, kinds


class Detector(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Conv2d(1, 12, 3, stride=2, padding=1), nn.ReLU(), nn.Conv2d(12, 24, 3, stride=2, padding=1), nn.ReLU()
        )
        self.neck = nn.Linear(24 * 25, 64)
        self.box_head = nn.Linear(64, 4)
        self.class_head = nn.Linear(64, 3)

    def forward(self, x):
        features = self.backbone(x).flatten(1)
        features = torch.relu(self.neck(features))
        return self.box_head(features), self.class_head(features)


images, boxes, kinds = make_batch(1200)
test_images, test_boxes, test_kinds = make_batch(300)
detector = Detector()
optimizer = torch.optim.Adam(detector.parameters(), lr=2e-3)
smooth_l1 = nn.SmoothL1Loss(beta=0.05)
cross_entropy = nn.CrossEntropyLoss()
for step in range(240):
    pick = torch.randint(len(images), (48,))
    box_pred, class_pred = detector(images[pick])
    box_loss = smooth_l1(box_pred, boxes[pick])
    class_loss = cross_entropy(class_pred, kinds[pick])
    loss = 5.0 * box_loss + class_loss
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(detector.parameters(), max_norm=5.0)
    optimizer.step()
    if step % 80 == 0:
        print(f"{step}: box {box_loss.item():.4f} class {class_loss.item():.4f}")

with torch.no_grad():
    box_pred, class_pred = detector(test_images)
a, b = box_pred, test_boxes
low = torch.maximum(a[:, :2] - a[:, 2:] / 2, b[:, :2] - b[:, 2:] / 2)
high = torch.minimum(a[:, :2] + a[:, 2:] / 2, b[:, :2] + b[:, 2:] / 2)
inter = (high - low).clamp(min=0).prod(dim=1)
iou = inter / (a[:, 2:].clamp(min=0).prod(dim=1) + b[:, 2:].prod(dim=1) - inter)
accuracy = (class_pred.argmax(dim=1) == test_kinds).float().mean()
print(f"metric {(0.5 * iou.mean() + 0.5 * accuracy).item():.4f}")
