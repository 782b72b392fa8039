# Half precision with a loss scale that is too high at first: some steps are left out, and the schedule waits for them.
import argparse

import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--micro-batches", type=int, default=2)
args = parser.parse_args()
torch.manual_seed(args.seed)

model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 5))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=80)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24, growth_interval=200)
centres = torch.randn(5, 32)
for step in range(60):
    shown = 0.0
    for _ in range(args.micro_batches):
        label = torch.randint(5, (16,))
        x = centres[label] + 1.5 * torch.randn(16, 32)
        with torch.autocast("cpu", dtype=torch.float16):
            loss = nn.functional.cross_entropy(model(x), label) / args.micro_batches
        scaler.scale(loss).backward()
        shown += loss.item()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    before = scaler.get_scale()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    if scaler.get_scale() >= before:
        scheduler.step()
    if step % 6 == 0:
        print(f"{step} loss {shown:.4f} scale {scaler.get_scale():.0f} lr {optimizer.param_groups[0]['lr']:.5f}")
