# Masked words: a pooler that this task does not use, padding without a vector, and labels on a tenth of the tokens.
import argparse

import torch
from torch import nn
from torch.nn import functional as F

VOCAB, PAD, MASK = 50, 0, 1


class Bert(nn.Module):
    def __init__(self, dim=40):
        super().__init__()
        self.word = nn.Embedding(VOCAB, dim, padding_idx=PAD)
        self.place = nn.Embedding(20, dim)
        layer = nn.TransformerEncoderLayer(dim, 4, 2 * dim, dropout=0.1, activation="gelu", batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.pooler = nn.Linear(dim, dim)
        self.mlm = nn.Linear(dim, VOCAB)

    def forward(self, ids, pooled=False):
        states = self.word(ids) + self.place.weight[: ids.shape[1]]
        states = self.encoder(states, src_key_padding_mask=ids == PAD)
        if pooled:
            return torch.tanh(self.pooler(states[:, 0]))
        return self.mlm(states)


def batch(n):
    ids = (torch.randint(2, VOCAB, (n, 1)) + torch.arange(20)) % (VOCAB - 2) + 2
    lengths = torch.randint(8, 21, (n, 1))
    ids = ids.masked_fill(torch.arange(20) >= lengths, PAD)
    chosen = (torch.rand(ids.shape) < 0.15) & (ids != PAD)
    chosen[:, 0] = True
    return ids.masked_fill(chosen, MASK), ids.masked_fill(~chosen, -100)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=0)
    torch.manual_seed(parser.parse_args().seed)
    bert = Bert()
    optimizer = torch.optim.AdamW(bert.parameters(), lr=2e-3)
    for step in range(80):
        ids, labels = batch(24)
        loss = F.cross_entropy(bert(ids).flatten(0, 1), labels.flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(bert.parameters(), 1.0)
        optimizer.step()
        if step % 16 == 0:
            print(step, loss.item())
