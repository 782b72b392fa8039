"""Faults of what is registered and optimized, and of the order of calls."""

HEAD = """
import torch
from torch import nn
import torch.nn.functional as F

torch.manual_seed(0)
x = torch.randn(512, 6)
y = x[:, :3].argmax(1)
"""

FAULTY = {
    "group of the head": (
        "OPT_PARAM_MISSING",
        HEAD
        + """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(6, 16), nn.Linear(16, 3)
    def forward(self, x):
        return self.head(torch.tanh(self.body(x)))

def main(steps):
    net = Net()
    optimizer = torch.optim.Adam( net.body.parameters(), lr = 1e-2 )  # Adam
    for _ in range(steps):
        rows = torch.randint(512, (32,))
        optimizer.zero_grad()
        F.cross_entropy(net(x[rows]), y[rows]).backward()
        optimizer.step()

main(60)
""",
        "    optimizer = torch.optim.Adam( net.parameters(), lr = 1e-2 )  # Adam",
    ),
    "two models": (
        "OPT_PARAM_MISSING",
        HEAD
        + """
encoder = nn.Sequential(nn.Linear(6, 16), nn.Tanh())
head = nn.Linear(16, 3)
optimizer = torch.optim.Adam(encoder.parameters(), lr=1e-2)
for _ in range(60):
    rows = torch.randint(512, (32,))
    optimizer.zero_grad()
    F.cross_entropy(head(encoder(x[rows])), y[rows]).backward()
    optimizer.step()
""",
        'optimizer.add_param_group({"params": head.parameters()})',
    ),
    "list of layers": (
        "OPT_PARAM_UNREGISTERED",
        HEAD.replace("from torch import nn\n", "")
        + """
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = [torch.nn.Linear(6, 6) for _ in range(2)]  # two
        self.head = torch.nn.Linear(6, 3)
    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(x)

net = Net()
optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
for _ in range(60):
    rows = torch.randint(512, (32,))
    optimizer.zero_grad()
    F.cross_entropy(net(x[rows]), y[rows]).backward()
    optimizer.step()
""",
        "        self.layers = torch.nn.ModuleList([torch.nn.Linear(6, 6) for _ in range(2)])  # two",
    ),
    "mapping that is filled later": (
        "OPT_PARAM_UNREGISTERED",
        HEAD
        + """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.parts = {}
        for name in "ab":
            self.parts[name] = nn.Linear(6, 6)
        self.head = nn.Linear(6, 3)
    def forward(self, x):
        return self.head(torch.tanh(self.parts["b"](self.parts["a"](x))))

net = Net()
optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
for _ in range(60):
    rows = torch.randint(512, (32,))
    optimizer.zero_grad()
    F.cross_entropy(net(x[rows]), y[rows]).backward()
    optimizer.step()
""",
        "        self.parts = nn.ModuleDict()",
    ),
    "head replaced": (
        "OPT_PARAM_STALE",
        HEAD
        + """
net = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))
optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
net[2] = nn.Linear(16, 3)
criterion = torch.nn.CrossEntropyLoss()
for _ in range(60):
    rows = torch.randint(512, (32,))
    optimizer.zero_grad()
    F.cross_entropy(net(x[rows]), y[rows]).backward()
    optimizer.step()
""",
        "optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)",
    ),
    "frozen by a flag": (
        "FREEZE_INEFFECTIVE",
        HEAD
        + """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(6, 16), nn.Linear(16, 3)
    def forward(self, x):
        return self.head(torch.tanh(self.body(x)))

net = Net()
net.body.requires_grad = False
optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
for _ in range(60):
    rows = torch.randint(512, (32,))
    optimizer.zero_grad()
    F.cross_entropy(net(x[rows]), y[rows]).backward()
    optimizer.step()
""",
        "net.body.requires_grad_(False)",
    ),
    "factors of zeros": (
        "SYMMETRIC_INIT",
        HEAD
        + """
class Adapter(nn.Module):
    def __init__(self):
        super().__init__()
        self.down = nn.Parameter(torch.zeros(6, 4))
        self.up = nn.Parameter(torch.zeros(4, 6))
        self.head = nn.Linear(6, 3)
    def forward(self, x):
        return self.head(torch.tanh(x + x @ self.down @ self.up))

net = Adapter()
optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
for _ in range(60):
    rows = torch.randint(512, (32,))
    optimizer.zero_grad()
    F.cross_entropy(net(x[rows]), y[rows]).backward()
    optimizer.step()
""",
        "        self.down = nn.Parameter(torch.randn(6, 4) * 0.02)",
    ),
    "optimizer of each epoch": (
        "OPT_STATE_RESET",
        HEAD
        + """
net = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))
for epoch in range(8):
    optimizer = torch.optim.Adam(net.parameters(), lr=5e-3)
    for rows in torch.randperm(512).split(64):
        optimizer.zero_grad()
        F.cross_entropy(net(x[rows]), y[rows]).backward()
        optimizer.step()
""",
        "optimizer = torch.optim.Adam(net.parameters(), lr=5e-3)",
    ),
    "nothing cleared": (
        "ZERO_GRAD_MISSING",
        HEAD
        + """
class Trainer:
    def __init__(self):
        self.net = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))
        self.opt = torch.optim.SGD(self.net.parameters(), lr=0.05)

    def fit(self, steps):
        for step in range(steps):
            rows = torch.randint(512, (32,))
            loss = F.cross_entropy(self.net(x[rows]), y[rows])
            loss.backward()
            self.opt.step()

Trainer().fit(60)
""",
        "            self.opt.zero_grad()",
    ),
    "nothing cleared after a window": (
        "ZERO_GRAD_MISSING",
        HEAD
        + """
net = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))
opt = torch.optim.SGD(net.parameters(), lr=0.02)
for step in range(60):
    for _ in range(2):
        rows = torch.randint(512, (32,))
        (F.cross_entropy(net(x[rows]), y[rows]) / 2).backward()
    opt.step()
""",
        "    opt.zero_grad()",
    ),
    "no step": (
        "STEP_MISSING",
        HEAD
        + """
net = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))
optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
for _ in range(60):
    rows = torch.randint(512, (32,))
    optimizer.zero_grad()
    loss = F.cross_entropy(net(x[rows]), y[rows])
    loss.backward()
""",
        "    optimizer.step()",
    ),
    "cleared too late": (
        "ZERO_GRAD_BEFORE_STEP",
        HEAD
        + """
net = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))
optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
for _ in range(60):
    rows = torch.randint(512, (32,))
    loss = F.cross_entropy(net(x[rows]), y[rows])
    loss.backward()
    optimizer.zero_grad()
    optimizer.step()
""",
        "    optimizer.zero_grad()",
    ),
    "clipped behind the step": (
        "CLIP_NO_EFFECT",
        HEAD
        + """
net = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))
optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
for _ in range(60):
    rows = torch.randint(512, (32,))
    optimizer.zero_grad()
    loss = F.cross_entropy(net(x[rows]), y[rows])
    loss.backward()
    optimizer.step()
    norm = nn.utils.clip_grad_norm_(
        net.parameters(),
        0.5,
    )
""",
        "    norm = nn.utils.clip_grad_norm_(",
    ),
    "schedule of the batches": (
        "SCHED_TOO_OFTEN",
        HEAD
        + """
from torch.utils.data import DataLoader, TensorDataset
net = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))
optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.1)
for epoch in range(3):
    for xb, yb in DataLoader(TensorDataset(x, y), batch_size=16, shuffle=True):
        optimizer.zero_grad()
        loss = F.cross_entropy(net(xb), yb)
        loss.backward()
        optimizer.step()
        scheduler.step()
""",
        "    scheduler.step()",
    ),
    "first window": (
        "ACCUM_FIRST_WINDOW",
        HEAD
        + """
net = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))
optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
N = 4
for i in range(240):
    rows = torch.randint(512, (16,))
    loss = F.cross_entropy(net(x[rows]), y[rows]) / N
    loss.backward()
    if i % N == 0:
        optimizer.step()
        optimizer.zero_grad()
""",
        "    if (i + 1) % N == 0:",
    ),
    "window of sums": (
        "ACCUM_NOT_DIVIDED",
        HEAD
        + """
net = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))
optimizer = torch.optim.SGD(net.parameters(), lr=1e-2)
micro = 4
for update in range(60):
    optimizer.zero_grad()
    for _ in range(micro):
        rows = torch.randint(512, (16,))
        loss = F.cross_entropy(net(x[rows]), y[rows])
        loss.backward()
    optimizer.step()
""",
        "        (loss / micro).backward()",
    ),
}
