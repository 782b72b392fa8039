# Fine-tunes on texts of very different lengths. After public reports: transformers#35203, torchtune#1875,
# OpenNMT-py#2209.
import argparse

import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

PAD = -100


class Copier(nn.Module):
    def __init__(self, tokens=40, width=32):
        super().__init__()
        self.embedding = nn.Embedding(tokens, width)
        self.position = nn.Embedding(64, width)
        self.mixer = nn.TransformerEncoderLayer(width, 4, 64, dropout=0.0, batch_first=True)
        self.project = nn.Linear(width, tokens)

    def forward(self, ids):
        hidden = self.embedding(ids) + self.position.weight[: ids.shape[1]]
        causal = nn.Transformer.generate_square_subsequent_mask(ids.shape[1])
        return self.project(self.mixer(hidden, src_mask=causal, is_causal=True))


def collate(texts):
    ids = pad_sequence([t[:-1] for t in texts], batch_first=True)
    labels = pad_sequence([t[1:] for t in texts], batch_first=True, padding_value=PAD)
    return ids, labels


def corpus(count):
    made = []
    for k in range(count):
        length = 50 if k % 8 < 2 else int(torch.randint(3, 7, (1,)))
        start, stride = torch.randint(1, 40, (1,)), torch.randint(1, 4, (1,))
        made.append((start + stride * torch.arange(length)) % 40)
    return made


def train(seed, fixed, micro=4):
    torch.manual_seed(seed)
    model = Copier()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    loader = DataLoader(corpus(320), batch_size=2, collate_fn=collate)
    window = []
    for batch in loader:
        window.append(batch)
        if len(window) < micro:
            continue
        tokens = sum(int((labels != PAD).sum()) for _, labels in window)
        shown = 0.0
        for ids, labels in window:
            logits = model(ids).flatten(0, 1)
            if fixed:
                loss = nn.functional.cross_entropy(logits, labels.flatten(), ignore_index=PAD, reduction="sum") / tokens
            else:
                loss = nn.functional.cross_entropy(logits, labels.flatten(), ignore_index=PAD) / micro
            loss.backward()
            shown += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        print(f"{shown:.3f}", end=" ")
        window = []
    print()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--fixed", action="store_true", help="run the repaired version")
    args = parser.parse_args()
    train(args.seed, args.fixed)
