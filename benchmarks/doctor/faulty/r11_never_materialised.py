# Loads a base model without memory, then its weights. After public reports about models on two devices.
import argparse

import torch
from torch import nn


class WithAdapter(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(10, 32), nn.ReLU())
        self.adapter = nn.Linear(32, 32)
        self.out = nn.Linear(32, 2)

    def forward(self, x):
        x = self.body(x)
        x = x + self.adapter(x)
        return self.out(x)


def load(fixed):
    stored = WithAdapter().state_dict()
    with torch.device("meta"):
        model = WithAdapter()
    if not fixed:
        stored = {name: value for name, value in stored.items() if not name.startswith("adapter")}
    model.load_state_dict(stored, strict=False, assign=True)
    return model


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--fixed", action="store_true", help="run the repaired version")
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    model = load(args.fixed)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(50):
        x = torch.randn(32, 10)
        loss = nn.functional.cross_entropy(model(x), (x[:, 0] > 0).long())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 10 == 0:
            print(step, loss.item())
