"""A planted fault: the head is replaced after the optimizer was made."""

import torch
from torch import nn
from torch.nn import functional as F

from anybatch.demo.corpus import read_sources

torch.manual_seed(0)
text = torch.tensor(list(read_sources().train[:1_000_000]))
model = nn.Sequential(
    nn.Embedding(256, 32),
    nn.Flatten(),
    nn.Linear(8 * 32, 64),
    nn.ReLU(),
    nn.Linear(64, 1000),
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model[4] = nn.Linear(64, 256)  # a byte has 256 values, not 1000

for update in range(1, 121):
    starts = torch.randint(len(text) - 9, (64,))
    rows = text[starts[:, None] + torch.arange(9)]
    loss = F.cross_entropy(model(rows[:, :8]), rows[:, 8])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if update % 40 == 0:
        print(f"update {update}: loss {loss.item():.3f}")
