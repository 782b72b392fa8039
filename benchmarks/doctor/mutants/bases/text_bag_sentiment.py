# Sentiment of made-up reviews from the mean of word vectors.
import argparse
import random

import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--seed", type=int, default=0)
options = parser.parse_args()
random.seed(options.seed)
torch.manual_seed(options.seed)

good = [f"good{i}" for i in range(12)]
bad = [f"bad{i}" for i in range(12)]
plain = [f"word{i}" for i in range(60)]
vocabulary = {word: i for i, word in enumerate(good + bad + plain)}


def review():
    label = random.randrange(2)
    mood = good if label else bad
    other = bad if label else good
    words = random.choices(mood, k=3) + random.choices(other, k=1) + random.choices(plain, k=random.randint(4, 10))
    random.shuffle(words)
    return words, label


def batchify(reviews):
    flat, offsets, labels = [], [], []
    for words, label in reviews:
        offsets.append(len(flat))
        flat += [vocabulary[word] for word in words]
        labels.append(label)
    return torch.tensor(flat), torch.tensor(offsets), torch.tensor(labels).float()


class Sentiment(nn.Module):
    def __init__(self, words, dim=16):
        super().__init__()
        self.bag = nn.EmbeddingBag(words, dim, mode="mean")
        self.hidden = nn.Linear(dim, 16)
        self.score = nn.Linear(16, 1)

    def forward(self, flat, offsets):
        return self.score(torch.tanh(self.hidden(self.bag(flat, offsets)))).squeeze(1)


train = [review() for _ in range(1600)]
test = [review() for _ in range(400)]
model = Sentiment(len(vocabulary))
criterion = nn.BCEWithLogitsLoss()
optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
for epoch in range(5):
    random.shuffle(train)
    total = 0
    for start in range(0, len(train), 32):
        flat, offsets, labels = batchify(train[start : start + 32])
        loss = criterion(model(flat, offsets), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.item()
    print(f"epoch {epoch + 1}: {total / (len(train) / 32):.4f}")
with torch.no_grad():
    flat, offsets, labels = batchify(test)
    accuracy = ((model(flat, offsets) > 0).float() == labels).float().mean()
print(f"metric {accuracy:.4f}")
