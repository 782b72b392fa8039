# A LightningModule that steps its two optimizers itself.
import logging
import sys
import warnings

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader

warnings.filterwarnings("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class LitAutoencoder(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.encoder = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 3))
        self.decoder = nn.Sequential(nn.Linear(3, 32), nn.Tanh(), nn.Linear(32, 16))

    def forward(self, x):
        return self.decoder(self.encoder(x))

    def training_step(self, batch, batch_idx):
        enc_opt, dec_opt = self.optimizers()
        loss = (self(batch) - batch).pow(2).mean()
        enc_opt.zero_grad()
        dec_opt.zero_grad()
        self.manual_backward(loss)
        enc_opt.step()
        dec_opt.step()

    def configure_optimizers(self):
        enc_opt = torch.optim.Adam(self.encoder.parameters(), lr=5e-3)
        dec_opt = torch.optim.Adam(self.decoder.parameters(), lr=5e-3)
        return enc_opt, dec_opt


def curves(n):
    t = torch.linspace(0, 3, 16)
    a, b, c = torch.randn(3, n, 1)
    return a * torch.sin(t + b) + 0.3 * c * t


L.seed_everything(int(sys.argv[-1]) if len(sys.argv) > 1 else 0, verbose=False)
train_loader = DataLoader(curves(1280), batch_size=64, shuffle=True)
lit = LitAutoencoder()
trainer = L.Trainer(
    max_epochs=12,
    accelerator="cpu",
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(lit, train_loader)
with torch.no_grad():
    test = curves(500)
    error = (lit(test) - test).pow(2).mean() / test.var()
print(f"metric {1 - error.item():.4f}")
