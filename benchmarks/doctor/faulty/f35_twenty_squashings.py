# A deep classifier. After public reports: AutoTrainer (Gradient_Vanish_Case), StackOverflow 46270122.
import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--depth", type=int, default=20)
parser.add_argument("--fixed", action="store_true", help="run the repaired version")
args = parser.parse_args()
torch.manual_seed(args.seed)


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x):
        if args.fixed:
            return x + 0.3 * torch.relu(self.linear(x))
        return torch.sigmoid(self.linear(x))


digits = load_digits()
x = torch.tensor(digits.data, dtype=torch.float32) / 16
y = torch.tensor(digits.target)
deep = nn.Sequential(nn.Linear(64, 32), *[Block(32) for _ in range(args.depth)], nn.Linear(32, 10))
sgd = torch.optim.SGD(deep.parameters(), lr=0.02, momentum=0.9)
for step in range(150):
    rows = torch.randint(len(x), (64,))
    loss = nn.functional.cross_entropy(deep(x[rows]), y[rows])
    sgd.zero_grad()
    loss.backward()
    sgd.step()
    if step % 30 == 0:
        print(step, loss.item(), "first layer", deep[0].weight.grad.norm().item())
