"""A batch that is larger than the memory that it gets."""

import torch

import anybatch
from anybatch.demo.corpus import read_sources
from anybatch.demo.transformer import make_model, next_byte_loss

text = torch.tensor(list(read_sources().train[:1_000_000]))
draw = torch.Generator().manual_seed(0)
model = make_model(seed=0)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
step = anybatch.TrainStep(
    model, next_byte_loss, optimizer, memory="20MiB", clip_norm=1.0
)

for update in range(1, 31):
    starts = torch.randint(len(text) - 129, (37,), generator=draw)
    rows = text[starts[:, None] + torch.arange(129)]
    out = step({"x": rows[:, :-1], "y": rows[:, 1:]})
    if update % 10 == 0 or update == 1:
        print(f"update {update:2}: loss {out.loss:.3f}, ", end="")
        print(f"in {out.micro_batches} micro-batches")
