# Trains, saves everything, makes all objects anew, loads and goes on.
import argparse
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F


def build():
    model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones=[200], gamma=0.2)
    return model, optimizer, scheduler


def save(path, model, optimizer, scheduler, step):
    torch.save(
        {
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "scheduler": scheduler.state_dict(),
            "step": step,
        },
        path,
    )


def load(path, model, optimizer, scheduler):
    checkpoint = torch.load(path)
    model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    scheduler.load_state_dict(checkpoint["scheduler"])
    return checkpoint["step"]


def train(model, optimizer, scheduler, draw, first, last):
    for step in range(first, last):
        x, y = draw(48)
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        if step % 50 == 0:
            print(f"step {step} loss {loss.item():.4f} lr {scheduler.get_last_lr()[0]:g}")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=0)
    torch.manual_seed(parser.parse_args().seed)
    teacher = torch.randn(20, 5)

    def draw(n):
        x = torch.randn(n, 20)
        return x, (torch.tanh(x) @ teacher).argmax(dim=1)

    path = Path("checkpoint.pt")
    model, optimizer, scheduler = build()
    train(model, optimizer, scheduler, draw, 0, 150)
    save(path, model, optimizer, scheduler, 150)
    model, optimizer, scheduler = build()
    start = load(path, model, optimizer, scheduler)
    train(model, optimizer, scheduler, draw, start, 300)
    x, y = draw(1500)
    with torch.no_grad():
        print(f"metric {(model(x).argmax(dim=1) == y).float().mean().item():.4f}")


main()
