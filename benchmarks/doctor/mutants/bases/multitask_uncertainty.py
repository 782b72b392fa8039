# Three tasks on one trunk, weighed by learned uncertainties.
import argparse

import torch
from torch import nn
from torch.nn import functional as F


class MultiTask(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(12, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU())
        self.value = nn.Linear(32, 1)
        self.kind = nn.Linear(32, 3)
        self.flag = nn.Linear(32, 1)
        self.log_sigma = nn.Parameter(torch.zeros(3))

    def forward(self, x):
        h = self.trunk(x)
        return self.value(h).squeeze(1), self.kind(h), self.flag(h).squeeze(1)


def make(n, mix):
    x = torch.randn(n, 12)
    hidden = torch.tanh(x @ mix)
    value = hidden[:, 0] + hidden[:, 1] * hidden[:, 2]
    kind = hidden[:, 3:6].argmax(dim=1)
    flag = (hidden[:, 0] > hidden[:, 4]).float()
    return x, value, kind, flag


def losses(model, batch):
    x, value, kind, flag = batch
    value_out, kind_out, flag_out = model(x)
    return torch.stack(
        [
            F.mse_loss(value_out, value),
            F.cross_entropy(kind_out, kind),
            F.binary_cross_entropy_with_logits(flag_out, flag),
        ]
    )


def score(model, batch):
    x, value, kind, flag = batch
    with torch.no_grad():
        value_out, kind_out, flag_out = model(x)
    r2 = 1 - (value_out - value).pow(2).mean() / value.var()
    return (r2 + (kind_out.argmax(1) == kind).float().mean() + ((flag_out > 0) == (flag > 0)).float().mean()).item() / 3


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=0)
    torch.manual_seed(parser.parse_args().seed)
    mix = torch.randn(12, 6) * 0.4
    data, held_out = make(2500, mix), make(600, mix)
    model = MultiTask()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for step in range(300):
        pick = torch.randint(2500, (64,))
        each = losses(model, [part[pick] for part in data])
        loss = (torch.exp(-model.log_sigma) * each + model.log_sigma).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 60 == 0:
            print(step, [round(one, 3) for one in each.tolist()])
    print(f"metric {score(model, held_out):.4f}")
