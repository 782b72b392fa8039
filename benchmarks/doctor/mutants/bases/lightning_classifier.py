# A LightningModule with automatic optimisation.
import argparse
import logging
import warnings

import lightning as L
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

warnings.filterwarnings("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class LitClassifier(L.LightningModule):
    def __init__(self, lr=5e-3):
        super().__init__()
        self.lr = lr
        self.encoder = nn.Sequential(nn.Linear(2, 48), nn.ReLU(), nn.Dropout(0.05), nn.Linear(48, 48), nn.ReLU())
        self.head = nn.Linear(48, 3)

    def forward(self, x):
        return self.head(self.encoder(x))

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.cross_entropy(self(x), y)
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=self.lr)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.5)
        return [optimizer], [scheduler]


def spirals(n):
    y = torch.randint(3, (n,))
    r = torch.rand(n) * 0.9 + 0.1
    angle = 4 * r + y * 2.094 + 0.15 * torch.randn(n)
    return torch.stack([r * angle.cos(), r * angle.sin()], dim=1) * 2, y


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=0)
    L.seed_everything(parser.parse_args().seed, verbose=False)
    loader = DataLoader(TensorDataset(*spirals(1600)), batch_size=64, shuffle=True)
    model = LitClassifier()
    trainer = L.Trainer(
        max_epochs=8,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        gradient_clip_val=1.0,
    )
    trainer.fit(model, loader)
    model.eval()
    x, y = spirals(1000)
    with torch.no_grad():
        print(f"metric {(model(x).argmax(dim=1) == y).float().mean().item():.4f}")


if __name__ == "__main__":
    main()
