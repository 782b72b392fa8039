# A convolutional classifier. After a public report: pytorch_warmup#12.
import argparse

import torch
import torch.nn as nn
from sklearn.datasets import load_digits

parser = argparse.ArgumentParser()
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--fixed", action="store_true", help="run the repaired version")
args = parser.parse_args()
torch.manual_seed(args.seed)

digits = load_digits()
images = torch.from_numpy(digits.images).float().unsqueeze(1) / 16
target = torch.from_numpy(digits.target)

cnn = nn.Sequential(
    nn.Conv2d(1, 8, 3, padding=1),
    nn.ReLU(),
    nn.MaxPool2d(2),
    nn.Conv2d(8, 16, 3, padding=1),
    nn.ReLU(),
    nn.Flatten(),
    nn.Linear(16 * 4 * 4, 10),
)
trainer = torch.optim.AdamW(cnn.parameters(), lr=3e-3, weight_decay=0.0)
warmup = torch.optim.lr_scheduler.LinearLR(trainer, start_factor=0.1, total_iters=10)
loss_function = nn.CrossEntropyLoss()
for it in range(60):
    rows = torch.randint(len(images), (48,))
    loss = loss_function(cnn(images[rows]), target[rows])
    if args.fixed:
        trainer.zero_grad()
        loss.backward()
    else:
        loss.backward()
        trainer.zero_grad()
    trainer.step()
    warmup.step()
    if it % 10 == 0:
        print("iteration", it, "loss", loss.item())
