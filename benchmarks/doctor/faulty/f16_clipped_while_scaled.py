# Mixed precision with clipped gradients. After public reports: Lightning#9599, Pytorch-UNet#468, pytorch/examples#1196.
import argparse

import torch
import torch.nn.functional as F
from torch import nn


class TinyUNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.down = nn.Conv2d(1, 8, 3, padding=1)
        self.middle = nn.Conv2d(8, 8, 3, padding=1)
        self.up = nn.Conv2d(16, 1, 3, padding=1)

    def forward(self, x):
        a = F.relu(self.down(x))
        b = F.interpolate(F.relu(self.middle(F.max_pool2d(a, 2))), scale_factor=2)
        return self.up(torch.cat([a, b], 1))


def batch(n):
    x = torch.rand(n, 1, 12, 12)
    return x, (F.avg_pool2d(x, 3, 1, 1) > 0.5).float()


def train(args):
    torch.manual_seed(args.seed)
    unet = TinyUNet()
    optimizer = torch.optim.SGD(unet.parameters(), lr=0.1, momentum=0.9)
    grad_scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14)
    for step in range(80):
        images, masks = batch(16)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            masks_pred = unet(images)
            loss = F.binary_cross_entropy_with_logits(masks_pred, masks)
        optimizer.zero_grad(set_to_none=True)
        grad_scaler.scale(loss).backward()
        if args.fixed:
            grad_scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(unet.parameters(), 1.0)
        grad_scaler.step(optimizer)
        grad_scaler.update()
        if step % 16 == 0:
            print(f"{step} {loss.item():.4f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--fixed", action="store_true", help="run the repaired version")
    train(parser.parse_args())
