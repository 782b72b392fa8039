"""The same faults in other shapes: trainers, helpers, dictionaries, sequences of modules."""

SCRIPTS = {
    "state of a trainer": """
class Trainer:
    def __init__(self):
        self.net, self.hidden = nn.GRU(3, 4), torch.zeros(1, 2, 4)
        self.opt = torch.optim.SGD(self.net.parameters(), lr=0.1)
    def train(self, batches):
        for batch in batches:
            self.step(batch)
    def step(self, batch):
        out, self.hidden = self.net(batch, self.hidden)
        loss = out.pow(2).mean()
        self.opt.zero_grad()
        loss.backward()  # CRASH
        self.opt.step()

Trainer().train(torch.randn(3, 5, 2, 3))
""",
    "generator not detached": """
gen, disc = nn.Sequential(nn.Linear(2, 3), nn.Tanh()), nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
opt_g, opt_d = torch.optim.SGD(gen.parameters(), lr=0.1), torch.optim.SGD(disc.parameters(), lr=0.1)
for real in torch.randn(2, 4, 3):
    fake = gen(torch.randn(4, 2))
    d_loss = disc(fake).mean() - disc(real).mean()  # CHANGE
    opt_d.zero_grad()
    d_loss.backward()
    opt_d.step()
    g_loss = -disc(fake).mean()
    opt_g.zero_grad()
    g_loss.backward()  # CRASH
    opt_g.step()
""",
    "in place in a helper": """
def sharpen(x):
    y = torch.sigmoid(x)
    y *= 2  # CHANGE
    return y

net = nn.Linear(3, 4)
for x in torch.randn(2, 5, 3):
    loss = sharpen(net(x)).sum()
    loss.backward()  # CRASH
""",
    "in place in a sequence": """
net = nn.Sequential(nn.Linear(3, 4), nn.Sigmoid(), nn.ReLU(inplace=True), nn.Linear(4, 1))
loss = net(torch.randn(2, 3)).sum()
loss.backward()  # CRASH
""",
    "labels elsewhere": """
class Task:
    def __init__(self):
        self.model = nn.Sequential(nn.Linear(3, 5))
        self.criterion = nn.CrossEntropyLoss()
    def loss(self, batch):
        scores = self.model(batch["rows"])
        return self.criterion(scores, batch["labels"])  # CRASH

Task().loss({"rows": torch.randn(4, 3), "labels": torch.zeros(4, dtype=torch.long, device="meta")})
""",
    "weights in a closure": """
net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
opt = torch.optim.LBFGS(net.parameters())
x, y = torch.randn(8, 3), torch.randn(8, 1)
loss = F.mse_loss(net(x), y)
def closure():
    opt.zero_grad()
    loss.backward()  # CRASH
    return loss
opt.step(closure)
""",
    "average kept": """
net = nn.Linear(3, 4)
shadow = nn.Linear(3, 4)
loss = shadow(torch.tanh(net(torch.randn(2, 3))) @ torch.randn(4, 3)).sum()
with torch.no_grad():
    for own, kept in zip(net.parameters(), shadow.parameters()):
        kept.mul_(0.9).add_(own, alpha=0.1)  # CHANGE
loss.backward()  # CRASH
""",
    "predicted classes": """
class Accuracy(nn.Module):
    def forward(self, scores, labels):
        right = (scores.argmax(-1) == labels).float()  # CUT
        return 1 - right.mean()

def train(model, criterion, loader):
    for rows, labels in loader:
        loss = criterion(model(rows), labels)
        loss.backward()  # CRASH

train(nn.Linear(3, 5), Accuracy(), [(torch.randn(4, 3), torch.zeros(4))])
""",
    "numpy in between": """
net, head = nn.Linear(3, 5), nn.Linear(5, 1)
for p in head.parameters():
    p.requires_grad_(False)
hidden = net(torch.randn(4, 3))
copied = torch.from_numpy(hidden.detach().numpy())  # CUT
loss = head(copied).mean()
loss.backward()  # CRASH
""",
    "a decoder alone": """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.encode, self.decode = nn.Linear(4, 8), nn.Linear(6, 4)
    def forward(self, x):
        return self.decode(torch.relu(self.encode(x)))  # CRASH

class Runner:
    def __init__(self, model):
        self.model = model
    def fit(self, data):
        return sum(self.model(row) for row in data)

Runner(Model()).fit([torch.randn(2, 4)])
""",
    "positions": """
class Reader(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.position = nn.Embedding(10, 4), nn.Embedding(6, 4)
    def forward(self, ids):
        places = torch.arange(ids.shape[1])
        return self.words(ids) + self.position(places)  # CRASH

Reader()(torch.zeros(2, 9, dtype=torch.long))
""",
    "kept features": """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head, self.features = nn.Linear(3, 4), nn.Linear(4, 1), None
    def forward(self, x):
        self.features = torch.tanh(self.body(x))
        return self.head(self.features)
    def penalty(self):
        return self.features.pow(2).mean()

model = Model()
for x in torch.randn(2, 5, 3):
    first = model(x).mean()
    second = model.penalty()
    first.backward()
    second.backward()  # CRASH
""",
    "a list of losses": """
net = nn.Sequential(nn.Linear(3, 4), nn.Tanh())
out = net(torch.randn(2, 3))
losses = [out[:, n].pow(2).sum() for n in range(4)]
for loss in losses:
    loss.backward()  # CRASH
""",
    "half of a batch": """
net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
batch = {"x": torch.randn(2, 3).double(), "y": torch.zeros(2, dtype=torch.long)}
for _ in range(2):
    loss = F.cross_entropy(net(batch["x"]), batch["y"])  # CRASH
    loss.backward()
""",
}

EXPECTED = {
    "state of a trainer": ("BACKWARD_TWICE_STATE", {"tensor": "self.hidden", "fix": "self.hidden.detach()"}),
    "kept features": ("BACKWARD_TWICE", {"fix": "(first + second).backward()"}),
    "a list of losses": ("BACKWARD_TWICE", {"fix": "sum(losses).backward()"}),
    "generator not detached": ("BACKWARD_TWICE", {"tensor": "fake", "fix": "d_loss = disc(fake.detach())"}),
    "in place in a helper": ("INPLACE_ON_SAVED", {"fix": "y = y * 2"}),
    "in place in a sequence": ("INPLACE_ON_SAVED", {"module": "2", "fix": "inplace=False"}),
    "labels elsewhere": ("DEVICE_MISMATCH", {"tensor": "batch['labels']", "fix": ".to('cpu')"}),
    "weights in a closure": ("BACKWARD_TWICE_STATE", {"tensor": "loss"}),
    "average kept": ("INPLACE_ON_SAVED", {"tensor": "shadow.weight"}),
    "predicted classes": ("LOSS_NO_GRAD", {"message": "argmax"}),
    "numpy in between": ("LOSS_NO_GRAD", {"tensor": "hidden"}),
    "a decoder alone": ("SHAPE_MISMATCH", {"module": "decode", "fix": "nn.Linear(8, 4)"}),
    "positions": ("INDEX_OUT_OF_RANGE", {"module": "position", "fix": "6 tokens"}),
    "half of a batch": ("DTYPE_MISMATCH", {"tensor": "batch['x']", "module": "0"}),
}  # fmt: skip
