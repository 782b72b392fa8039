"""A recipe as torchtune writes it: several batches of the loader make an update, the mean over all their tokens."""

from typing import Any

import torch.nn.functional as F

from anybatch import TrainStep, count_tokens, windows


def next_token_loss(model: Any, batch: Any) -> Any:
    """The mean over the tokens of a batch."""
    logits = model(batch["tokens"])[:, :-1].flatten(0, 1)
    return F.cross_entropy(logits, batch["labels"][:, 1:].flatten(), ignore_index=-100)


def train(model: Any, loader: Any, optimizer: Any, batches: int, **options: Any) -> Any:
    """Gives the loss of each update; options of TrainStep such as memory, clip_norm and scheduler."""
    step = TrainStep(model, next_token_loss, optimizer, count=count_tokens("labels", shift=1), **options)
    yield from (step(window).loss for window in windows(loader, batches=batches))
