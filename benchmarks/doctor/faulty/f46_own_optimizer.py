# An optimizer of our own. After a public report: pytorch/pytorch#118115.
import argparse

import torch
from torch import nn


class Adamish(torch.optim.Optimizer):
    def __init__(self, params, lr=1e-3, betas=(0.9, 0.99), eps=1e-8, fixed=False):
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps})
        self.fixed = fixed

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["step"] = 0
                    state["exp_avg"] = torch.zeros(p.shape)
                    state["exp_avg_sq"] = torch.zeros(p.shape)
                state["step"] += 1
                m, v = state["exp_avg"], state["exp_avg_sq"]
                m.lerp_(p.grad, 1 - beta1)
                v.mul_(beta2).addcmul_(p.grad, p.grad, value=1 - beta2)
                rate = group["lr"] * (1 - beta2 ** state["step"]) ** 0.5 / (1 - beta1 ** state["step"])
                target = p if self.fixed else p.contiguous()
                target.addcdiv_(m, v.sqrt().add_(group["eps"]), value=-rate)


class Tied(nn.Module):
    """The decoder starts as the encoder's transpose and goes its own way."""

    def __init__(self):
        super().__init__()
        self.encode = nn.Linear(30, 10)
        self.decode = nn.Linear(10, 30)
        self.decode.weight = nn.Parameter(self.encode.weight.detach().clone().t())

    def forward(self, x):
        return self.decode(torch.tanh(self.encode(x)))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--fixed", action="store_true", help="run the repaired version")
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    mixing = torch.randn(6, 30)
    autoencoder = Tied()
    optimizer = Adamish(autoencoder.parameters(), lr=5e-3, fixed=args.fixed)
    before = autoencoder.decode.weight.detach().clone()
    for step in range(80):
        x = torch.randn(40, 6) @ mixing / 3
        loss = nn.functional.mse_loss(autoencoder(x), x)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 20 == 0:
            print(step, loss.item())
    print("decoder moved by", (autoencoder.decode.weight - before).abs().max().item())
