"""A small classifier of scikit-learn's digits, trained by Lightning; ``--fault`` plants one."""

import argparse
import logging
import warnings
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset


class Digits(LightningModule):
    """Two convolutions and a head."""

    def __init__(self, fault: str | None) -> None:
        super().__init__()
        self.fault = fault
        self.features = nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Conv2d(8, 16, 3), nn.ReLU(), nn.Flatten())
        self.head = nn.Linear(256, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The logits of ``[rows, 1, 8, 8]``."""
        features = self.features(x)
        if self.fault == "detached":
            features = features.detach()
        logits: torch.Tensor = self.head(features)
        return logits.softmax(-1) if self.fault == "softmax" else logits

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        """The mean cross entropy."""
        return F.cross_entropy(self(batch[0]), batch[1])

    def validation_step(self, batch: Any, index: int) -> None:
        """Logs the loss."""
        self.log("val_loss", F.cross_entropy(self(batch[0]), batch[1]))

    def configure_optimizers(self) -> Any:
        """AdamW with a cosine."""
        optimizer = torch.optim.AdamW(self.parameters(), lr=2e-3)
        return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=2)]


def main() -> None:
    """Trains for two epochs."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--fault", choices=["detached", "softmax"])
    parser.add_argument("--save")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    seed_everything(0)
    data = load_digits()
    x, y = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16, torch.tensor(data.target)
    train, validate = TensorDataset(x[:1280], y[:1280]), TensorDataset(x[1280:], y[1280:])
    model = Digits(options.fault)
    trainer = Trainer(
        max_epochs=2, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, gradient_clip_val=1.0,
    )  # fmt: skip
    trainer.fit(model, DataLoader(train, batch_size=32, shuffle=True), DataLoader(validate, batch_size=64))
    if options.save:
        torch.save({"weights": model.state_dict(), "random": torch.get_rng_state()}, options.save)


if __name__ == "__main__":
    main()
