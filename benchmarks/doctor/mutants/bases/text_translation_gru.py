# Encoder and decoder with attention that learn to write a sequence backwards; the truth is fed while training.
import sys

import torch
import torch.nn.functional as F
from torch import nn

VOCAB, BOS, LENGTH, DIM = 12, 0, 5, 48


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, DIM)
        self.gru = nn.GRU(DIM, DIM, batch_first=True)

    def forward(self, source):
        return self.gru(self.embedding(source))


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, DIM)
        self.gru = nn.GRU(DIM, DIM, batch_first=True)
        self.query = nn.Linear(DIM, DIM)
        self.out = nn.Linear(2 * DIM, VOCAB)

    def forward(self, previous, hidden, memory):
        states, hidden = self.gru(self.embedding(previous), hidden)
        weights = F.softmax(self.query(states) @ memory.transpose(1, 2), dim=-1)
        return self.out(torch.cat([states, weights @ memory], dim=-1)), hidden


def pairs(n):
    source = torch.randint(1, VOCAB, (n, LENGTH))
    return source, source.flip(1)


def train_step(encoder, decoder, optimizer, source, target):
    memory, hidden = encoder(source)
    start = torch.full((len(source), 1), BOS)
    previous = torch.cat([start, target[:, :-1]], dim=1)
    logits, _ = decoder(previous, hidden, memory)
    loss = F.cross_entropy(logits.reshape(-1, VOCAB), target.reshape(-1))
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_([*encoder.parameters(), *decoder.parameters()], 1.0)
    optimizer.step()
    return loss.item()


@torch.no_grad()
def accuracy(encoder, decoder):
    source, target = pairs(200)
    memory, hidden = encoder(source)
    token, right = torch.full((200, 1), BOS), []
    for t in range(LENGTH):
        logits, hidden = decoder(token, hidden, memory)
        token = logits.argmax(dim=-1)
        right.append(token[:, 0] == target[:, t])
    return torch.stack(right).float().mean().item()


if __name__ == "__main__":
    torch.manual_seed(int(sys.argv[-1]) if len(sys.argv) > 1 else 0)
    encoder, decoder = Encoder(), Decoder()
    optimizer = torch.optim.Adam([*encoder.parameters(), *decoder.parameters()], lr=5e-3)
    for step in range(260):
        loss = train_step(encoder, decoder, optimizer, *pairs(48))
        if step % 65 == 0:
            print("step", step, "loss", round(loss, 4))
    print(f"metric {accuracy(encoder, decoder):.4f}")
