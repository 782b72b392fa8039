# Finds edges. After public reports: UNet3plus_pth#23, GSCNN#62.
import argparse

import torch
import torch.nn as nn

parser = argparse.ArgumentParser()
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--fixed", action="store_true", help="run the repaired version")
args = parser.parse_args()
torch.manual_seed(args.seed)

edges = nn.Sequential(
    nn.Conv2d(1, 10, 3, padding=1), nn.BatchNorm2d(10), nn.ReLU(), nn.Conv2d(10, 10, 3, padding=1), nn.ReLU()
)
last = nn.Conv2d(10, 1, 1)


def predict(pictures):
    if args.fixed:
        return last(edges(pictures))
    return torch.sigmoid(last(edges(pictures)))


criterion = nn.BCEWithLogitsLoss()
optimizer = torch.optim.Adam([{"params": edges.parameters()}, {"params": last.parameters()}], lr=1e-2)
for it in range(70):
    shape = torch.zeros(8, 1, 20, 20)
    for row in shape:
        a, b = torch.randint(2, 9, (2,)).tolist()
        row[0, a : a + 9, b : b + 9] = 1
    wanted = (torch.max_pool2d(shape, 3, 1, 1) - shape > 0).float()
    pictures = shape + 0.1 * torch.randn_like(shape)
    prediction = predict(pictures)
    loss = criterion(prediction, wanted)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if it % 10 == 0:
        print(f"{it} loss {loss.item():.4f} smallest {prediction.min().item():.3f}")
