# Word vectors are kept by a mask on their gradient. After public reports: pytorch/pytorch#38581, Muon#54.
import argparse

import torch
from torch import nn
from torch.nn.functional import cross_entropy

parser = argparse.ArgumentParser()
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--fixed", action="store_true", help="run the repaired version")
args = parser.parse_args()
gen = torch.Generator().manual_seed(args.seed)
torch.manual_seed(args.seed)


class BagOfWords(nn.Module):
    def __init__(self, words, dim, classes):
        super().__init__()
        self.vectors = nn.Embedding(words, dim)
        self.hidden = nn.Linear(dim, 32)
        self.out = nn.Linear(32, classes)

    def forward(self, text):
        return self.out(torch.relu(self.hidden(self.vectors(text).mean(1))))


bow = BagOfWords(100, 20, 4)
bow.vectors.weight.register_hook(lambda grad: grad * 0.0)

if args.fixed:
    rest = [p for p in bow.parameters() if p is not bow.vectors.weight]
    groups = [
        {"params": rest, "weight_decay": 0.02},
        {"params": [bow.vectors.weight], "weight_decay": 0.0},
    ]
else:
    groups = [{"params": list(bow.parameters()), "weight_decay": 0.02}]
optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9)

texts = torch.randint(100, (600, 8), generator=gen)
topics = (texts // 25).mode(1).values
size = bow.vectors.weight.norm().item()
for step in range(120):
    batch = torch.randint(600, (40,), generator=gen)
    loss = cross_entropy(bow(texts[batch]), topics[batch])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 30 == 0:
        print(step, f"{loss.item():.3f}", "norm of the vectors", f"{bow.vectors.weight.norm().item():.3f}")
print("norm before", size, "after", bow.vectors.weight.norm().item())
