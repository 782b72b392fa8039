"""The story of a fine-tuning: a learning rate far too high, told by its numbers and by the doctor.

    python benchmarks/doctor/story.py            # about ten seconds
    python benchmarks/doctor/story.py --lr 1e-3

A small BERT-like encoder is pretrained a little on masked words and on a label, and then fine-tuned with AdamW. Each
line is a step: the loss, the median over the matrices of the size of the update over that of the weights, the norms
of the gradient of the embedding and of the head, and how far the outputs of different inputs lie apart.
"""

from __future__ import annotations

import statistics

import click
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import anybatch

WORDS, LENGTH, WIDTH, MASK = 60, 12, 64, 0


class Bert(nn.Module):
    """Four post-norm blocks over learned embeddings, a pooler and two heads."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.places = nn.Embedding(LENGTH, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, dropout=0.1, activation="gelu", batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.pooler = nn.Linear(WIDTH, WIDTH)
        self.mlm = nn.Linear(WIDTH, WORDS)
        self.classifier = nn.Linear(WIDTH, 2)
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1 and "norm" not in name:
                nn.init.normal_(parameter, std=0.02)

    def states(self, ids: Tensor) -> Tensor:
        """One vector for each word."""
        out: Tensor = self.encoder(self.words(ids) + self.places.weight)
        return out

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.classifier(torch.tanh(self.pooler(self.states(ids)[:, 0])))
        return out


def sentences(count: int) -> tuple[Tensor, Tensor]:
    """Walks over the words, and whether the first is in the upper half."""
    start = torch.randint(1, WORDS, (count, 1))
    ids = (start + 3 * torch.arange(LENGTH)) % (WORDS - 1) + 1
    return ids, (ids[:, 0] > WORDS // 2).long()


def pretrain(bert: Bert, steps: int) -> float:
    """Masked words and the label together; gives the last loss of the label."""
    optimizer = torch.optim.AdamW(bert.parameters(), lr=1e-3)
    label_loss = torch.zeros(())
    for _ in range(steps):
        ids, label = sentences(24)
        hidden = torch.rand(ids.shape) < 0.15
        hidden[:, 0] = False
        words = bert.mlm(bert.states(ids.masked_fill(hidden, MASK)))
        label_loss = F.cross_entropy(bert(ids), label)
        loss = F.cross_entropy(words[hidden], ids[hidden]) + label_loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return label_loss.item()


def finetune(bert: Bert, lr: float, steps: int) -> None:
    """Fine-tunes and prints the chain."""
    optimizer = torch.optim.AdamW(bert.parameters(), lr=lr)
    matrices = [p for p in bert.parameters() if p.dim() > 1 and p is not bert.mlm.weight]
    click.echo("step  loss      update/weight  embedding's gradient  head's gradient  spread of the outputs")
    for step in range(steps):
        ids, label = sentences(24)
        before = [p.detach().clone() for p in matrices]
        logits = bert(ids)
        loss = F.cross_entropy(logits, label)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step < 10 or step % 10 == 0:
            with torch.no_grad():
                moved = [((p - old).norm() / old.norm()).item() for p, old in zip(matrices, before, strict=True)]
            first, last = bert.words.weight.grad, bert.classifier.weight.grad
            if first is None or last is None:
                raise RuntimeError("no gradient reached the embedding or the head")
            click.echo(
                f"{step:4d}  {loss.item():<8.4f}  {statistics.median(moved):<13.3g}  {first.norm().item():<20.3g}  "
                f"{last.norm().item():<15.3g}  {logits.detach().std(0).max().item():.3g}"
            )


@click.command(help="Fine-tunes a small BERT with a learning rate far too high, and shows what follows from what.")
@click.option("--lr", type=float, default=1e-2, show_default=True, help="Of the fine-tuning.")
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--pretraining", type=click.IntRange(min=1), default=200, show_default=True, help="Steps.")
@click.option("--steps", type=click.IntRange(min=1), default=60, show_default=True, help="Of the fine-tuning.")
def main(lr: float, seed: int, pretraining: int, steps: int) -> None:
    """Tells the story."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    bert = Bert()
    click.echo(f"loss of the label after pretraining: {pretrain(bert, pretraining):.4f}")
    doctor = anybatch.Doctor(bert)
    with doctor:
        finetune(bert, lr, steps)
    click.echo("\nWhat the doctor says:")
    for finding in doctor.findings:
        follows = f" (follows from {finding.consequence_of})" if finding.consequence_of else ""
        click.echo(f"- {finding.severity} {finding.code} {finding.name}{follows}: {finding.message}")


if __name__ == "__main__":
    main()
