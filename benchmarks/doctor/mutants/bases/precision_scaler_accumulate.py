# Mixed precision with a scaler, gradients accumulated over four micro-batches, clipped, and a schedule.
import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F

parser = argparse.ArgumentParser()
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--accumulate", type=int, default=4)
args = parser.parse_args()
torch.manual_seed(args.seed)
data, target = load_digits(return_X_y=True)
data, target = torch.tensor(data).float() / 16, torch.tensor(target)
order = torch.randperm(len(data))
train, test = order[:1440], order[1440:]

model = nn.Sequential(nn.Linear(64, 96), nn.LayerNorm(96), nn.GELU(), nn.Linear(96, 96), nn.GELU(), nn.Linear(96, 10))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
epochs, micro = 8, 24
updates = epochs * (len(train) // micro // args.accumulate)
scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=1.0, end_factor=0.1, total_iters=updates)
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
for epoch in range(epochs):
    model.train()
    running = 0.0
    optimizer.zero_grad()
    for i, index in enumerate(train[torch.randperm(len(train))].split(micro)):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            output = model(data[index])
            loss = F.cross_entropy(output.float(), target[index])
        scaler.scale(loss / args.accumulate).backward()
        running += loss.item()
        if (i + 1) % args.accumulate == 0:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            scheduler.step()
    print(f"epoch {epoch} loss {running / (i + 1):.4f}")
model.eval()
with torch.no_grad():
    print(f"metric {(model(data[test]).argmax(dim=1) == target[test]).float().mean().item():.4f}")
