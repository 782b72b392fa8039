"""A sequence of 2000 steps, with the gradient of all of them."""

import torch
from torch import nn
from torch.nn import functional as F

import anybatch
from anybatch.demo.corpus import read_sources


class Characters(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(256, 64)
        self.rnn = nn.LSTM(64, 64, batch_first=True)
        self.head = nn.Linear(64, 256)

    def forward(self, text, state):
        hidden, state = self.rnn(self.embedding(text), state)
        return self.head(hidden), state


def chunk_loss(model, chunk, state):
    logits, state = model(chunk["x"], state)
    return F.cross_entropy(logits.flatten(0, 1), chunk["y"].flatten()), state


torch.manual_seed(0)
model = Characters()
text = torch.tensor(list(read_sources().train[: 4 * 2001])).view(4, 2001)
batch = {"x": text[:, :-1], "y": text[:, 1:]}
over_time = anybatch.OverTime(chunk_loss, lambda model, batch: None)


def plain():
    chunk_loss(model, batch, None)[0].backward()


at_once = anybatch.measure(plain)
expected = [parameter.grad.clone() for parameter in model.parameters()]
model.zero_grad()
in_chunks = anybatch.measure(
    lambda: anybatch.backward(model, over_time, batch)
)
pairs = zip(model.parameters(), expected, strict=True)
error = max((p.grad - g).norm() / g.norm() for p, g in pairs)
print(f"peak, all steps at once:  {at_once.peak_bytes / 2**20:5.1f} MiB")
print(f"peak, in chunks of time:  {in_chunks.peak_bytes / 2**20:5.1f} MiB")
print(f"relative difference of the gradients: {error:.0e}")
