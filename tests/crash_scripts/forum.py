"""Crashes as they are posted on forums, one of each kind."""

SCRIPTS = {
    "cnn flatten": """
class SimpleCNN(nn.Module):
    def __init__(self, num_classes=10):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 6, 5, padding=1)
        self.pool = nn.MaxPool2d(2, 2)
        self.conv2 = nn.Conv2d(6, 16, 5, padding=1)
        self.fc1 = nn.Linear(16 * 5 * 5, 120)
        self.fc2 = nn.Linear(120, num_classes)
    def forward(self, x):
        x = self.pool(F.relu(self.conv1(x)))
        x = self.pool(F.relu(self.conv2(x)))
        x = torch.flatten(x, 1)
        x = F.relu(self.fc1(x))  # CRASH
        return self.fc2(x)
model = SimpleCNN()
criterion = nn.CrossEntropyLoss()
for images, labels in [(torch.randn(4, 3, 32, 32), torch.randint(0, 10, (4,)))]:
    loss = criterion(model(images), labels)
    loss.backward()
""",
    "one-hot long": """
model = nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 7))
criterion = nn.CrossEntropyLoss()
x = torch.randn(16, 20)
y = F.one_hot(torch.randint(0, 7, (16,)), num_classes=7)
for epoch in range(2):
    out = model(x)
    loss = criterion(out, y)  # CRASH
    loss.backward()
""",
    "bce shape and long": """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(8, 1)
    def forward(self, x):
        return self.fc(x)
net = Net()
loss_fn = nn.BCEWithLogitsLoss()
data = torch.utils.data.TensorDataset(torch.randn(32, 8), torch.randint(0, 2, (32,)))
for inputs, targets in torch.utils.data.DataLoader(data, batch_size=8):
    outputs = net(inputs)
    loss = loss_fn(outputs, targets)  # CRASH
    loss.backward()
""",
    "lstm no feature dim": """
class Forecaster(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(input_size=1, hidden_size=16, batch_first=True)
        self.out = nn.Linear(16, 1)
    def forward(self, x):
        h, _ = self.lstm(x)  # CRASH
        return self.out(h[:, -1])
model = Forecaster()
series = torch.randn(12, 30)
pred = model(series)
""",
    "sdpa mask long": """
B, H, T, D = 2, 4, 6, 8
q, k, v = torch.randn(B, H, T, D), torch.randn(B, H, T, D), torch.randn(B, H, T, D)
attention_mask = torch.ones(B, 1, 1, T, dtype=torch.long)
out = F.scaled_dot_product_attention(q, k, v, attn_mask=attention_mask)  # CRASH
""",
    "leaf view write": """
weights = torch.zeros(5, requires_grad=True)
weights[0] = 1.0  # CRASH
y = (weights * torch.arange(5.0)).sum()
y.backward()
""",
    "running total": """
model = nn.Linear(4, 1)
opt = torch.optim.Adam(model.parameters())
total_loss = 0
for step in range(3):
    x, y = torch.randn(8, 4), torch.randn(8, 1)
    loss = F.mse_loss(model(x), y)
    total_loss += loss
    opt.zero_grad()
    total_loss.backward()  # CRASH
    opt.step()
""",
    "half model": """
class Enc(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(1, 4, 3)
        self.fc = nn.Linear(4, 2)
    def forward(self, wav):
        return self.fc(self.conv(wav).mean(-1))  # CRASH
enc = Enc().half()
wave = torch.from_numpy(__import__("numpy").random.randn(2, 1, 50).astype("float32"))
enc(wave)
""",
    "hwc batch": """
from collections import OrderedDict
layers = [("stem", nn.Conv2d(3, 16, 3, stride=2)), ("act", nn.ReLU()), ("pool", nn.AdaptiveAvgPool2d(1))]
net = nn.Sequential(OrderedDict(layers))
import numpy as np
imgs = torch.from_numpy(np.random.rand(8, 48, 64, 3).astype("float32"))
feats = net(imgs)  # CRASH
""",
    "unet upsample": """
class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.down = nn.Conv2d(1, 8, 3, stride=2, padding=1)
        self.enc = nn.Conv2d(1, 8, 3, padding=1)
        self.up = nn.ConvTranspose2d(8, 8, 2, stride=2)
        self.out = nn.Conv2d(16, 1, 1)
    def forward(self, x):
        skip = self.enc(x)
        y = self.up(self.down(x))
        y = torch.cat([skip, y], dim=1)  # CRASH
        return self.out(y)
UNet()(torch.randn(2, 1, 29, 29))
""",
    "groupnorm": """
class Block(nn.Module):
    def __init__(self, c_in, c_out):
        super().__init__()
        self.conv = nn.Conv2d(c_in, c_out, 3, padding=1)
        self.norm = nn.GroupNorm(4, c_in)
    def forward(self, x):
        return F.silu(self.norm(self.conv(x)))  # CRASH
net = nn.Sequential(Block(8, 16), Block(16, 16))
net(torch.randn(2, 8, 10, 10))
""",
    "pack lengths": """
from torch.nn.utils.rnn import pack_padded_sequence
emb, gru = nn.Embedding(50, 8), nn.GRU(8, 12, batch_first=True)
tokens = torch.randint(0, 50, (3, 7))
lengths = torch.tensor([4, 7, 5])
packed = pack_padded_sequence(emb(tokens), lengths, batch_first=True)  # CRASH
out, h = gru(packed)
""",
    "scatter one-hot": """
labels = torch.randint(0, 5, (6,))
onehot = torch.zeros(6, 5)
onehot.scatter_(1, labels, 1.0)  # CRASH
""",
    "numpy double": """
import numpy as np
X, Y = np.random.randn(64, 5), np.random.randn(64, 1)
ds = torch.utils.data.TensorDataset(torch.from_numpy(X), torch.from_numpy(Y))
class Reg(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 1))
    def forward(self, inp):
        return self.net(inp)  # CRASH
reg = Reg()
for xb, yb in torch.utils.data.DataLoader(ds, batch_size=16):
    loss = F.mse_loss(reg(xb), yb.float())
    loss.backward()
""",
    "bool minus": """
mask = torch.tensor([[1, 1, 0], [1, 0, 0]]).bool()
scores = torch.randn(2, 3)
scores = scores - 1e9 * (1 - mask)  # CRASH
""",
    "vocab pad": """
sentences = [["the", "cat", "sat"], ["a", "dog"]]
vocab = {w: i for i, w in enumerate(sorted({w for s in sentences for w in s}))}
pad = len(vocab)
ids = torch.tensor([[vocab[w] for w in s] + [pad] * (4 - len(s)) for s in sentences])
class Bag(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.embedding = nn.Embedding(n, 6)
        self.fc = nn.Linear(6, 2)
    def forward(self, tokens):
        return self.fc(self.embedding(tokens).mean(1))  # CRASH
Bag(len(vocab))(ids)
""",
    "bi lstm state": """
class Tagger(nn.Module):
    def __init__(self, hidden=10):
        super().__init__()
        self.hidden = hidden
        self.lstm = nn.LSTM(5, hidden, num_layers=2, bidirectional=True, batch_first=True)
    def init_hidden(self, batch):
        return torch.zeros(2, batch, self.hidden), torch.zeros(2, batch, self.hidden)
    def forward(self, x):
        hidden = self.init_hidden(x.size(0))
        out, hidden = self.lstm(x, hidden)  # CRASH
        return out
Tagger()(torch.randn(3, 9, 5))
""",
    "rewrapped loss": """
model = nn.Linear(6, 1)
opt = torch.optim.SGD(model.parameters(), lr=0.01)
losses = []
for x in torch.randn(4, 2, 6):
    losses.append(model(x).pow(2).mean())
loss = torch.tensor(losses).mean()
opt.zero_grad()
loss.backward()  # CRASH
opt.step()
""",
    "positions on meta": """
class PosEnc(nn.Module):
    def __init__(self, d, n=32):
        super().__init__()
        self.pe = torch.zeros(1, n, d, device="meta")
    def forward(self, x):
        x = x + self.pe[:, : x.size(1)]  # CRASH
        return x
enc = nn.Sequential(PosEnc(8), nn.Linear(8, 4))
enc(torch.randn(2, 5, 8))
""",
    "ragged tuples": """
class Sentences(torch.utils.data.Dataset):
    def __init__(self):
        self.data = [(torch.randint(1, 9, (n,)), n % 2) for n in (4, 6, 3, 5)]
    def __len__(self):
        return len(self.data)
    def __getitem__(self, i):
        return self.data[i]
loader = torch.utils.data.DataLoader(Sentences(), batch_size=2)
for x, y in loader:  # CRASH
    print(x.shape)
""",
    "missing return": """
class Pairs(torch.utils.data.Dataset):
    def __init__(self, train=True):
        self.x, self.train = torch.randn(10, 3), train
    def __len__(self):
        return 10
    def __getitem__(self, i):
        row = self.x[i]
        if self.train:
            row = row + 0.1 * torch.randn(3)
        else:
            return row
for batch in torch.utils.data.DataLoader(Pairs(), batch_size=5):  # CRASH
    batch.mean()
""",
    "fine-tune head": """
class Backbone(nn.Module):
    def __init__(self, num_classes):
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.classifier = nn.Linear(8, num_classes)
    def forward(self, x):
        return self.classifier(self.features(x))
pretrained = Backbone(1000).state_dict()
model = Backbone(10)
model.load_state_dict(pretrained)  # CRASH
""",
    "bn single image": """
class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(12, 6)
        self.bn = nn.BatchNorm1d(6)
    def forward(self, x):
        return self.bn(self.fc(x))  # CRASH
head = Head()
image = torch.randn(12)
with torch.no_grad():
    out = head(image.unsqueeze(0))
""",
    "plateau step": """
model = nn.Linear(3, 1)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=2)
for epoch in range(3):
    optimizer.zero_grad()
    train_loss = model(torch.randn(4, 3)).pow(2).mean()
    train_loss.backward()
    optimizer.step()
    scheduler.step()  # CRASH
""",
    "hf labels": """
from dataclasses import dataclass
@dataclass
class Output:
    loss: object = None
    logits: object = None
class ForClassification(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(5, 3)
    def forward(self, input_ids, labels=None):
        logits = self.net(input_ids)
        loss = None
        if labels is not None:
            loss = F.cross_entropy(logits, labels)
        return Output(loss, logits)
model = ForClassification()
batch = {"input_ids": torch.randn(4, 5), "label": torch.randint(0, 3, (4,))}
outputs = model(batch["input_ids"])
outputs.loss.backward()  # CRASH
""",
    "permute view": """
class Mixer(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(12, 3)
    def forward(self, x):
        b = x.size(0)
        x = x.permute(0, 2, 1)
        x = x.view(b, -1)  # CRASH
        return self.fc(x)
Mixer()(torch.randn(2, 3, 4))
""",
    "save lambda": """
import io
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(3, 3)
        self.act = lambda x: torch.relu(x)
    def forward(self, x):
        return self.act(self.fc(x))
net = Net()
torch.save(net, io.BytesIO())  # CRASH
""",
    "multinomial of logits": """
class LM(nn.Module):
    def __init__(self, v=11):
        super().__init__()
        self.emb, self.head = nn.Embedding(v, 8), nn.Linear(8, v)
    def forward(self, ids):
        return self.head(self.emb(ids))
lm = LM()
ids = torch.randint(0, 11, (2, 5))
logits = lm(ids)[:, -1]
next_id = torch.multinomial(logits, num_samples=1)  # CRASH
""",
    "seq ce": """
class Seq(nn.Module):
    def __init__(self, vocab=13):
        super().__init__()
        self.emb = nn.Embedding(vocab, 8)
        self.rnn = nn.GRU(8, 8, batch_first=True)
        self.head = nn.Linear(8, vocab)
    def forward(self, x):
        h, _ = self.rnn(self.emb(x))
        return self.head(h)
net = Seq()
tokens = torch.randint(0, 13, (4, 9))
logits = net(tokens[:, :-1])
target = tokens[:, 1:]
loss = F.cross_entropy(logits, target)  # CRASH
""",
    "parameters uncalled": """
model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters, lr=0.1)  # CRASH
""",
    "regression target cols": """
net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
crit = nn.BCELoss()
probs = torch.sigmoid(net(torch.randn(10, 6)))
y = torch.randint(0, 2, (3, 10)).float()
loss = crit(probs, y)  # CRASH
""",
    "conv1d channels": """
class Kws(nn.Module):
    def __init__(self):
        super().__init__()
        self.c1 = nn.Conv1d(40, 16, 3)
    def forward(self, mel):
        return self.c1(mel).mean(-1)  # CRASH
mel = torch.randn(4, 98, 40)
Kws()(mel)
""",
    "maxpool linear chw": """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.MaxPool2d(2))
        self.head = nn.Sequential(nn.Linear(8 * 13 * 13, 10))
    def forward(self, x):
        return self.head(self.body(x))  # CRASH
Net()(torch.randn(5, 1, 28, 28))
""",
    "embedding got float": """
import numpy as np
items = torch.tensor(np.array([[1.0, 5.0], [3.0, 2.0]]))
emb = nn.Embedding(10, 4)
v = emb(items)  # CRASH
""",
    "gather index dims": """
q = torch.randn(8, 4)
actions = torch.randint(0, 4, (8,))
chosen = q.gather(1, actions)  # CRASH
""",
    "bmm 2d": """
a = torch.randn(5, 7)
ctx = torch.randn(5, 7, 3)
out = torch.bmm(a, ctx)  # CRASH
""",
    "stack differing": """
outs = []
for n in (3, 4, 5):
    outs.append(torch.randn(n, 2))
batch = torch.stack(outs)  # CRASH
""",
    "mha batch first": """
att = nn.MultiheadAttention(16, 4)
q = torch.randn(10, 2, 16)
kv = torch.randn(2, 12, 16)
out, w = att(q, kv, kv)  # CRASH
""",
    "layernorm dims": """
class Block(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.proj = nn.Linear(d, 2 * d)
        self.ln = nn.LayerNorm(d)
    def forward(self, x):
        return self.ln(self.proj(x))  # CRASH
Block(6)(torch.randn(3, 6))
""",
    "bias add broadcast": """
h = torch.randn(4, 10, 32)
speaker = torch.randn(4, 32)
h = h + speaker  # CRASH
""",
    "masked fill float": """
scores = torch.randn(2, 4, 4)
mask = torch.tril(torch.ones(4, 4))
scores = scores.masked_fill(mask, float("-inf"))  # CRASH
""",
}

EXPECTED = {
    "cnn flatten": ("SHAPE_MISMATCH", "fc1", "576"),
    "one-hot long": ("DTYPE_MISMATCH", "y", "y.float()"),
    "bce shape and long": ("SHAPE_MISMATCH", "targets", "targets.float().unsqueeze"),
    "lstm no feature dim": ("SHAPE_MISMATCH", "lstm", "unsqueeze(-1)"),
    "sdpa mask long": ("DTYPE_MISMATCH", "attention_mask", "attention_mask = attention_mask.bool"),
    "leaf view write": ("LEAF_INPLACE", "weights", "no_grad"),
    "running total": ("BACKWARD_TWICE_STATE", "total_loss", "total_loss = total_loss.detach"),
    "half model": ("DTYPE_MISMATCH", "wav", "wav = wav.half"),
    "hwc batch": ("SHAPE_MISMATCH", "imgs", "imgs = imgs.permute(0, 3, 1, 2)"),
    "unet upsample": ("SHAPE_MISMATCH", "skip", "interpolate"),
    "groupnorm": ("SHAPE_MISMATCH", "norm", "GroupNorm(4, 16)"),
    "pack lengths": ("SHAPE_MISMATCH", "lengths", "enforce_sorted=False"),
    "scatter one-hot": ("SHAPE_MISMATCH", "labels", "labels.unsqueeze(-1)"),
    "numpy double": ("DTYPE_MISMATCH", "inp", "float"),
    "bool minus": ("DTYPE_MISMATCH", "mask", "mask.long()"),
    "vocab pad": ("INDEX_OUT_OF_RANGE", "embedding", "6"),
    "bi lstm state": ("SHAPE_MISMATCH", "lstm", "zeros(4,"),
    "rewrapped loss": ("LOSS_NO_GRAD", "tensor", "stack"),
    "positions on meta": ("DEVICE_MISMATCH", "pe", "register_buffer"),
    "ragged tuples": ("SHAPE_MISMATCH", "size", "pad_sequence"),
    "missing return": ("SHAPE_MISMATCH", "None", "return"),
    "fine-tune head": ("STATE_NOT_LOADED", "classifier", "del "),
    "bn single image": ("BN_ONE_VALUE", "bn", "eval()"),
    "plateau step": ("MODULE_NOT_READY", "metrics", "scheduler.step(train_loss"),
    "hf labels": ("TENSOR_MISUSED", "loss", "labels="),
    "permute view": ("SHAPE_MISMATCH", "contiguous", "reshape"),
    "save lambda": ("WORKER_DIED", "", "def "),
    "multinomial of logits": ("DISTRIBUTION_PARAMETER", "logits", "softmax"),
    "seq ce": ("SHAPE_MISMATCH", "logits", "logits = logits.transpose(-2, -1)"),
    "parameters uncalled": ("TENSOR_MISUSED", "parameters", "parameters()"),
    "regression target cols": ("SHAPE_MISMATCH", "probs", "transpose"),
    "conv1d channels": ("SHAPE_MISMATCH", "mel", "mel = mel.transpose"),
    "maxpool linear chw": ("SHAPE_MISMATCH", "head", "flatten(1)"),
    "embedding got float": ("DTYPE_MISMATCH", "items", "items = items.long"),
    "gather index dims": ("SHAPE_MISMATCH", "actions", "unsqueeze(-1)"),
    "bmm 2d": ("SHAPE_MISMATCH", "a", "a = a.unsqueeze(1)"),
    "stack differing": ("SHAPE_MISMATCH", "outs", "pad_sequence"),
    "mha batch first": ("SHAPE_MISMATCH", "kv", "kv = kv.transpose(0, 1)"),
    "layernorm dims": ("SHAPE_MISMATCH", "ln", "LayerNorm(12)"),
    "bias add broadcast": ("SHAPE_MISMATCH", "speaker", "speaker = speaker.unsqueeze(1)"),
    "masked fill float": ("DTYPE_MISMATCH", "mask", "mask = mask.bool"),
}

TRIED = [
    "cnn flatten",
    "one-hot long",
    "bce shape and long",
    "lstm no feature dim",
    "sdpa mask long",
    "half model",
    "hwc batch",
    "unet upsample",
    "groupnorm",
    "pack lengths",
    "scatter one-hot",
    "numpy double",
    "bool minus",
    "vocab pad",
    "bi lstm state",
    "bn single image",
    "permute view",
    "multinomial of logits",
    "seq ce",
    "parameters uncalled",
    "regression target cols",
    "conv1d channels",
    "maxpool linear chw",
    "embedding got float",
    "gather index dims",
    "bmm 2d",
    "stack differing",
    "mha batch first",
    "layernorm dims",
    "bias add broadcast",
    "masked fill float",
]
