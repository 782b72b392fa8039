"""More crashes as people ask about them: of data, targets, loaded states and names."""

SCRIPTS = {
    "conv3d input to conv2d": """
conv = nn.Conv2d(3, 4, 3)
clip = torch.randn(3, 32, 32, 8, 2)
conv(clip)  # CRASH
""",
    "channels last image": """
net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU())
images = torch.randn(4, 32, 32, 3)
net(images)  # CRASH
""",
    "uint8 images": """
net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU())
images = torch.randint(0, 255, (4, 3, 32, 32), dtype=torch.uint8)
net(images)  # CRASH
""",
    "one-hot labels cross entropy dims": """
net = nn.Linear(3, 5)
labels = torch.randint(0, 5, (4, 1))
loss = F.cross_entropy(net(torch.randn(4, 3)), labels)  # CRASH
""",
    "segmentation target with channel": """
net = nn.Conv2d(3, 5, 1)
mask = torch.randint(0, 5, (2, 1, 8, 8))
loss = nn.CrossEntropyLoss()(net(torch.randn(2, 3, 8, 8)), mask)  # CRASH
""",
    "bce on 2d logits": """
net = nn.Linear(3, 1)
y = torch.randint(0, 2, (8,)).float()
loss = nn.BCEWithLogitsLoss()(net(torch.randn(8, 3)), y)  # CRASH
""",
    "padding index negative": """
class Enc(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(20, 4)
    def forward(self, tokens):
        return self.emb(tokens)  # CRASH
Enc()(torch.tensor([[3, 4, -1]]))
""",
    "position table too short": """
class Gpt(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(100, 8), nn.Embedding(16, 8)
    def forward(self, ids):
        positions = torch.arange(ids.size(1))
        return self.wte(ids) + self.wpe(positions)  # CRASH
Gpt()(torch.randint(0, 100, (2, 20)))
""",
    "gan d then g": """
G, D = nn.Linear(2, 3), nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1))
og, od = torch.optim.Adam(G.parameters()), torch.optim.Adam(D.parameters())
bce = nn.BCEWithLogitsLoss()
for real in torch.randn(2, 5, 3):
    fake = G(torch.randn(5, 2))
    lossD = bce(D(real), torch.ones(5, 1)) + bce(D(fake), torch.zeros(5, 1))
    od.zero_grad()
    lossD.backward()
    od.step()
    lossG = bce(D(fake), torch.ones(5, 1))
    og.zero_grad()
    lossG.backward()  # CRASH
    og.step()
""",
    "ema in place on params with grad": """
model, ema = nn.Linear(3, 2), nn.Linear(3, 2)
for a, b in zip(ema.parameters(), model.parameters()):
    a.mul_(0.99).add_(b, alpha=0.01)  # CRASH
""",
    "relu inplace residual": """
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(4, 4)
        self.act = nn.ReLU(inplace=True)
    def forward(self, x):
        out = torch.tanh(self.lin(x))
        return out * self.act(out)  # CHANGE
b = Block()
b(torch.randn(2, 4)).sum().backward()  # CRASH
""",
    "loss list sum of floats": """
net = nn.Linear(3, 1)
losses = []
for x in torch.randn(3, 5, 3):
    losses.append(net(x).mean().item())  # CHANGE
loss = sum(losses) / len(losses)
loss.backward()  # CRASH
""",
    "validation decorator": """
net = nn.Linear(3, 1)
opt = torch.optim.SGD(net.parameters(), 0.1)
@torch.no_grad()  # CHANGE
def run(x, train):
    loss = net(x).pow(2).mean()
    if train:
        loss.backward()  # CRASH
    return loss
run(torch.randn(4, 3), True)
""",
    "round in loss": """
net = nn.Linear(3, 1)
x, y = torch.randn(4, 3), torch.ones(4, 1)
pred = net(x)
acc = (pred > 0).float()  # CHANGE
loss = 1 - (acc == y).float().mean()
loss.backward()  # CRASH
""",
    "optimizer state other model": """
a, b = nn.Linear(3, 2), nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
oa, opt = torch.optim.Adam(a.parameters()), torch.optim.Adam(b.parameters())
opt.load_state_dict(oa.state_dict())  # CRASH
""",
    "compiled checkpoint prefix": """
net = nn.Sequential(nn.Linear(3, 2))
state = {"_orig_mod." + k: v for k, v in net.state_dict().items()}
net.load_state_dict(state)  # CRASH
""",
    "state into module without prefix": """
class Wrap(nn.Module):
    def __init__(self, m):
        super().__init__()
        self.module = m
net = Wrap(nn.Sequential(nn.Linear(3, 2)))
state = nn.Sequential(nn.Linear(3, 2)).state_dict()
net.load_state_dict(state)  # CRASH
""",
    "model instead of state": """
net, other = nn.Linear(3, 2), nn.Linear(3, 2)
net.load_state_dict(other)  # CRASH
""",
    "dataset returns PIL like": """
class Image:
    pass
class Pics(torch.utils.data.Dataset):
    def __len__(self):
        return 4
    def __getitem__(self, i):
        return Image()
for batch in torch.utils.data.DataLoader(Pics(), batch_size=2):  # CRASH
    pass
""",
    "batch dict to device": """
batch = {"x": torch.zeros(2, 3), "y": torch.zeros(2)}
batch = batch.to("cpu")  # CRASH
""",
    "list to device": """
ds = torch.utils.data.TensorDataset(torch.randn(4, 3), torch.zeros(4))
for batch in torch.utils.data.DataLoader(ds, batch_size=2):
    batch = batch.to("cpu")  # CRASH
""",
    "numpy into linear": """
import numpy as np
net = nn.Linear(3, 2)
x = np.zeros((4, 3), dtype=np.float32)
net(x)  # CRASH
""",
    "matmul of batches": """
q, k = torch.randn(2, 5, 8), torch.randn(2, 5, 8)
scores = q @ k  # CRASH
""",
    "heads do not divide": """
att = nn.MultiheadAttention(10, 3)  # CRASH
""",
    "transformer src batch": """
t = nn.Transformer(8, 2, 1, 1, 16, batch_first=True)
t(torch.randn(2, 5, 8), torch.randn(3, 4, 8))  # CRASH
""",
    "attribute typo": """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(3, 2)
    def forward(self, x):
        return self.fc(x)  # CRASH
Net()(torch.randn(2, 3))
""",
    "grad of int param": """
class Table(nn.Module):
    def __init__(self):
        super().__init__()
        self.steps = nn.Parameter(torch.zeros(3, dtype=torch.long))  # CRASH
Table()
""",
    "clip of generator twice": """
net = nn.Linear(3, 2)
opt = torch.optim.SGD(net.parameters(), 0.1)
scheduler = torch.optim.lr_scheduler.OneCycleLR(opt, 0.1, epochs=1, steps_per_epoch=2)
for epoch in range(2):
    for _ in range(2):
        opt.step()
        scheduler.step()  # CRASH
""",
}

EXPECTED = {
    "conv3d input to conv2d": ("SHAPE_MISMATCH", {"message": "[3, 32, 32, 8, 2]", "fix": "shapes of clip"}),
    "channels last image": ("SHAPE_MISMATCH", {"message": "images", "fix": "images.permute(0, 3, 1, 2)"}),
    "uint8 images": ("DTYPE_MISMATCH", {"message": "images", "fix": "float"}),
    "one-hot labels cross entropy dims": ("SHAPE_MISMATCH", {"message": "labels", "fix": "squeeze"}),
    "segmentation target with channel": ("SHAPE_MISMATCH", {"message": "[2, 1, 8, 8]", "fix": "squeeze(1)"}),
    "bce on 2d logits": ("SHAPE_MISMATCH", {"message": "[8, 1]", "fix": "unsqueeze"}),
    "padding index negative": ("INDEX_OUT_OF_RANGE", {"message": "tokens", "fix": "clamp"}),
    "position table too short": ("INDEX_OUT_OF_RANGE", {"message": "wpe", "fix": "cut the sequences to 16 tokens"}),
    "gan d then g": ("BACKWARD_TWICE", {"message": "fake", "fix": "detach"}),
    "ema in place on params with grad": ("LEAF_INPLACE", {"fix": "no_grad"}),
    "relu inplace residual": ("INPLACE_ON_SAVED", {"message": "out", "fix": "inplace=False"}),
    "loss list sum of floats": ("TENSOR_MISUSED", {"message": "losses", "fix": "item"}),
    "validation decorator": ("NO_GRAD_ACTIVE", {"message": "no_grad", "fix": "no_grad"}),
    "round in loss": ("LOSS_NO_GRAD", {"message": "loss", "fix": "smooth"}),
    "optimizer state other model": ("STATE_NOT_LOADED", {"message": "opt", "fix": "groups"}),
    "compiled checkpoint prefix": ("STATE_NOT_LOADED", {"message": "_orig_mod.", "fix": "removeprefix"}),
    "state into module without prefix": ("STATE_NOT_LOADED", {"message": "module.", "fix": "module."}),
    "model instead of state": ("STATE_NOT_LOADED", {"message": "load_state_dict", "fix": "state_dict()"}),
    "dataset returns PIL like": ("SHAPE_MISMATCH", {"message": "collate", "fix": "tensor"}),
    "batch dict to device": ("TENSOR_MISUSED", {"message": "batch", "fix": "items()"}),
    "list to device": ("TENSOR_MISUSED", {"message": "batch", "fix": "for"}),
    "numpy into linear": ("TENSOR_MISUSED", {"message": "ndarray", "fix": "torch.from_numpy"}),
    "matmul of batches": ("SHAPE_MISMATCH", {"message": "[2, 5, 8]", "fix": "transpose"}),
    "heads do not divide": ("SHAPE_MISMATCH", {"message": "num_heads", "fix": "nn.MultiheadAttention(10, 2)"}),
    "transformer src batch": ("SHAPE_MISMATCH", {"message": "batch number of src", "fix": "shapes"}),
    "attribute typo": ("MODULE_NOT_READY", {"message": "Net", "fix": "fc1"}),
    "grad of int param": ("TENSOR_MISUSED", {"message": "int64", "fix": "float"}),
    "clip of generator twice": ("SCHED_PAST_END", {"message": "scheduler", "fix": "total_steps"}),
}
