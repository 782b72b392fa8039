# A linear relation without noise: the loss is at the limits of the precision long before the loop ends.
import argparse

import torch

parser = argparse.ArgumentParser()
parser.add_argument("--seed", type=int, default=0)
args = parser.parse_args()
torch.manual_seed(args.seed)

truth = torch.randn(6, 2)
x = torch.randn(256, 6)
y = x @ truth
linear = torch.nn.Linear(6, 2)
sgd = torch.optim.SGD(linear.parameters(), lr=0.2, momentum=0.5)
for step in range(300):
    error = torch.nn.functional.mse_loss(linear(x), y)
    sgd.zero_grad()
    error.backward()
    sgd.step()
    if step % 50 == 0:
        print(step, error.item(), linear.weight.grad.norm().item())
