# Tells five chirps apart by their spectrogram, normalised by the mean and deviation of the training set.
import sys

import torch
import torch.nn as nn
import torch.nn.functional as F


def waves(n):
    label = torch.randint(5, (n,))
    t = torch.linspace(0, 1, 512)
    slope = (label.float() - 2) * 40
    wave = torch.sin(6.283 * (60 * t + slope[:, None] * t**2 / 2) + 6.28 * torch.rand(n, 1)) + 0.8 * torch.randn(n, 512)
    spectrum = torch.stft(1000 * wave, 64, hop_length=32, window=torch.hann_window(64), return_complex=True).abs()
    return spectrum, label


class KeywordNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv1d(33, 32, 3, padding=1)
        self.bn1 = nn.BatchNorm1d(32)
        self.conv2 = nn.Conv1d(32, 32, 3, padding=1)
        self.bn2 = nn.BatchNorm1d(32)
        self.fc = nn.Linear(32 * 4, 5)

    def forward(self, x):
        x = F.relu(self.bn1(self.conv1(x)))
        x = F.max_pool1d(x, 2)
        x = F.relu(self.bn2(self.conv2(x)))
        x = F.max_pool1d(x, 2)
        return self.fc(x.flatten(1))


torch.manual_seed(int(sys.argv[-1]) if len(sys.argv) > 1 else 0)
train_x, train_y = waves(1000)
test_x, test_y = waves(300)
mean, std = train_x.mean(), train_x.std()
train_x = (train_x - mean) / std
test_x = (test_x - mean) / std
model = KeywordNet()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, weight_decay=1e-4)
scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=5e-3, total_steps=160)
step = 0
for epoch in range(8):
    model.train()
    order = torch.randperm(1000)
    for chunk in order.chunk(20):
        loss = F.cross_entropy(model(train_x[chunk]), train_y[chunk])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        step += 1
    model.eval()
    with torch.no_grad():
        score = (model(test_x).argmax(1) == test_y).float().mean().item()
    print(f"epoch {epoch}, step {step}, loss {loss.item():.3f}, accuracy {score:.3f}")
print(f"metric {score:.4f}")
