# Domain adaptation: the features have to tell the class and must not tell the domain; a gradient is reversed.
import sys

import torch
import torch.nn as nn
import torch.nn.functional as F


class Reverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, strength):
        ctx.strength = strength
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad_output):
        return -ctx.strength * grad_output, None


class DANN(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(nn.Linear(8, 48), nn.ReLU(), nn.Linear(48, 16), nn.ReLU())
        self.label = nn.Linear(16, 3)
        self.domain = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, x, strength):
        h = self.features(x)
        return self.label(h), self.domain(Reverse.apply(h, strength)).squeeze(1)


torch.manual_seed(int(sys.argv[-1]) if len(sys.argv) > 1 else 0)
centers = torch.randn(3, 6) * 1.5


def draw(n, domain):
    kind = torch.randint(3, (n,))
    useful = centers[kind] + 0.8 * torch.randn(n, 6)
    if domain == 0:
        style = torch.stack([kind.float() - 1, kind.float() - 1], dim=1) + 0.3 * torch.randn(n, 2)
    else:
        style = 4 + torch.randn(n, 2)
    return torch.cat([useful, style], dim=1), kind


model = DANN()
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
for step in range(300):
    source, kind = draw(64, 0)
    target, _ = draw(64, 1)
    strength = 0.5 * min(1.0, step / 150)
    label_out, source_domain = model(source, strength)
    _, target_domain = model(target, strength)
    class_loss = F.cross_entropy(label_out, kind)
    domain_out = torch.cat([source_domain, target_domain])
    domain_truth = torch.cat([torch.zeros(64), torch.ones(64)])
    domain_loss = F.binary_cross_entropy_with_logits(domain_out, domain_truth)
    loss = class_loss + domain_loss
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 60 == 0:
        print(f"{step} class {class_loss.item():.4f} domain {domain_loss.item():.4f}")
with torch.no_grad():
    source, kind = draw(1000, 0)
    print(f"metric {(model(source, 0.0)[0].argmax(1) == kind).float().mean().item():.4f}")
