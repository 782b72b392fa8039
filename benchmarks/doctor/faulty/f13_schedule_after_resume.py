# Trains, resumes from what was saved, and goes on under a cosine schedule. After a public report:
# pytorch-gradual-warmup-lr#27.
import argparse
import io

import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR

parser = argparse.ArgumentParser()
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--fixed", action="store_true", help="run the repaired version")
args = parser.parse_args()
torch.manual_seed(args.seed)

x = torch.randn(500, 10)
y = (x[:, 0] * x[:, 1] > 0).long()


def new_model():
    return nn.Sequential(nn.Linear(10, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))


def iterate(model, optimizer, scheduler, steps):
    for k in range(steps):
        rows = torch.randint(500, (50,))
        loss = nn.functional.cross_entropy(model(x[rows]), y[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        if k % 20 == 0:
            print(f"lr {optimizer.param_groups[0]['lr']:.5f} loss {loss.item():.4f}")


model = new_model()
optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
scheduler = CosineAnnealingLR(optimizer, T_max=120)
iterate(model, optimizer, scheduler, 40)

saved = io.BytesIO()
torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, saved)
saved.seek(0)
checkpoint = torch.load(saved)

print("resumed")
model.load_state_dict(checkpoint["model"])
optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
optimizer.load_state_dict(checkpoint["optimizer"])
if args.fixed:
    done = scheduler.state_dict()
    scheduler = CosineAnnealingLR(optimizer, T_max=120)
    scheduler.load_state_dict(done)
iterate(model, optimizer, scheduler, 80)
