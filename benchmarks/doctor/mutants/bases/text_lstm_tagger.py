# Tags each word of sentences of different lengths with an LSTM; padding does not count.
import sys

import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence

PAD = 0
WORDS, TAGS = 30, 4


def sentence():
    length = int(torch.randint(4, 12, (1,)))
    words = torch.randint(1, WORDS, (length,))
    previous = torch.cat([torch.tensor([0]), words[:-1]])
    return words, (words % 2) * 2 + (previous % 2)


def collate(items):
    lengths = torch.tensor([len(words) for words, _ in items])
    words = pad_sequence([w for w, _ in items], batch_first=True, padding_value=PAD)
    tags = pad_sequence([t for _, t in items], batch_first=True, padding_value=-100)
    return words, tags, lengths


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(WORDS, 24, padding_idx=PAD)
        self.lstm = nn.LSTM(24, 32, batch_first=True, bidirectional=True)
        self.linear = nn.Linear(64, TAGS)

    def forward(self, words, lengths):
        packed = pack_padded_sequence(self.embedding(words), lengths, batch_first=True, enforce_sorted=False)
        hidden, _ = pad_packed_sequence(self.lstm(packed)[0], batch_first=True)
        return self.linear(hidden)


def main():
    torch.manual_seed(int(sys.argv[-1]) if len(sys.argv) > 1 else 0)
    tagger = Tagger()
    loss_function = nn.CrossEntropyLoss(ignore_index=-100)
    optimizer = torch.optim.Adam(tagger.parameters(), lr=0.01)
    for step in range(120):
        words, tags, lengths = collate([sentence() for _ in range(24)])
        tagger.zero_grad()
        scores = tagger(words, lengths)
        loss = loss_function(scores.transpose(1, 2), tags)
        loss.backward()
        optimizer.step()
        if step % 30 == 0:
            print(f"{step}\t{loss.item():.4f}")
    words, tags, lengths = collate([sentence() for _ in range(200)])
    with torch.no_grad():
        guess = tagger(words, lengths).argmax(dim=-1)
    valid = tags != -100
    print(f"metric {(guess[valid] == tags[valid]).float().mean().item():.4f}")


main()
