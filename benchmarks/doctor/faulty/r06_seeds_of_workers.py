# Noise is drawn while the data are loaded. After public reports: StackOverflow 67180955, pytorch/pytorch#56488.
import argparse

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Noisy(Dataset):
    """Signals made on the fly."""

    def __len__(self):
        return 768

    def __getitem__(self, index):
        phase = np.random.rand() * 6.28
        clean = np.sin(np.linspace(0, 6.28, 32) + phase)
        noisy = clean + 0.3 * np.random.randn(32)
        return noisy.astype("float32"), clean.astype("float32")


def same_seed(worker):
    np.random.seed(7)


def own_seed(worker):
    np.random.seed(torch.initial_seed() % 2**32)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--fixed", action="store_true", help="run the repaired version")
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    start = own_seed if args.fixed else same_seed
    loader = DataLoader(Noisy(), batch_size=32, num_workers=2, worker_init_fn=start)
    denoiser = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32))
    optimizer = torch.optim.Adam(denoiser.parameters(), lr=2e-3)
    for epoch in range(3):
        for noisy, clean in loader:
            loss = nn.functional.mse_loss(denoiser(noisy), clean)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(epoch, loss.item())
