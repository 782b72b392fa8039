# Keeps part of a network fixed while the rest trains. After a public report: PyTorch forum, topic 84911.
import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn

ap = argparse.ArgumentParser()
ap.add_argument("--seed", type=int, default=0)
ap.add_argument("--fixed", action="store_true", help="run the repaired version")
opt = ap.parse_args()
torch.manual_seed(opt.seed)

data = load_digits()
images = torch.tensor(data.data, dtype=torch.float32) / 16
classes = torch.tensor(data.target)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(64, 512)
        self.bn1 = nn.BatchNorm1d(512)
        self.fc2 = nn.Linear(512, 512)
        self.bn2 = nn.BatchNorm1d(512)
        self.fc3 = nn.Linear(512, 10)

    def forward(self, x):
        x = torch.relu(self.bn1(self.fc1(x)))
        x = torch.relu(self.bn2(self.fc2(x)))
        return self.fc3(x)


net = Net()
for name, parameter in net.named_parameters():
    # the norm layers should stay as they are
    if opt.fixed:
        parameter.requires_grad = "bn" not in name
    else:
        parameter.requires_grad = "bn" in name

sgd = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=0.01, momentum=0.5)
for step in range(90):
    index = torch.randperm(len(images))[:64]
    out = net(images[index])
    loss = nn.functional.cross_entropy(out, classes[index])
    sgd.zero_grad()
    loss.backward()
    sgd.step()
    if step % 15 == 0:
        accuracy = (out.argmax(1) == classes[index]).float().mean()
        print(f"step {step:3d} loss {loss.item():.3f} accuracy {accuracy.item():.2f}")
