# Classifies the nodes of one graph with a graph convolutional network; few nodes have labels.
import sys

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(int(sys.argv[-1]) if len(sys.argv) > 1 else 0)
NODES, CLASSES = 240, 4
labels = torch.arange(NODES) % CLASSES
same = labels[:, None] == labels[None, :]
edges = torch.rand(NODES, NODES) < torch.where(same, 0.12, 0.015)
adjacency = (edges | edges.t()).float()
adjacency = adjacency + torch.eye(NODES)
degree = adjacency.sum(dim=1).pow(-0.5)
normalised = degree[:, None] * adjacency * degree[None, :]
features = F.one_hot(labels, CLASSES).float() @ torch.randn(CLASSES, 16) * 0.5 + torch.randn(NODES, 16)
order = torch.randperm(NODES)
train_mask, test_mask = order[:60], order[60:]


class GCN(nn.Module):
    def __init__(self, inside, hidden, outside):
        super().__init__()
        self.lin1 = nn.Linear(inside, hidden)
        self.lin2 = nn.Linear(hidden, outside)

    def forward(self, x, adj):
        x = F.relu(adj @ self.lin1(x))
        x = F.dropout(x, p=0.3, training=self.training)
        return adj @ self.lin2(x)


model = GCN(16, 32, CLASSES)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4)
for epoch in range(150):
    model.train()
    optimizer.zero_grad()
    logits = model(features, normalised)
    loss = F.cross_entropy(logits[train_mask], labels[train_mask])
    loss.backward()
    optimizer.step()
    if epoch % 50 == 0:
        model.eval()
        with torch.no_grad():
            guess = model(features, normalised).argmax(dim=1)
        print(f"epoch {epoch} loss {loss.item():.3f} test {(guess == labels)[test_mask].float().mean().item():.3f}")
model.eval()
with torch.no_grad():
    guess = model(features, normalised).argmax(dim=1)
print(f"metric {(guess == labels)[test_mask].float().mean().item():.4f}")
