# A character model with accumulated gradients. After public reports: nanoGPT#168, nanoGPT#206, verl#3332.
import argparse

import torch
from torch import nn
from torch.nn import functional as F

parser = argparse.ArgumentParser()
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--fixed", action="store_true", help="run the repaired version")
parser.add_argument("--accumulate", type=int, default=8)
cfg = parser.parse_args()
torch.manual_seed(cfg.seed)

text = "the quick brown fox jumps over the lazy dog while the small cat sleeps under the warm sun. " * 40
letters = sorted(set(text))
encoded = torch.tensor([letters.index(c) for c in text])
context = 16


class CharModel(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.wte = nn.Embedding(size, 32)
        self.rnn = nn.GRU(32, 48, batch_first=True)
        self.lm_head = nn.Linear(48, size)

    def forward(self, idx, targets):
        h, _ = self.rnn(self.wte(idx))
        logits = self.lm_head(h)
        return F.cross_entropy(logits.view(-1, logits.size(-1)), targets.reshape(-1))


def get_batch(rows=4):
    at = torch.randint(len(encoded) - context - 1, (rows,))
    x = torch.stack([encoded[i : i + context] for i in at.tolist()])
    y = torch.stack([encoded[i + 1 : i + 1 + context] for i in at.tolist()])
    return x, y


model = CharModel(len(letters))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
for update in range(30):
    optimizer.zero_grad(set_to_none=True)
    total = 0.0
    for _ in range(cfg.accumulate):
        xb, yb = get_batch()
        loss = model(xb, yb)
        total += loss.item() / cfg.accumulate
        if cfg.fixed:
            loss = loss / cfg.accumulate
        loss.backward()
    optimizer.step()
    if update % 5 == 0:
        print(f"update {update}: loss {total:.4f}")
