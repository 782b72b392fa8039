# Fine-tunes: a trunk learns digits 0 to 4 first, then it stays frozen for a while and a new head learns 5 to 9.
import sys

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F

torch.manual_seed(int(sys.argv[-1]) if len(sys.argv) > 1 else 0)
data = load_digits()
pixels, digit = torch.tensor(data.data).float() / 16, torch.tensor(data.target)


class Classifier(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU())
        self.head = nn.Linear(32, classes)

    def forward(self, x):
        return self.head(self.trunk(x))


def steps(model, optimizer, x, y, count):
    for step in range(count):
        pick = torch.randint(len(x), (40,))
        loss = F.cross_entropy(model(x[pick]), y[pick])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 50 == 0:
            print(f"step {step} loss {loss.item():.4f}")


first = digit < 5
source = Classifier(5)
steps(source, torch.optim.Adam(source.parameters(), lr=2e-3), pixels[first], digit[first], 120)

x, y = pixels[~first], digit[~first] - 5
shuffle = torch.randperm(len(x))
x, y = x[shuffle], y[shuffle]
model = Classifier(5)
model.trunk.load_state_dict(source.trunk.state_dict())
for parameter in model.trunk.parameters():
    parameter.requires_grad = False
steps(model, torch.optim.Adam(model.head.parameters(), lr=5e-3), x[:600], y[:600], 60)
for parameter in model.trunk.parameters():
    parameter.requires_grad = True
optimizer = torch.optim.AdamW(
    [{"params": model.trunk.parameters(), "lr": 5e-4}, {"params": model.head.parameters(), "lr": 2e-3}],
    weight_decay=0.01,
)
steps(model, optimizer, x[:600], y[:600], 120)
model.eval()
with torch.no_grad():
    print(f"metric {(model(x[600:]).argmax(1) == y[600:]).float().mean().item():.4f}")
