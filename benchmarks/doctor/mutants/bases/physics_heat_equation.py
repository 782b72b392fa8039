# A network that satisfies the heat equation with its boundary: derivatives by autograd in the loss.
import math
import sys

import torch
import torch.nn as nn


class Field(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.fc1 = nn.Linear(2, width)
        self.fc2 = nn.Linear(width, width)
        self.fc3 = nn.Linear(width, 1)

    def forward(self, x, t):
        h = torch.tanh(self.fc1(torch.cat([x, t], dim=1)))
        h = torch.tanh(self.fc2(h))
        return self.fc3(h)


def exact(x, t):
    return torch.sin(math.pi * x) * torch.exp(-0.3 * math.pi**2 * t)


def residual(field, x, t):
    x.requires_grad_(True)
    t.requires_grad_(True)
    u = field(x, t)
    ones = torch.ones_like(u)
    u_x, u_t = torch.autograd.grad(u, (x, t), ones, create_graph=True)
    u_xx = torch.autograd.grad(u_x, x, ones, create_graph=True)[0]
    return u_t - 0.3 * u_xx


torch.manual_seed(int(sys.argv[-1]) if len(sys.argv) > 1 else 0)
field = Field()
optimizer = torch.optim.Adam(field.parameters(), lr=5e-3)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=150, gamma=0.4)
for step in range(400):
    x, t = torch.rand(64, 1), torch.rand(64, 1)
    physics_loss = residual(field, x, t).pow(2).mean()
    x0 = torch.rand(32, 1)
    initial_loss = (field(x0, torch.zeros_like(x0)) - exact(x0, torch.zeros_like(x0))).pow(2).mean()
    tb = torch.rand(32, 1)
    edge_loss = field(torch.zeros_like(tb), tb).pow(2).mean() + field(torch.ones_like(tb), tb).pow(2).mean()
    loss = physics_loss + 10 * initial_loss + 10 * edge_loss
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    scheduler.step()
    if step % 100 == 0:
        print(f"{step} physics {physics_loss.item():.4f} initial {initial_loss.item():.4f} edge {edge_loss.item():.4f}")
with torch.no_grad():
    x, t = torch.rand(2000, 1), torch.rand(2000, 1)
    error = (field(x, t) - exact(x, t)).pow(2).mean() / exact(x, t).var()
print(f"metric {1 - error.item():.4f}")
