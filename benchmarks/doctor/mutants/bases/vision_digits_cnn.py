# Classifies handwritten digits with a small convolutional network, in one plain script.
import sys

import torch
from sklearn.datasets import load_digits
from torch import nn

torch.manual_seed(int(sys.argv[-1]) if len(sys.argv) > 1 else 0)
digits = load_digits()
x = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) * 255 / 16
y = torch.tensor(digits.target)
x = x / 255
order = torch.randperm(len(x))
x, y = x[order], y[order]
train_x, train_y, test_x, test_y = x[:1400], y[:1400], x[1400:], y[1400:]

model = nn.Sequential(
    nn.Conv2d(1, 16, 3, padding=1),
    nn.BatchNorm2d(16),
    nn.ReLU(),
    nn.MaxPool2d(2),
    nn.Conv2d(16, 32, 3, padding=1),
    nn.BatchNorm2d(32),
    nn.ReLU(),
    nn.Flatten(),
    nn.Dropout(0.2),
    nn.Linear(32 * 16, 10),
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
criterion = nn.CrossEntropyLoss()

for epoch in range(4):
    model.train()
    perm = torch.randperm(len(train_x))
    for i in range(0, len(perm), 50):
        idx = perm[i : i + 50]
        optimizer.zero_grad()
        out = model(train_x[idx])
        loss = criterion(out, train_y[idx])
        loss.backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        accuracy = (model(test_x).argmax(1) == test_y).float().mean().item()
    print(f"epoch {epoch} loss {loss.item():.3f} accuracy {accuracy:.3f}")
print(f"metric {accuracy:.4f}")
