# A loop with Accelerate, which also gathers the gradients of two batches.
import sys

import torch
from accelerate import Accelerator
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset


class Rotations(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer1 = nn.Linear(6, 64)
        self.layer2 = nn.Linear(64, 64)
        self.layer3 = nn.Linear(64, 4)

    def forward(self, x):
        x = F.silu(self.layer1(x))
        x = F.silu(self.layer2(x))
        return self.layer3(x)


def arms(n):
    x = torch.rand(n, 6) * 2 - 1
    kind = (x[:, 0] * x[:, 1] > 0).long() * 2 + (x[:, 2] + x[:, 3] ** 2 > 0.3).long()
    return TensorDataset(x, kind)


def main():
    torch.manual_seed(int(sys.argv[-1]) if len(sys.argv) > 1 else 0)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = Rotations()
    optimizer = torch.optim.AdamW(model.parameters(), lr=6e-3)
    loader = DataLoader(arms(2400), batch_size=32, shuffle=True)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=300)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    for epoch in range(8):
        model.train()
        for inputs, labels in loader:
            with accelerator.accumulate(model):
                loss = F.cross_entropy(model(inputs), labels)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        accelerator.print(f"epoch {epoch} loss {loss.item():.4f}")
    model.eval()
    x, y = arms(1000).tensors
    with torch.no_grad():
        accuracy = (model(x).argmax(dim=-1) == y).float().mean().item()
    accelerator.print(f"metric {accuracy:.4f}")


if __name__ == "__main__":
    main()
