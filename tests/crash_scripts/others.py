"""Scripts with shapes, kinds, devices, optimizers and batches that don't fit."""

SCRIPTS = {
    "meta weights": """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.second = nn.Linear(4, 2, device="meta")
    def forward(self, x):
        return self.second(self.first(x))  # CRASH

net = Net()
images = torch.randn(2, 3)
net(images)
""",
    "meta input": """
net = nn.Sequential(nn.Linear(3, 4))
images = torch.randn(2, 3, device="meta")
net(images)  # CRASH
""",
    "meta addition": """
class Shifted(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(3, 3)
        self.offset = torch.zeros(3, device="meta")
    def forward(self, x):
        y = self.lin(x)
        return y + self.offset  # CRASH

shifted = Shifted()
shifted(torch.randn(2, 3))
""",
    "double input": """
net = nn.Sequential(nn.Linear(3, 4), nn.ReLU())
rows = torch.randn(2, 3, dtype=torch.float64)
net(rows)  # CRASH
""",
    "double conv": """
net = nn.Conv1d(3, 4, 1)
rows = torch.randn(2, 3, 5, dtype=torch.float64)
net(rows)  # CRASH
""",
    "float labels": """
net = nn.Linear(3, 5)
labels = torch.zeros(4)
loss = F.cross_entropy(net(torch.randn(4, 3)), labels)  # CRASH
""",
    "int labels": """
net = nn.Linear(3, 5)
labels = torch.zeros(4, dtype=torch.int32)
loss = F.cross_entropy(net(torch.randn(4, 3)), labels)  # CRASH
""",
    "float tokens": """
emb = nn.Embedding(10, 4)
tokens = torch.zeros(2, 3)
emb(tokens)  # CRASH
""",
    "wrong features": """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3)
        self.classify = nn.Linear(4 * 7 * 7, 10)
    def forward(self, x):
        y = self.conv(x).flatten(1)
        return self.classify(y)  # CRASH

net = Net()
net(torch.randn(2, 1, 8, 8))
""",
    "wrong channels": """
net = nn.Sequential(nn.Conv2d(3, 4, 3))
grey = torch.randn(2, 1, 8, 8)
net(grey)  # CRASH
""",
    "wrong norm": """
net = nn.Sequential(nn.Linear(3, 6), nn.LayerNorm(8))
x = torch.randn(2, 3)
net(x)  # CRASH
""",
    "wrong addition": """
a = torch.randn(4, 3)
b = torch.randn(4, 5)
c = a + b  # CRASH
""",
    "wrong view": """
x = torch.randn(4, 3)
y = x.view(4, 5)  # CRASH
""",
    "view of a transpose": """
x = torch.randn(2, 3, 4).transpose(1, 2)
y = x.view(2, 12)  # CRASH
""",
    "batch sizes": """
net = nn.Linear(3, 5)
labels = torch.zeros(6, dtype=torch.long)
loss = F.cross_entropy(net(torch.randn(4, 3)), labels)  # CRASH
""",
    "class too large": """
net = nn.Linear(3, 5)
labels = torch.tensor([1, 2, 5, 3])
loss = nn.CrossEntropyLoss()(net(torch.randn(4, 3)), labels)  # CRASH
""",
    "token too large": """
class Reader(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(10, 4)
    def forward(self, ids):
        return self.words(ids)  # CRASH

reader = Reader()
reader(torch.tensor([[1, 11, 3]]))
""",
    "one row": """
net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
loader = torch.utils.data.DataLoader(torch.randn(9, 3), batch_size=4)
for batch in loader:
    net(batch)  # CRASH
""",
    "not probabilities": """
net = nn.Linear(3, 1)
loss = F.binary_cross_entropy(net(torch.randn(64, 3)), torch.ones(64, 1))  # CRASH
""",
    "target size": """
net = nn.Linear(3, 1)
goal = torch.ones(4)
loss = F.binary_cross_entropy(torch.sigmoid(net(torch.randn(4, 3))), goal)  # CRASH
""",
    "no parameters": """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = [nn.Linear(3, 3), nn.Linear(3, 1)]

net = Net()
opt = torch.optim.Adam(net.parameters())  # CRASH
""",
    "frozen and left out": """
net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
net.requires_grad_(False)
opt = torch.optim.Adam([p for p in net.parameters() if p.requires_grad])  # CRASH
""",
    "used up": """
net = nn.Linear(3, 1)
params = net.parameters()
count = sum(p.numel() for p in params)
opt = torch.optim.Adam(params)  # CRASH
""",
    "non-leaf": """
scale = torch.ones(3, requires_grad=True) * 0.5
opt = torch.optim.SGD([scale], lr=0.1)  # CRASH
""",
    "two groups": """
net = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))
opt = torch.optim.SGD([{"params": net.parameters()}, {"params": net[1].parameters(), "lr": 1.0}], lr=0.1)  # CRASH
""",
    "unscale twice": """
net = nn.Linear(3, 1)
opt = torch.optim.SGD(net.parameters(), lr=0.1)
scaler = torch.amp.GradScaler("cpu")
scaler.scale(net(torch.randn(2, 3)).sum()).backward()
scaler.unscale_(opt)
scaler.unscale_(opt)  # CRASH
""",
    "no update": """
net = nn.Linear(3, 1)
opt = torch.optim.SGD(net.parameters(), lr=0.1)
amp = torch.amp.GradScaler("cpu")
for _ in range(2):
    opt.zero_grad()
    amp.scale(net(torch.randn(2, 3)).sum()).backward()
    amp.step(opt)  # CRASH
""",
    "not scaled": """
net = nn.Linear(3, 1)
opt = torch.optim.SGD(net.parameters(), lr=0.1)
scaler = torch.amp.GradScaler("cpu")
loss = net(torch.randn(2, 3)).sum()
loss.backward()
scaler.step(opt)  # CRASH
""",
    "no inf checks": """
net, other = nn.Linear(3, 1), nn.Linear(3, 1)
opt = torch.optim.SGD(other.parameters(), lr=0.1)
scaler = torch.amp.GradScaler("cpu")
scaler.scale(net(torch.randn(2, 3)).sum()).backward()
scaler.step(opt)  # CRASH
""",
    "unscale after step": """
net = nn.Linear(3, 1)
opt = torch.optim.SGD(net.parameters(), lr=0.1)
scaler = torch.amp.GradScaler("cpu")
scaler.scale(net(torch.randn(2, 3)).sum()).backward()
scaler.step(opt)
scaler.unscale_(opt)  # CRASH
""",
    "half weights": """
net = nn.Linear(3, 1).half()
opt = torch.optim.SGD(net.parameters(), lr=0.1)
scaler = torch.amp.GradScaler("cpu")
scaler.scale(net(torch.randn(2, 3).half()).sum()).backward()
scaler.unscale_(opt)  # CRASH
""",
    "wrong head": """
net, old = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)), nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 9))
net.load_state_dict(old.state_dict())  # CRASH
""",
    "wrapped keys": """
net = nn.Sequential(nn.Linear(3, 4))
state = {"module." + key: value for key, value in net.state_dict().items()}
net.load_state_dict(state)  # CRASH
""",
    "optimizer groups": """
net = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
old = torch.optim.Adam([{"params": net[0].parameters()}, {"params": net[1].parameters()}])
opt = torch.optim.Adam(net.parameters())
opt.load_state_dict(old.state_dict())  # CRASH
""",
    "optimizer sizes": """
net = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
old = torch.optim.Adam(net[0].parameters())
opt = torch.optim.Adam(net.parameters())
opt.load_state_dict(old.state_dict())  # CRASH
""",
    "no memory": """
net = nn.Linear(3, 1)
kept = [torch.zeros(1000, 10)]
x = torch.zeros(1 << 50)  # CRASH
""",
    "lengths differ": """
words = [torch.zeros(3), torch.zeros(5)]
loader = torch.utils.data.DataLoader(words, batch_size=2)
for batch in loader:  # CRASH
    pass
""",
    "no super": """
class Net(nn.Module):
    def __init__(self):
        self.lin = nn.Linear(3, 1)  # CRASH

net = Net()
""",
    "too many steps": """
net = nn.Linear(3, 1)
opt = torch.optim.SGD(net.parameters(), lr=0.1)
sched = torch.optim.lr_scheduler.OneCycleLR(opt, 0.1, total_steps=2)
for _ in range(4):
    opt.step()
    sched.step()  # CRASH
""",
    "item of many": """
net = nn.Linear(3, 2)
loss = net(torch.randn(4, 3))
value = loss.item()  # CRASH
""",
    "weights only": """
import argparse, io
file = io.BytesIO()
torch.save({"args": argparse.Namespace(lr=1)}, file)
file.seek(0)
state = torch.load(file)  # CRASH
""",
    "recomputed": """
from torch.utils.checkpoint import checkpoint
class Flaky(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin, self.calls = nn.Linear(3, 3), 0
    def forward(self, x):
        self.calls += 1
        return torch.tanh(self.lin(x)) if self.calls == 1 else self.lin(x)

net = Flaky()
checkpoint(net, torch.randn(2, 3, requires_grad=True), use_reentrant=False).sum().backward()  # CRASH
""",
    "integer leaf": """
steps = torch.arange(3)
steps.requires_grad_()  # CRASH
""",
    "scale below zero": """
class Actor(nn.Module):
    def __init__(self):
        super().__init__()
        self.mean, self.spread = nn.Linear(3, 1), nn.Linear(3, 1)
    def forward(self, x):
        return self.mean(x), self.spread(x) - 5

actor = Actor()
mean, spread = actor(torch.randn(64, 3))
policy = torch.distributions.Normal(mean, spread, validate_args=True)  # CRASH
""",
    "share above one": """
net = nn.Linear(3, 2)
shares = net(torch.randn(64, 3))
coin = torch.distributions.Bernoulli(probs=shares, validate_args=True)  # CRASH
""",
}
