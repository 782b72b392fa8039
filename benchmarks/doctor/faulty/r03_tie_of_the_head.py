# A language model whose head shares the weights of its embedding. After public reports: Megatron-LM#656,
# accelerate#993.
import argparse

import torch
from torch import nn
from torch.nn import functional as F


class SharedLM(nn.Module):
    def __init__(self, vocab, dim):
        super().__init__()
        self.embedding = nn.Embedding(vocab, dim)
        self.core = nn.GRU(dim, dim, batch_first=True)
        self.head = nn.Linear(dim, vocab, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids):
        return self.head(self.core(self.embedding(ids))[0])


def move(model, dtype):
    """Puts every parameter anew, as loaders of parts of a model do."""
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(parameter.detach().clone().to(dtype)))
    return model


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--fixed", action="store_true", help="run the repaired version")
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    lm = move(SharedLM(40, 32), torch.float32)
    if args.fixed:
        lm.head.weight = lm.embedding.weight
    optimizer = torch.optim.AdamW(lm.parameters(), lr=3e-3)
    for step in range(80):
        ids = (torch.randint(40, (16, 1)) + 3 * torch.arange(12)) % 40
        loss = F.cross_entropy(lm(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 20 == 0:
            print(step, loss.item())
    print("embedding and head differ by", (lm.embedding.weight - lm.head.weight).abs().max().item())


if __name__ == "__main__":
    main()
