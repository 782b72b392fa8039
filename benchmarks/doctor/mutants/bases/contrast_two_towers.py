# Pictures and captions in one space, with a learned temperature; the score is how often the right one is found.
import argparse
import math

import torch
from torch import nn
from torch.nn import functional as F


class ImageTower(nn.Module):
    def __init__(self, dim=24):
        super().__init__()
        self.conv = nn.Conv2d(1, 8, 3, stride=2, padding=1)
        self.fc = nn.Linear(8 * 16, dim)

    def forward(self, images):
        return self.fc(F.gelu(self.conv(images)).flatten(1))


class TextTower(nn.Module):
    def __init__(self, words, dim=24):
        super().__init__()
        self.embed = nn.Embedding(words, 24)
        self.fc = nn.Linear(24, dim)

    def forward(self, tokens):
        return self.fc(torch.tanh(self.embed(tokens).mean(dim=1)))


class Pairing(nn.Module):
    def __init__(self):
        super().__init__()
        self.image, self.text = ImageTower(), TextTower(16)
        self.logit_scale = nn.Parameter(torch.tensor(math.log(1 / 0.2)))

    def forward(self, images, tokens):
        image = F.normalize(self.image(images), dim=-1)
        text = F.normalize(self.text(tokens), dim=-1)
        return self.logit_scale.exp() * image @ text.t()


def contrastive_loss(logits):
    truth = torch.arange(len(logits))
    return (F.cross_entropy(logits, truth) + F.cross_entropy(logits.t(), truth)) / 2


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=0)
    torch.manual_seed(parser.parse_args().seed)
    patterns = torch.randn(16, 8, 8)

    def batch(n):
        tokens = torch.stack([torch.randperm(16)[:3] for _ in range(n)])
        images = patterns[tokens].mean(dim=1) + 0.15 * torch.randn(n, 8, 8)
        return images.unsqueeze(1), tokens

    model = Pairing()
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3, weight_decay=0.01)
    for step in range(160):
        images, tokens = batch(48)
        loss = contrastive_loss(model(images, tokens))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 40 == 0:
            print(f"step {step} loss {loss.item():.4f} scale {model.logit_scale.exp().item():.2f}")
    with torch.no_grad():
        logits = model(*batch(100))
    print(f"metric {(logits.argmax(dim=1) == torch.arange(100)).float().mean().item():.4f}")


main()
