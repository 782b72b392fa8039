# Fine-tunes a new head on an encoder that is meant to stay as it is. After public reports:
# MICCAI23-ProtoContra-SFDA#18, catalyst#79.
import argparse

import torch
from torch import nn


class Segmenter(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv2d(1, 12, 3, padding=1), nn.ReLU(), nn.Conv2d(12, 12, 3, padding=1), nn.ReLU()
        )
        self.classifier = nn.Conv2d(12, 2, 1)

    def forward(self, image):
        return self.classifier(self.encoder(image))


def blobs(count):
    image = torch.randn(count, 1, 16, 16) * 0.3
    mask = torch.zeros(count, 16, 16, dtype=torch.long)
    for k in range(count):
        row, col = torch.randint(2, 10, (2,)).tolist()
        image[k, 0, row : row + 5, col : col + 5] += 1.5
        mask[k, row : row + 5, col : col + 5] = 1
    return image, mask


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--fixed", action="store_true", help="run the repaired version")
    args = parser.parse_args()
    torch.manual_seed(args.seed)

    segmenter = Segmenter()
    if args.fixed:
        segmenter.encoder.requires_grad_(False)
    else:
        segmenter.encoder.requires_grad = False
    adam = torch.optim.Adam(segmenter.parameters(), lr=1e-3)
    before = segmenter.encoder[0].weight.detach().clone()
    for iteration in range(40):
        image, mask = blobs(16)
        loss = nn.functional.cross_entropy(segmenter(image), mask)
        adam.zero_grad()
        loss.backward()
        adam.step()
        if iteration % 10 == 0:
            print(iteration, loss.item())
    print("encoder moved by", (segmenter.encoder[0].weight - before).abs().max().item())
