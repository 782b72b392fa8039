# Recognises activities. After public reports: SciCo#2, Deep-learning-activity-recognition#10.
import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class ActivityNet(nn.Module):
    def __init__(self, channels, classes, fixed):
        super().__init__()
        self.conv = nn.Conv1d(channels, 16, 5)
        self.pool = nn.AdaptiveAvgPool1d(4)
        self.dense = nn.Linear(64, classes)
        self.softmax = nn.Identity() if fixed else nn.Softmax(dim=1)

    def forward(self, signal):
        hidden = self.pool(torch.relu(self.conv(signal))).flatten(1)
        return self.softmax(self.dense(hidden))


def recordings(n):
    activity = torch.randint(6, (n,))
    time = torch.linspace(0, 6.28, 50)
    signal = torch.stack([torch.sin((a + 1) * time + torch.rand(1) * 6.28) for a in activity.tolist()])
    return torch.stack([signal, signal.roll(5, 1), torch.randn(n, 50) * 0.3], 1), activity


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--fixed", action="store_true", help="run the repaired version")
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    loader = DataLoader(TensorDataset(*recordings(600)), batch_size=50, shuffle=True)
    net = ActivityNet(3, 6, args.fixed)
    loss_fn = nn.CrossEntropyLoss()
    optimizer = torch.optim.Adam(net.parameters(), lr=5e-3)
    for epoch in range(10):
        correct = 0
        for signal, activity in loader:
            optimizer.zero_grad()
            output = net(signal)
            loss = loss_fn(output, activity)
            loss.backward()
            optimizer.step()
            correct += (output.argmax(1) == activity).sum().item()
        print(epoch, f"loss {loss.item():.3f} accuracy {correct / 600:.3f}")


if __name__ == "__main__":
    main()
