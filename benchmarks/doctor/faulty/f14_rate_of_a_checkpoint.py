# Fine-tunes from a checkpoint with a smaller learning rate. After a public report: mapbox/robosat#169.
import argparse
import tempfile
from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import mse_loss


def network():
    return nn.Sequential(nn.Conv1d(1, 8, 5, padding=2), nn.SiLU(), nn.Conv1d(8, 1, 5, padding=2))


def signals(count, noise):
    phase = torch.rand(count, 1, 1) * 6.28
    clean = torch.sin(torch.linspace(0, 12.56, 40) + phase)
    return clean + noise * torch.randn(count, 1, 40), clean


def learn(denoiser, optimizer, steps, noise):
    for number in range(steps):
        noisy, clean = signals(32, noise)
        error = mse_loss(denoiser(noisy), clean)
        optimizer.zero_grad()
        error.backward()
        optimizer.step()
        if number % 20 == 0:
            print(number, error.item())


def pretrain(path):
    denoiser = network()
    optimizer = torch.optim.Adam(denoiser.parameters(), lr=1e-2)
    learn(denoiser, optimizer, 60, noise=0.3)
    torch.save({"net": denoiser.state_dict(), "opt": optimizer.state_dict()}, path)


def finetune(path, lr, fixed):
    denoiser = network()
    optimizer = torch.optim.Adam(denoiser.parameters(), lr=lr)
    stored = torch.load(path)
    denoiser.load_state_dict(stored["net"])
    optimizer.load_state_dict(stored["opt"])
    if fixed:
        for group in optimizer.param_groups:
            group["lr"] = lr
    learn(denoiser, optimizer, 60, noise=0.6)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--fixed", action="store_true", help="run the repaired version")
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    with tempfile.TemporaryDirectory() as folder:
        pretrain(Path(folder) / "last.pt")
        finetune(Path(folder) / "last.pt", args.lr, args.fixed)
