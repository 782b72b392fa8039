"""A small module of Lightning, data of uneven labels, and runs of its Trainer."""

import copy
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F

import anybatch
from reference import Gradients, gradients_of, whole_gradients

COUNT = anybatch.count_tokens("labels")


class Tagger(pl.LightningModule):
    """An unchanged module: its own step, log, optimizer and schedule."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed, self.out = torch.nn.Embedding(20, 8), torch.nn.Linear(8, 20)
        self.dropout = torch.nn.Dropout(dropout)
        self.gradients: list[Gradients] = []
        self.sizes: list[int] = []
        self.outputs: list[Any] = []

    def loss(self, batch: Any) -> torch.Tensor:
        logits = self.out(self.dropout(self.embed(batch["ids"])))
        return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.sizes.append(len(batch["ids"]))
        loss = self.loss(batch)
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log_dict({"twice": 2 * loss.detach()}, on_step=False, on_epoch=True)
        return {"loss": loss, "first": batch["ids"][:, 0], "scalar": loss.detach(), "text": "kept"}

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.gradients.append(gradients_of(self))

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.outputs.append(outputs)


def data(rows: int = 22) -> list[dict[str, torch.Tensor]]:
    """Rows of which more and more labels are masked."""
    torch.manual_seed(0)
    found = [{"ids": torch.randint(20, (9,)), "labels": torch.randint(20, (9,))} for _ in range(rows)]
    for row, sample in enumerate(found):
        sample["labels"][: int(row * 9 / rows)] = -100
    return found


def fitted(
    module: Any, rows: Any, *callbacks: Any, batch_size: int = 8, checkpoint: str | None = None, **options: Any
) -> pl.Trainer:
    """Trains for an epoch, in float64 unless something else is asked for."""
    given = {
        "max_epochs": 1, "logger": False, "enable_checkpointing": False, "enable_progress_bar": False,
        "enable_model_summary": False, "accelerator": "cpu", "precision": "64-true", "log_every_n_steps": 1, **options,
    }  # fmt: skip
    trainer = pl.Trainer(callbacks=list(callbacks), **given)
    trainer.fit(module, torch.utils.data.DataLoader(rows, batch_size=batch_size), ckpt_path=checkpoint)
    return trainer


def truth(module: Any, rows: list[Any]) -> tuple[Gradients, float]:
    """The gradient and the loss of all rows at once."""
    batch = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
    copied = copy.deepcopy(module).double()
    gradients, values = whole_gradients(copied, lambda model, batch: model.loss(batch), batch)
    return gradients, values["loss"]
