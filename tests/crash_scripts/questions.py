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
    "padding mask without its name": """
enc = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 1)
x = torch.randn(4, 7, 8)
mask = torch.zeros(4, 7, dtype=torch.bool)
out = enc(x, mask)  # CRASH
""",
    "padding mask of one layer": """
enc = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
x = torch.randn(4, 7, 8)
mask = torch.zeros(4, 7, dtype=torch.bool)
out = enc(x, mask)  # CRASH
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
opt.step()  # CRASH
""",
    "no GPU": """
def no_gpu(*args, **kwargs):  # as torch raises it where it is built without CUDA, whatever the build here
    raise AssertionError("Torch not compiled with CUDA enabled")  # CRASH
torch.nn.Module.cuda = no_gpu
net = nn.Linear(4, 2).cuda()
""",
    "written in a helper": """
def simulate(net, state):
    for _ in range(3):
        change = net(state)
        state[:, 1:] += change
    return state
end = simulate(nn.Linear(2, 1), torch.randn(4, 2))
end.sum().backward()  # CRASH
""",
    "number indexed": """
loss = nn.functional.mse_loss(nn.Linear(4, 2)(torch.randn(3, 4)), torch.randn(3, 2))
print("loss", loss.data[0])  # CRASH
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
    "pickled lambda": ("WORKER_DIED", {"message": "Rows", "fix": "top level"}),
    "cpu allocator": ("OUT_OF_MEMORY", {"message": "PiB", "fix": "memory="}),
    "bfloat16 linear": ("DTYPE_MISMATCH", {"message": "bfloat16", "fix": "x = x"}),
    "autocast outside": ("DTYPE_MISMATCH", {"message": "bfloat16", "fix": "feats = feats.float()"}),
    "complex into linear": ("DTYPE_MISMATCH", {"message": "complex64", "fix": "abs"}),
    "complex loss": ("LOSS_NOT_SCALAR", {"message": "complex", "fix": ".abs()"}),
    "lstm hidden size": ("SHAPE_MISMATCH", {"message": "h0", "fix": "h0 = torch.zeros(1, x.size(0), 6)"}),
    "padding mask as attn mask": ("SHAPE_MISMATCH", {"message": "[4, 7]", "fix": "key_padding_mask"}),
    "padding mask without its name": (
        "SHAPE_MISMATCH",
        {"message": "[4, 7]", "fix": "out = enc(x, src_key_padding_mask=mask)"},
    ),
    "padding mask of one layer": ("SHAPE_MISMATCH", {"fix": "out = enc(x, src_key_padding_mask=mask)"}),
    "embedding range": ("INDEX_OUT_OF_RANGE", {"message": "Embedding(30, 8)", "fix": "emb = nn.Embedding(31, 8)"}),
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
    "no GPU": ("DEVICE_UNAVAILABLE", {"message": "device that torch does not have", "fix": ".to(device)"}),
    "written in a helper": ("INPLACE_ON_SAVED", {"message": "state[:, 1:] += change", "fix": "clone"}),
    "number indexed": ("SHAPE_MISMATCH", {"message": "loss.data[0]", "fix": "loss.data.item()"}),
    "double backward": ("LOSS_NO_GRAD", {"message": "penalty"}),
    "grad without create_graph": ("LOSS_NO_GRAD", {"message": "penalty", "fix": "create_graph=True"}),
    "optimizer on strings": ("TENSOR_MISUSED", {"message": "named_parameters", "fix": "parameters()"}),
    "forgot to instantiate": ("MODULE_NOT_READY", {"message": "Net", "fix": "Net()"}),
    "list to model": ("TENSOR_MISUSED", {"message": "batch", "fix": "batch[0]"}),
    "loss of tuple": ("TENSOR_MISUSED", {"message": "tuple", "fix": "out[0]"}),
    "criterion class called": ("TENSOR_MISUSED", {"message": "MSELoss", "fix": "nn.MSELoss()("}),
    "forward missing argument": ("MODULE_NOT_READY", {"message": "memory", "fix": "memory"}),
    "forward not implemented": ("MODULE_NOT_READY", {"message": "forward", "fix": "forward"}),
    "cat of lengths": ("SHAPE_MISMATCH", {"message": "[1, 4, 7, 7]", "fix": "interpolate"}),
    "compile break": ("TENSOR_MISUSED", {"message": "compile", "fix": "fullgraph=False"}),
}
