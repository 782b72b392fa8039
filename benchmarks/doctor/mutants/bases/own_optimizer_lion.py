# An optimizer of the user's own: the sign of a momentum, with decoupled decay.
import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn


class SignMomentum(torch.optim.Optimizer):
    def __init__(self, params, lr=1e-3, beta=0.9, decay=0.0):
        super().__init__(params, dict(lr=lr, beta=beta, decay=decay))

    @torch.no_grad()
    def step(self, closure=None):
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if "momentum" not in state:
                    state["momentum"] = torch.zeros_like(p)
                m = state["momentum"]
                m.mul_(group["beta"]).add_(p.grad, alpha=1 - group["beta"])
                p.mul_(1 - group["lr"] * group["decay"])
                p.sub_(group["lr"] * m.sign())
        return loss


parser = argparse.ArgumentParser()
parser.add_argument("--seed", type=int, default=0)
torch.manual_seed(parser.parse_args().seed)
x, y = load_digits(return_X_y=True)
x, y = torch.tensor(x, dtype=torch.float32) / 16 - 0.3, torch.tensor(y)
perm = torch.randperm(len(x))
x, y = x[perm], y[perm]
model = nn.Sequential(nn.Linear(64, 80), nn.ELU(), nn.Linear(80, 10))
optimizer = SignMomentum(model.parameters(), lr=2e-3, decay=0.01)
criterion = nn.CrossEntropyLoss()
for step in range(280):
    i = torch.randint(1300, (48,))
    loss = criterion(model(x[i]), y[i])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 70 == 0:
        print(f"step {step} loss {loss.item():.4f}")
with torch.no_grad():
    accuracy = (model(x[1300:]).argmax(1) == y[1300:]).float().mean().item()
print(f"metric {accuracy:.4f}")
