# A property of small graphs: messages along edges, then the sum over the atoms of each molecule.
import sys

import torch
from torch import nn

KINDS = 4
WEIGHT = torch.tensor([1.0, -0.5, 2.0, 0.3])


def molecule():
    n = int(torch.randint(4, 9, (1,)))
    atoms = torch.randint(KINDS, (n,))
    bonds = [(i, int(torch.randint(i, (1,)))) for i in range(1, n)]
    value = WEIGHT[atoms].sum() + sum(0.8 for i, j in bonds if atoms[i] == atoms[j])
    return atoms, bonds, value


def collate(molecules):
    atoms, sources, targets, owner, values = [], [], [], [], []
    offset = 0
    for index, (kinds, bonds, value) in enumerate(molecules):
        atoms.append(kinds)
        for i, j in bonds:
            sources += [i + offset, j + offset]
            targets += [j + offset, i + offset]
        owner += [index] * len(kinds)
        values.append(value)
        offset += len(kinds)
    edges = torch.tensor([sources, targets])
    return torch.cat(atoms), edges, torch.tensor(owner), torch.stack(values)


class MessagePassing(nn.Module):
    def __init__(self, dim=24, rounds=2):
        super().__init__()
        self.embed = nn.Embedding(KINDS, dim)
        self.messages = nn.ModuleList([nn.Linear(2 * dim, dim) for _ in range(rounds)])
        self.updates = nn.ModuleList([nn.GRUCell(dim, dim) for _ in range(rounds)])
        self.readout = nn.Sequential(nn.Linear(dim, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, atoms, edges, owner, count):
        h = self.embed(atoms)
        for message, update in zip(self.messages, self.updates, strict=True):
            sent = torch.relu(message(torch.cat([h[edges[0]], h[edges[1]]], dim=1)))
            received = torch.zeros_like(h).index_add(0, edges[1], sent)
            h = update(received, h)
        per_atom = self.readout(h).squeeze(1)
        return torch.zeros(count).index_add(0, owner, per_atom)


torch.manual_seed(int(sys.argv[-1]) if len(sys.argv) > 1 else 0)
train = [molecule() for _ in range(500)]
test = collate([molecule() for _ in range(150)])
mean = torch.stack([value for _, _, value in train]).mean()
std = torch.stack([value for _, _, value in train]).std()
net = MessagePassing()
optimizer = torch.optim.Adam(net.parameters(), lr=3e-3)
for epoch in range(9):
    order = torch.randperm(len(train)).tolist()
    for start in range(0, len(order), 25):
        atoms, edges, owner, values = collate([train[i] for i in order[start : start + 25]])
        prediction = net(atoms, edges, owner, len(values))
        loss = nn.functional.mse_loss(prediction, (values - mean) / std)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"epoch {epoch} loss {loss.item():.4f}")
with torch.no_grad():
    prediction = net(*test[:3], 150) * std + mean
print(f"metric {1 - ((prediction - test[3]).pow(2).mean() / test[3].var()).item():.4f}")
