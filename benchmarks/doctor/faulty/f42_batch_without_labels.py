# Answers in dialogues, and their topics, weighted by learned variances. After public reports: pytorch/pytorch#70348,
# OpenRLHF#583.
import argparse

import torch
import torch.nn.functional as F
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--fixed", action="store_true", help="run the repaired version")
args = parser.parse_args()
torch.manual_seed(args.seed)

IGNORE = -100
dialogues = torch.randint(2, 40, (200, 14))
dialogues[:, 7:] = (dialogues[:, :7] + 1) % 40
topics = dialogues[:, 0] // 10
labels = dialogues.clone()
labels[:, :7] = IGNORE
labels[92:96] = IGNORE  # cut off before the answer begins


class Answerer(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(40, 32)
        self.gru = nn.GRU(32, 64, batch_first=True)
        self.vocabulary = nn.Linear(64, 40)
        self.topic = nn.Linear(64, 4)
        self.log_variance = nn.Parameter(torch.zeros(2))

    def forward(self, x):
        states, last = self.gru(self.words(x))
        return self.vocabulary(states), last[0]


answerer = Answerer()
optimizer = torch.optim.AdamW(answerer.parameters(), lr=3e-3)

for step, start in enumerate(range(0, 200, 4)):
    x, y = dialogues[start : start + 4], labels[start : start + 4]
    scores, pooled = answerer(x)
    logits = scores[:, :-1].flatten(0, 1)
    target = y[:, 1:].flatten()
    if args.fixed:
        known = (target != IGNORE).sum().clamp(min=1)
        answer_loss = F.cross_entropy(logits, target, ignore_index=IGNORE, reduction="sum") / known
    else:
        answer_loss = F.cross_entropy(logits, target, ignore_index=IGNORE)
    topic_loss = F.cross_entropy(answerer.topic(pooled), topics[start : start + 4])
    spread = answerer.log_variance
    loss = (-spread[0]).exp() * answer_loss + (-spread[1]).exp() * topic_loss + spread.sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 8 == 0:
        print(step, loss.item())
