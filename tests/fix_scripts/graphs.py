"""Faults of the graph: cut, kept, changed in place, or reaching what it should not."""

from fix_scripts.wiring import HEAD

FAULTY = {
    "term detached": (
        "LOSS_TERM_CUT",
        HEAD
        + """
net = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))
optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
for _ in range(60):
    rows = torch.randint(512, (32,))
    out = net(x[rows])
    size = out.detach().pow(2).mean()
    loss = F.cross_entropy(out, y[rows]) + 0.1 * size
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
""",
        "    size = out.pow(2).mean()",
    ),
    "result of detach thrown away": (
        "LEAK_TO_OTHER_NET",
        HEAD
        + """
net = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 2))
optimizer = torch.optim.SGD(net.parameters(), lr=1e-2)
for _ in range(60):
    state, reward = torch.randn(32, 6), torch.rand(32)
    next_value = net(state + 0.1).amax(1)
    next_value.detach()
    target = reward + 0.9 * next_value
    loss = F.mse_loss(net(state)[:, 0], target)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
""",
        "    next_value = next_value.detach()",
    ),
    "losses kept": (
        "GRAPH_KEPT_IN_LOG",
        HEAD
        + """
net = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))
optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
history = []
for _ in range(60):
    rows = torch.randint(512, (32,))
    loss = F.cross_entropy(net(x[rows]), y[rows])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    history.append(loss)
""",
        "    history.append(loss.item())",
    ),
    "state of the step before": (
        "BACKWARD_TWICE_STATE",
        HEAD
        + """
rnn, head = nn.GRU(6, 8), nn.Linear(8, 3)
optimizer = torch.optim.Adam([*rnn.parameters(), *head.parameters()], lr=1e-2)
state = torch.zeros(1, 64, 8)
for _ in range(60):
    xb = torch.randn(1, 64, 6)
    out, state = rnn(xb, state)
    loss = F.cross_entropy(head(out[0]), xb[0, :, :3].argmax(1))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
""",
        "    state = state.detach()",
    ),
    "residual in place": (
        "INPLACE_ON_SAVED",
        HEAD
        + """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(6, 6), nn.Linear(6, 3)
    def forward(self, x):
        out = torch.sigmoid(self.body(x))
        out += x  # residual
        return self.head(out)

net = Net()
optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
for _ in range(60):
    rows = torch.randint(512, (32,))
    loss = F.cross_entropy(net(x[rows]), y[rows])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
""",
        "        out = out + x  # residual",
    ),
    "loss of the rows": (
        "LOSS_NOT_SCALAR",
        HEAD
        + """
net = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))
optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
for _ in range(60):
    rows = torch.randint(512, (32,))
    optimizer.zero_grad()
    F.cross_entropy(net(x[rows]), y[rows], reduction="none").backward()
    optimizer.step()
""",
        '    F.cross_entropy(net(x[rows]), y[rows], reduction="none").mean().backward()',
    ),
    "softmax before the loss": (
        "DOUBLE_ACTIVATION",
        HEAD
        + """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3), nn.Softmax(dim=1))
    def forward(self, x):
        return self.layers(x)

net, criterion = Net(), nn.CrossEntropyLoss()
optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
for _ in range(80):
    rows = torch.randint(512, (32,))
    optimizer.zero_grad()
    criterion(net(x[rows]), y[rows]).backward()
    optimizer.step()
""",
        "        self.layers = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))",
    ),
    "column and row": (
        "LOSS_BROADCAST",
        HEAD
        + """
net = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))
criterion = nn.MSELoss()
optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
for _ in range(60):
    rows = torch.randint(512, (32,))
    optimizer.zero_grad()
    loss = criterion(net(x[rows]), x[rows].sum(1))
    loss.backward()
    optimizer.step()
""",
        "    loss = criterion(net(x[rows]).squeeze(-1), x[rows].sum(1))",
    ),
    "softmax over the rows": (
        "SOFTMAX_DIM",
        HEAD
        + """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.head = nn.Linear(6, 6), nn.Linear(6, 3)
    def forward(self, x):
        return self.head(x * F.softmax(self.gate(x), dim=0))

net = Net()
optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
for _ in range(60):
    rows = torch.randint(512, (32,))
    optimizer.zero_grad()
    F.cross_entropy(net(x[rows]), y[rows]).backward()
    optimizer.step()
""",
        "        return self.head(x * F.softmax(self.gate(x), dim=-1))",
    ),
    "nothing to divide by": (
        "NAN_IN_FORWARD",
        HEAD
        + """
net = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))
optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
for step in range(60):
    rows = torch.randint(512, (32,))
    valid = torch.rand(32) < (0.8 if step % 30 != 25 else 0.0)
    losses = F.cross_entropy(net(x[rows]), y[rows], reduction="none")
    loss = (losses * valid).sum() / valid.sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
""",
        "    loss = (losses * valid).sum() / valid.sum().clamp(min=1)",
    ),
    "all ignored": (
        "LOSS_ALL_IGNORED",
        HEAD
        + """
net = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))
optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
for step in range(60):
    rows = torch.randint(512, (32,))
    target = y[rows] if step != 25 else torch.full((32,), -100)
    loss = F.cross_entropy(net(x[rows]), target)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
""",
        '    loss = F.cross_entropy(net(x[rows]), target, reduction="sum") / (target != -100).sum().clamp(min=1)',
    ),
}
