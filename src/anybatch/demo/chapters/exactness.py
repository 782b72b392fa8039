"""One batch, whole and in pieces of 8 texts; each text has its own length."""

import copy

import torch
from torch import nn
from torch.nn import functional as F

import anybatch

torch.manual_seed(0)
model = nn.Sequential(nn.Embedding(50, 32), nn.Linear(32, 50)).double()
tokens, labels = torch.randint(50, (37, 20)), torch.randint(50, (37, 20))
lengths = torch.randint(2, 21, (37, 1))
labels[torch.arange(20) >= lengths] = -100  # padding


def loss_fn(model, batch):
    return F.cross_entropy(
        model(batch["x"]).flatten(0, 1),
        batch["y"].flatten(),
        ignore_index=-100,
    )


def gradient(model):
    return torch.cat([p.grad.flatten() for p in model.parameters()])


def error(model):
    difference = gradient(model) - gradient(whole)
    return difference.norm() / gradient(whole).norm()


whole, loop, ours = (copy.deepcopy(model) for _ in range(3))
batch = {"x": tokens, "y": labels}
loss_fn(whole, batch).backward()
for i in range(0, 37, 8):  # what people write
    (
        loss_fn(loop, {name: rows[i : i + 8] for name, rows in batch.items()})
        / 5
    ).backward()
anybatch.backward(
    ours, loss_fn, batch, micro_batch_size=8, count=anybatch.count_tokens("y")
)
print(
    f"relative error: {error(loop):.1%} of the loop, {error(ours):.0e} here"
)
