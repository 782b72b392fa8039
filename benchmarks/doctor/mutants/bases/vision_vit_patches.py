# A vision transformer on patches of handwritten digits, with warm-up and decay of the learning rate.
import math
import sys

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn


class Attention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x):
        b, n, d = x.shape
        q, k, v = self.qkv(x).view(b, n, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        weights = torch.softmax(q @ k.transpose(-2, -1) / math.sqrt(d // self.heads), dim=-1)
        return self.proj((weights @ v).transpose(1, 2).reshape(b, n, d))


class Layer(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.norm1 = nn.LayerNorm(dim)
        self.attention = Attention(dim, heads)
        self.norm2 = nn.LayerNorm(dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class ViT(nn.Module):
    def __init__(self, dim=32, depth=2, heads=4):
        super().__init__()
        self.embed = nn.Linear(4, dim)
        self.position = nn.Parameter(0.02 * torch.randn(1, 17, dim))
        self.token = nn.Parameter(torch.zeros(1, 1, dim))
        self.layers = nn.ModuleList([Layer(dim, heads) for _ in range(depth)])
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, 10)

    def forward(self, images):
        patches = images.unfold(1, 2, 2).unfold(2, 2, 2).reshape(len(images), 16, 4)
        x = torch.cat([self.token.expand(len(images), -1, -1), self.embed(patches)], dim=1) + self.position
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x[:, 0]))


def rate(step, warmup=20, total=200):
    if step < warmup:
        return (step + 1) / warmup
    return 0.5 * (1 + math.cos(math.pi * (step - warmup) / (total - warmup)))


torch.manual_seed(int(sys.argv[-1]) if len(sys.argv) > 1 else 0)
data = load_digits()
images = torch.tensor(data.images).float() / 16 - 0.5
labels = torch.tensor(data.target)
train, test = torch.randperm(len(images)).split([1300, 497])
model = ViT()
optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3, weight_decay=0.05)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lr_lambda=rate)
for step in range(200):
    batch = train[torch.randint(len(train), (48,))]
    loss = F.cross_entropy(model(images[batch]), labels[batch])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    scheduler.step()
    if step % 50 == 0:
        print(step, loss.item())
model.eval()
with torch.no_grad():
    print(f"metric {(model(images[test]).argmax(-1) == labels[test]).float().mean().item():.4f}")
