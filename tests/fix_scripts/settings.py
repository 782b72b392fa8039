"""Faults of one setting: a mode, a rate, a keyword."""

from fix_scripts.wiring import HEAD

FAULTY = {
    "mode of the evaluation before": (
        "EVAL_IN_TRAINING",
        HEAD
        + """
net = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 3))
optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)

def evaluate():
    net.eval()
    with torch.no_grad():
        return (net(x).argmax(1) == y).float().mean()

for epoch in range(6):
    for rows in torch.randperm(512).split(32):
        optimizer.zero_grad()
        F.cross_entropy(net(x[rows]), y[rows]).backward()
        optimizer.step()
    evaluate()
""",
        "    net.train()",
    ),
    "dropout in evaluation": (
        "DROPOUT_ALWAYS_ON",
        HEAD
        + """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(6, 32), nn.Linear(32, 3)
    def forward(self, x):
        return self.head(F.dropout(self.body(x).relu(), 0.3))

net = Net()
optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
for epoch in range(4):
    net.train()
    for rows in torch.randperm(512).split(32):
        optimizer.zero_grad()
        F.cross_entropy(net(x[rows]), y[rows]).backward()
        optimizer.step()
    net.eval()
    with torch.no_grad():
        net(x[:64])
        net(x[64:128])
""",
        "        return self.head(F.dropout(self.body(x).relu(), 0.3, training=self.training))",
    ),
    "momentum of another library": (
        "BN_MOMENTUM",
        HEAD
        + """
net = nn.Sequential(nn.Linear(6, 32), nn.BatchNorm1d(32, momentum=0.99), nn.ReLU(), nn.Linear(32, 3))
optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
for _ in range(60):
    rows = torch.randint(512, (32,))
    optimizer.zero_grad()
    F.cross_entropy(net(x[rows]), y[rows]).backward()
    optimizer.step()
""",
        "net = nn.Sequential(nn.Linear(6, 32), nn.BatchNorm1d(32, momentum=0.01), nn.ReLU(), nn.Linear(32, 3))",
    ),
    "rate too low": (
        "LR_TOO_LOW",
        HEAD
        + """
net = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))
optimizer = torch.optim.Adam(net.parameters(), lr=1e-9, weight_decay=1e-4)
for _ in range(60):
    rows = torch.randint(512, (32,))
    optimizer.zero_grad()
    F.cross_entropy(net(x[rows]), y[rows]).backward()
    optimizer.step()
""",
        "optimizer = torch.optim.Adam(net.parameters(), lr=0.001, weight_decay=1e-4)",
    ),
    "rate too high, from a mapping": (
        "LR_TOO_HIGH",
        HEAD
        + """
options = {"lr": 30.0, "weight_decay": 1e-4}
net = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 3))
optimizer = torch.optim.SGD(net.parameters(), **options)
for _ in range(60):
    rows = torch.randint(512, (32,))
    optimizer.zero_grad()
    F.cross_entropy(net(x[rows]), y[rows]).backward()
    optimizer.step()
""",
        'optimizer = torch.optim.SGD(net.parameters(), **{**options, "lr": ',
    ),
    "statistics of a frozen part": (
        "FROZEN_BN_DRIFT",
        HEAD
        + """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 32), nn.BatchNorm1d(32), nn.ReLU())
        self.head = nn.Linear(32, 3)
    def forward(self, x):
        return self.head(self.body(x))

net = Net()
net.body.requires_grad_(False)
optimizer = torch.optim.Adam(net.head.parameters(), lr=1e-2)
for epoch in range(5):
    net.train()
    for rows in torch.randperm(512).split(32):
        optimizer.zero_grad()
        F.cross_entropy(net(x[rows] * 3 + 1), y[rows]).backward()
        optimizer.step()
""",
        "    net.body[1].eval()",
    ),
    "mode of a plateau": (
        "PLATEAU_MODE",
        HEAD
        + """
net = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))
optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=1)
for epoch in range(14):
    for rows in torch.randperm(512).split(64):
        optimizer.zero_grad()
        F.cross_entropy(net(x[rows]), y[rows]).backward()
        optimizer.step()
    with torch.no_grad():
        accuracy = (net(x).argmax(1) == y).float().mean().item()
    plateau.step(accuracy)
""",
        'plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=1, mode="max")',
    ),
    "sorted data": (
        "DATA_ORDER",
        HEAD
        + """
from torch.utils.data import DataLoader, TensorDataset
order = y.argsort()
loader = DataLoader(TensorDataset(x[order], y[order]), batch_size=16)
net = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))
optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
for epoch in range(3):
    for xb, yb in loader:
        optimizer.zero_grad()
        F.cross_entropy(net(xb), yb).backward()
        optimizer.step()
""",
        "loader = DataLoader(TensorDataset(x[order], y[order]), batch_size=16, shuffle=True)",
    ),
    "labels that are no integers": (
        "DTYPE_MISMATCH",
        HEAD
        + """
net = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))
optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)

def loss_of(rows):
    labels = y[rows].float()
    return F.cross_entropy(net(x[rows]), labels)

for _ in range(60):
    optimizer.zero_grad()
    loss_of(torch.randint(512, (32,))).backward()
    optimizer.step()
""",
        "    labels = labels.long()",
    ),
    "no constructor of nn.Module": (
        "MODULE_NOT_READY",
        HEAD
        + """
class Net(nn.Module):
    def __init__(self, width):
        \"\"\"Two layers.\"\"\"
        self.body, self.head = nn.Linear(6, width), nn.Linear(width, 3)
    def forward(self, x):
        return self.head(torch.tanh(self.body(x)))

net = Net(16)
optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
for _ in range(60):
    rows = torch.randint(512, (32,))
    optimizer.zero_grad()
    F.cross_entropy(net(x[rows]), y[rows]).backward()
    optimizer.step()
""",
        "        super().__init__()",
    ),
}
