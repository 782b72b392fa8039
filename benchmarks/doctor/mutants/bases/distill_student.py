# A small student learns from a teacher that was trained before it, by softened probabilities and by labels.
import sys

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(int(sys.argv[-1]) if len(sys.argv) > 1 else 0)
centers = torch.randn(12, 10) * 1.3


def points(n):
    which = torch.randint(12, (n,))
    return centers[which] + 0.7 * torch.randn(n, 10), which % 4


class Net(nn.Module):
    def __init__(self, width, depth):
        super().__init__()
        sizes = [10] + [width] * depth
        self.hidden = nn.ModuleList([nn.Linear(a, b) for a, b in zip(sizes[:-1], sizes[1:], strict=True)])
        self.out = nn.Linear(width, 4)

    def forward(self, x):
        for layer in self.hidden:
            x = F.relu(layer(x))
        return self.out(x)


def train_teacher():
    teacher = Net(96, 2)
    optimizer = torch.optim.Adam(teacher.parameters(), lr=3e-3)
    for _ in range(200):
        x, y = points(128)
        loss = F.cross_entropy(teacher(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return teacher


teacher = train_teacher()
teacher.eval()
student = Net(24, 2)
optimizer = torch.optim.Adam(student.parameters(), lr=3e-3)
T = 3.0
for step in range(300):
    x, y = points(96)
    with torch.no_grad():
        teacher_logits = teacher(x)
    student_logits = student(x)
    soft_loss = F.kl_div(
        F.log_softmax(student_logits / T, dim=1), F.softmax(teacher_logits / T, dim=1), reduction="batchmean"
    )
    hard_loss = F.cross_entropy(student_logits, y)
    loss = 0.7 * T * T * soft_loss + 0.3 * hard_loss
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 75 == 0:
        print(f"step {step} soft {soft_loss.item():.4f} hard {hard_loss.item():.4f}")
student.eval()
x, y = points(2000)
with torch.no_grad():
    print(f"metric {(student(x).argmax(dim=1) == y).float().mean().item():.4f}")
