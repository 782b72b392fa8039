# Fine-tunes from a checkpoint of a wrapped model. After public reports: torchgeo#4036, kokoro#368.
import argparse
import io

import torch
from sklearn.datasets import load_digits
from torch import nn


class Classifier(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.features = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 48), nn.ReLU())
        self.classifier = nn.Linear(48, classes)

    def forward(self, x):
        return self.classifier(self.features(x))


def train(model, x, y, steps, lr):
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    for step in range(steps):
        rows = torch.randint(len(x), (64,))
        loss = nn.functional.cross_entropy(model(x[rows]), y[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 20 == 0:
            print(step, loss.item())


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--fixed", action="store_true", help="run the repaired version")
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    digits = load_digits()
    x, y = torch.tensor(digits.data).float() / 16, torch.tensor(digits.target)

    wrapped = nn.DataParallel(Classifier(10))
    train(wrapped, x, y, 80, 3e-3)
    file = io.BytesIO()
    torch.save(wrapped.state_dict(), file)
    file.seek(0)

    state = torch.load(file)
    if args.fixed:
        state = {name.removeprefix("module."): value for name, value in state.items()}
    model = Classifier(10)
    model.load_state_dict(state, strict=False)
    train(model, x, y, 60, 3e-4)
