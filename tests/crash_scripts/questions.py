"""Crashes as people ask about them: each error once, in a short program of the usual kind."""

SCRIPTS = {
    "flatten after conv": """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3, padding=1)
        self.pool = nn.AdaptiveAvgPool2d(4)
        self.head = nn.Linear(16, 10)
    def forward(self, x):
        x = self.pool(F.relu(self.conv(x)))
        return self.head(x.view(x.size(0), -1))  # CRASH
net = Net()
net(torch.randn(2, 1, 28, 28))
""",
    "bce target long": """
net = nn.Sequential(nn.Linear(4, 1), nn.Flatten(0))
criterion = nn.BCEWithLogitsLoss()
x, target = torch.randn(8, 4), torch.randint(0, 2, (8,))
loss = criterion(net(x), target)  # CRASH
loss.backward()
""",
    "bce target long mse": """
net = nn.Linear(4, 1)
x, y = torch.randn(8, 4), torch.randint(0, 10, (8, 1))
loss = F.binary_cross_entropy(torch.sigmoid(net(x)), y)  # CRASH
""",
    "target too large": """
class Clf(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(3, 8)
        self.out = nn.Linear(8, 5)
    def forward(self, x):
        return self.out(self.body(x).relu())
clf = Clf()
data = [(torch.randn(4, 3), torch.tensor([0, 5, 2, 1]))]
for x, labels in data:
    loss = nn.CrossEntropyLoss()(clf(x), labels)  # CRASH
""",
    "inplace leaf loop": """
lin = nn.Linear(3, 2)
for step in range(2):
    lin(torch.randn(4, 3)).sum().backward()
    for name, prm in lin.named_parameters():
        prm -= 0.1 * prm.grad  # CRASH
""",
    "inplace sigmoid": """
net = nn.Linear(3, 2)
probs = torch.sigmoid(net(torch.randn(4, 3)))
probs[probs < 0.5] = 0  # CHANGE
loss = probs.sum()
loss.backward()  # CRASH
""",
    "backward twice metrics": """
net = nn.Linear(3, 4)
head_a, head_b = nn.Linear(4, 1), nn.Linear(4, 1)
opt = torch.optim.SGD(list(net.parameters()) + list(head_a.parameters()) + list(head_b.parameters()), 0.1)
for x in torch.randn(3, 5, 3):
    h = net(x).tanh()
    loss = head_a(h).pow(2).mean()
    aux = head_b(h).abs().mean()
    opt.zero_grad()
    loss.backward()
    aux.backward()  # CRASH
    opt.step()
""",
    "loss from item list": """
net = nn.Linear(3, 1)
opt = torch.optim.SGD(net.parameters(), 0.1)
total = 0
for x in torch.randn(3, 5, 3):
    total += net(x).pow(2).mean().item()  # CHANGE
total = torch.tensor(total / 3)
opt.zero_grad()
total.backward()  # CRASH
""",
    "loss is a float": """
net = nn.Linear(3, 1)
for x in torch.randn(3, 5, 3):
    loss = net(x).pow(2).mean().item()  # CHANGE
    loss.backward()  # CRASH
""",
    "numpy in the middle": """
import numpy as np
net = nn.Linear(3, 2)
out = net(torch.randn(4, 3))
act = torch.from_numpy(np.tanh(out.detach().numpy()))  # CHANGE
loss = act.pow(2).mean()
loss.backward()  # CRASH
""",
    "np on grad": """
import numpy as np
net = nn.Linear(3, 2)
preds = net(torch.randn(4, 3))
top = np.argmax(preds, axis=1)  # CRASH
""",
    "hidden on other device": """
class Lm(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = nn.GRU(3, 4, batch_first=True)
    def forward(self, x):
        h0 = torch.zeros(1, x.size(0), 4, device="meta")
        out, _ = self.rnn(x, h0)  # CRASH
        return out
lm = Lm()
lm(torch.randn(2, 5, 3))
""",
    "state under a key": """
import io
model = nn.Sequential(nn.Linear(3, 2), nn.ReLU(), nn.Linear(2, 1))
opt = torch.optim.Adam(model.parameters())
buf = io.BytesIO()
torch.save({"model": model.state_dict(), "opt": opt.state_dict(), "epoch": 3}, buf)
buf.seek(0)
ckpt = torch.load(buf)
model.load_state_dict(ckpt)  # CRASH
""",
    "ragged collate dict": """
rows = [{"tokens": torch.arange(n), "label": n % 2} for n in (3, 5, 2, 7)]
for batch in torch.utils.data.DataLoader(rows, batch_size=2):  # CRASH
    pass
""",
    "collate of none": """
class Files(torch.utils.data.Dataset):
    def __len__(self):
        return 4
    def __getitem__(self, i):
        if i == 2:
            return None
        return torch.zeros(3)
for batch in torch.utils.data.DataLoader(Files(), batch_size=4):  # CRASH
    pass
""",
    "worker killed": """
import os, signal
class Dies(torch.utils.data.Dataset):
    def __len__(self):
        return 4
    def __getitem__(self, i):
        os.kill(os.getpid(), signal.SIGKILL)
for batch in torch.utils.data.DataLoader(Dies(), batch_size=2, num_workers=1):  # CRASH
    pass
""",
    "pickled lambda": """
class Rows(torch.utils.data.Dataset):
    def __init__(self):
        self.transform = lambda row: row * 2
    def __len__(self):
        return 4
    def __getitem__(self, i):
        return self.transform(torch.zeros(3))
loader = torch.utils.data.DataLoader(Rows(), batch_size=2, num_workers=1, multiprocessing_context="spawn")
for batch in loader:  # CRASH
    pass
""",
    "cpu allocator": """
net = nn.Linear(1000, 1000)
x = torch.zeros(1, 1000).expand(10**12, 1000)
y = net(x)  # CRASH
""",
    "bfloat16 linear": """
net = nn.Linear(3, 2).to(torch.bfloat16)
x = torch.randn(4, 3)
out = net(x)  # CRASH
""",
    "autocast outside": """
body, head = nn.Linear(3, 4), nn.Linear(4, 2)
with torch.autocast("cpu", dtype=torch.bfloat16):
    feats = body(torch.randn(5, 3))
scores = head(feats)  # CRASH
""",
    "complex into linear": """
net = nn.Linear(9, 2)
wave = torch.randn(4, 16)
spec = torch.fft.rfft(wave)
out = net(spec)  # CRASH
""",
    "complex loss": """
w = torch.randn(3, dtype=torch.cfloat, requires_grad=True)
loss = (w * w).sum()
loss.backward()  # CRASH
""",
    "lstm hidden size": """
class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(3, 6, batch_first=True)
    def forward(self, x):
        h0 = torch.zeros(1, 4, 6)
        c0 = torch.zeros(1, 4, 6)
        out, _ = self.lstm(x, (h0, c0))  # CRASH
        return out
tagger = Tagger()
tagger(torch.randn(2, 5, 3))
""",
    "padding mask as attn mask": """
enc = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 1)
x = torch.randn(4, 7, 8)
mask = torch.zeros(4, 7, dtype=torch.bool)
out = enc(x, mask=mask)  # CRASH
""",
    "embedding range": """
emb = nn.Embedding(30, 8)
ids = torch.tensor([[1, 29, 30], [4, 5, 0]])
out = emb(ids)  # CRASH
""",
    "ctc lengths": """
ctc = nn.CTCLoss()
logp = torch.randn(12, 4, 6).log_softmax(2).requires_grad_()
targets = torch.randint(1, 6, (4, 5))
input_lengths = torch.full((3,), 12)
target_lengths = torch.full((4,), 5)
loss = ctc(logp, targets, input_lengths, target_lengths)  # CRASH
""",
    "dim out of range": """
net = nn.Sequential(nn.Linear(3, 1), nn.Flatten(0))
scores = net(torch.randn(8, 3))
pred = scores.softmax(dim=1)  # CRASH
""",
    "negative size conv": """
class Deep(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(1, 4, 3), nn.MaxPool2d(2), nn.Conv2d(4, 8, 5))
    def forward(self, x):
        return self.features(x)  # CRASH
Deep()(torch.randn(2, 1, 6, 6))
""",
    "empty optimizer filter": """
backbone = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
for q in backbone.parameters():
    q.requires_grad = False
opt = torch.optim.AdamW(filter(lambda q: q.requires_grad, backbone.parameters()), lr=1e-3)  # CRASH
""",
    "scheduler of model": """
net = nn.Linear(3, 2)
opt = torch.optim.SGD(net.parameters(), 0.1)
sched = torch.optim.lr_scheduler.StepLR(net, step_size=10)  # CRASH
""",
    "last_epoch without initial_lr": """
net = nn.Linear(3, 2)
opt = torch.optim.SGD(net.parameters(), 0.1)
sched = torch.optim.lr_scheduler.StepLR(opt, step_size=10, last_epoch=5)  # CRASH
""",
    "unscale twice accumulate": """
net = nn.Linear(3, 2)
opt = torch.optim.SGD(net.parameters(), 0.1)
scaler = torch.amp.GradScaler("cpu")
for i, x in enumerate(torch.randn(4, 5, 3)):
    scaler.scale(net(x).mean()).backward()
    scaler.unscale_(opt)  # CRASH
    nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    if i % 2:
        scaler.step(opt)
        scaler.update()
        opt.zero_grad()
""",
    "deepcopy of an output": """
import copy
net = nn.Linear(3, 2)
best = {"out": net(torch.randn(4, 3)), "step": 1}
kept = copy.deepcopy(best)  # CRASH
""",
    "hook of wrong shape": """
net = nn.Linear(3, 2)
out = net(torch.randn(4, 3))
def shrink(grad):
    return grad.mean(1)  # CHANGE
out.register_hook(shrink)
out.sum().backward()  # CRASH
""",
    "function one gradient": """
class Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        return x * factor
    @staticmethod
    def backward(ctx, g):
        return g * ctx.factor  # CHANGE
x = torch.randn(3, requires_grad=True)
Scale.apply(x, 2.0).sum().backward()  # CRASH
""",
    "sparse add": """
emb = nn.Embedding(10, 4, sparse=True)
opt = torch.optim.AdamW(emb.parameters(), lr=1e-3)
emb(torch.tensor([1, 2])).sum().backward()
nn.utils.clip_grad_norm_(emb.parameters(), 1.0)  # CRASH
opt.step()
""",
    "double backward": """
class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x
    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return 2 * g * x
x = torch.randn(4, requires_grad=True)
(g,) = torch.autograd.grad(Square.apply(x).sum(), x, create_graph=True)
penalty = g.pow(2).sum()
penalty.backward()  # CRASH
""",
    "grad without create_graph": """
critic = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1))
mix = torch.randn(4, 2, requires_grad=True)
grads = torch.autograd.grad(critic(mix).sum(), mix)[0]  # CHANGE
penalty = (grads.norm(2, dim=1) - 1).pow(2).mean()
penalty.backward()  # CRASH
""",
    "optimizer on strings": """
net = nn.Linear(3, 2)
opt = torch.optim.SGD(dict(net.named_parameters()), lr=0.1)  # CRASH
""",
    "forgot to instantiate": """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(3, 2)
    def forward(self, x):
        return self.lin(x)
net = Net
opt = torch.optim.SGD(net.parameters(), lr=0.1)  # CRASH
""",
    "list to model": """
net = nn.Linear(3, 2)
ds = torch.utils.data.TensorDataset(torch.randn(8, 3), torch.zeros(8))
for batch in torch.utils.data.DataLoader(ds, batch_size=4):
    out = net(batch)  # CRASH
""",
    "loss of tuple": """
net = nn.LSTM(3, 4, batch_first=True)
y = torch.zeros(2, 5, 4)
out = net(torch.randn(2, 5, 3))
loss = F.mse_loss(out, y)  # CRASH
""",
    "criterion class called": """
net = nn.Linear(3, 1)
x, y = torch.randn(4, 3), torch.randn(4, 1)
loss = nn.MSELoss(net(x), y)  # CRASH
loss.backward()
""",
    "forward missing argument": """
class Dec(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(3, 2)
    def forward(self, x, memory):
        return self.lin(x) + memory
dec = Dec()
dec(torch.randn(4, 3))  # CRASH
""",
    "forward not implemented": """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(3, 2)
    def foward(self, x):
        return self.lin(x)
net = Net()
net(torch.randn(4, 3))  # CRASH
""",
    "cat of lengths": """
skip = torch.randn(1, 4, 7, 7)
down = F.max_pool2d(skip, 2)
up = F.interpolate(down, scale_factor=2)
both = torch.cat([up, skip], dim=1)  # CRASH
""",
    "compile break": """
net = nn.Linear(3, 2)
def step(x):
    y = net(x)
    if y.sum().item() > 0:
        return y
    return -y
fast = torch.compile(step, fullgraph=True, backend="eager")
fast(torch.randn(4, 3))  # CRASH
""",
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
    "flatten after conv": ("SHAPE_MISMATCH", {"message": "head", "fix": "Linear(64"}),
    "bce target long": ("DTYPE_MISMATCH", {"message": "target", "fix": "float()"}),
    "bce target long mse": ("DTYPE_MISMATCH", {"message": "float32", "fix": "float"}),
    "target too large": ("INDEX_OUT_OF_RANGE", {"message": "labels", "fix": "out_features=6"}),
    "inplace leaf loop": ("LEAF_INPLACE", {"message": "weight", "fix": "no_grad"}),
    "inplace sigmoid": ("INPLACE_ON_SAVED", {"message": "probs", "fix": "probs = "}),
    "backward twice metrics": ("BACKWARD_TWICE", {"message": "loss", "fix": "+"}),
    "loss from item list": ("LOSS_NO_GRAD", {"message": "total", "fix": "without .item()"}),
    "loss is a float": ("TENSOR_MISUSED", {"message": "float", "fix": "item"}),
    "numpy in the middle": ("LOSS_NO_GRAD", {"message": "numpy", "fix": "torch"}),
    "np on grad": ("TENSOR_MISUSED", {"message": "preds", "fix": "detach()"}),
    "hidden on other device": ("DEVICE_MISMATCH", {"message": "meta", "fix": "h0"}),
    "state under a key": ("STATE_NOT_LOADED", {"message": "state_dict", "fix": "['model']"}),
    "ragged collate dict": ("SHAPE_MISMATCH", {"message": "tokens", "fix": "pad_sequence"}),
    "collate of none": ("SHAPE_MISMATCH", {"message": "collate", "fix": "collate_fn"}),
    "worker killed": ("WORKER_DIED", {"message": "worker", "fix": "num_workers=0"}),
    "pickled lambda": ("WORKER_DIED", {"message": "lambda", "fix": "top level"}),
    "cpu allocator": ("OUT_OF_MEMORY", {"message": "PiB", "fix": "memory="}),
    "bfloat16 linear": ("DTYPE_MISMATCH", {"message": "bfloat16", "fix": "x = x"}),
    "autocast outside": ("DTYPE_MISMATCH", {"message": "bfloat16", "fix": ".to("}),
    "complex into linear": ("DTYPE_MISMATCH", {"message": "complex64", "fix": "abs"}),
    "complex loss": ("LOSS_NOT_SCALAR", {"message": "complex", "fix": ".abs()"}),
    "lstm hidden size": ("SHAPE_MISMATCH", {"message": "h0", "fix": "batch"}),
    "padding mask as attn mask": ("SHAPE_MISMATCH", {"message": "[4, 7]", "fix": "key_padding_mask"}),
    "embedding range": ("INDEX_OUT_OF_RANGE", {"message": "30 rows", "fix": "31"}),
    "ctc lengths": ("SHAPE_MISMATCH", {"message": "input_lengths", "fix": "input_lengths"}),
    "dim out of range": ("SHAPE_MISMATCH", {"message": "scores", "fix": "dim=-1"}),
    "negative size conv": ("SHAPE_MISMATCH", {"message": "features", "fix": "padding"}),
    "empty optimizer filter": ("EMPTY_OPTIMIZER", {"message": "requires_grad=False", "fix": "requires_grad"}),
    "scheduler of model": ("TENSOR_MISUSED", {"message": "optimizer", "fix": "optimizer"}),
    "last_epoch without initial_lr": ("STATE_NOT_LOADED", {"message": "initial_lr", "fix": "last_epoch=-1"}),
    "unscale twice accumulate": ("UNSCALE_TWICE", {"message": "unscale_", "fix": "once"}),
    "deepcopy of an output": ("TENSOR_MISUSED", {"message": "graph", "fix": "detach"}),
    "hook of wrong shape": ("TENSOR_MISUSED", {"message": "hook", "fix": "hook"}),
    "function one gradient": ("TENSOR_MISUSED", {"message": "Scale", "fix": "None"}),
    "sparse add": ("SPARSE_GRADIENT", {"message": "sparse", "fix": "sparse=False"}),
    "double backward": ("LOSS_NO_GRAD", {"message": "penalty"}),
    "grad without create_graph": ("LOSS_NO_GRAD", {"message": "penalty", "fix": "create_graph=True"}),
    "optimizer on strings": ("TENSOR_MISUSED", {"message": "named_parameters", "fix": "parameters()"}),
    "forgot to instantiate": ("MODULE_NOT_READY", {"message": "Net", "fix": "Net()"}),
    "list to model": ("TENSOR_MISUSED", {"message": "batch", "fix": "x, y"}),
    "loss of tuple": ("TENSOR_MISUSED", {"message": "tuple", "fix": "out, _"}),
    "criterion class called": ("TENSOR_MISUSED", {"message": "MSELoss", "fix": "nn.MSELoss()("}),
    "forward missing argument": ("MODULE_NOT_READY", {"message": "memory", "fix": "memory"}),
    "forward not implemented": ("MODULE_NOT_READY", {"message": "forward", "fix": "forward"}),
    "cat of lengths": ("SHAPE_MISMATCH", {"message": "[1, 4, 7, 7]", "fix": "interpolate"}),
    "compile break": ("TENSOR_MISUSED", {"message": "compile", "fix": "fullgraph=False"}),
    "conv3d input to conv2d": ("SHAPE_MISMATCH", {"message": "[3, 32, 32, 8, 2]", "fix": "unsqueeze"}),
    "channels last image": ("SHAPE_MISMATCH", {"message": "images", "fix": "in_channels"}),
    "uint8 images": ("DTYPE_MISMATCH", {"message": "images", "fix": "float"}),
    "one-hot labels cross entropy dims": ("SHAPE_MISMATCH", {"message": "labels", "fix": "squeeze"}),
    "segmentation target with channel": ("SHAPE_MISMATCH", {"message": "[2, 1, 8, 8]", "fix": "squeeze(1)"}),
    "bce on 2d logits": ("SHAPE_MISMATCH", {"message": "[8, 1]", "fix": "unsqueeze"}),
    "padding index negative": ("INDEX_OUT_OF_RANGE", {"message": "tokens", "fix": "clamp"}),
    "position table too short": ("INDEX_OUT_OF_RANGE", {"message": "wpe", "fix": "Cut"}),
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
    "heads do not divide": ("SHAPE_MISMATCH", {"message": "10", "fix": "num_heads"}),
    "transformer src batch": ("SHAPE_MISMATCH", {"message": "src", "fix": "batch"}),
    "attribute typo": ("MODULE_NOT_READY", {"message": "Net", "fix": "fc1"}),
    "grad of int param": ("TENSOR_MISUSED", {"message": "int64", "fix": "float"}),
    "clip of generator twice": ("SCHED_PAST_END", {"message": "scheduler", "fix": "total_steps"}),
}
