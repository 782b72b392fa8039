# A recurrent language model that carries its state from one chunk of a long text to the next.
import argparse

import torch
from torch import nn

ap = argparse.ArgumentParser()
ap.add_argument("--seed", type=int, default=0)
torch.manual_seed(ap.parse_args().seed)

rules = {0: [1, 2], 1: [3], 2: [3, 4], 3: [5], 4: [5, 0], 5: [0]}
stream = [0]
for choice in torch.rand(9000).tolist():
    following = rules[stream[-1]]
    stream.append(following[int(choice * len(following))])
stream = torch.tensor(stream)
batch, chunk = 12, 18
usable = (len(stream) - 1) // (batch * chunk) * batch * chunk
inputs = stream[:usable].view(batch, -1)
targets = stream[1 : usable + 1].view(batch, -1)


class CharRNN(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(6, 16)
        self.rnn = nn.LSTM(16, 32, batch_first=True)
        self.drop = nn.Dropout(0.1)
        self.decode = nn.Linear(32, 6)

    def forward(self, ids, state):
        hidden, state = self.rnn(self.embed(ids), state)
        return self.decode(self.drop(hidden)), state


def repackage(state):
    return tuple(part.detach() for part in state)


model = CharRNN()
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
for epoch in range(4):
    model.train()
    state = (torch.zeros(1, batch, 32), torch.zeros(1, batch, 32))
    for start in range(0, inputs.shape[1] - chunk, chunk):
        x, y = inputs[:, start : start + chunk], targets[:, start : start + chunk]
        state = repackage(state)
        optimizer.zero_grad()
        logits, state = model(x, state)
        loss = criterion(logits.reshape(-1, 6), y.reshape(-1))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
    print(f"epoch {epoch} loss {loss.item():.4f}")
model.eval()
with torch.no_grad():
    logits, _ = model(inputs[:, -150:], (torch.zeros(1, batch, 32), torch.zeros(1, batch, 32)))
probability = logits.softmax(dim=-1)
allowed = torch.zeros(6, 6)
for source, following in rules.items():
    allowed[source, following] = 1
print(f"metric {(probability * allowed[inputs[:, -150:]]).sum(-1).mean().item():.4f}")
