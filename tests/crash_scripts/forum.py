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
net = nn.Sequential(OrderedDict([("stem", nn.Conv2d(3, 16, 3, stride=2)), ("act", nn.ReLU()), ("pool", nn.AdaptiveAvgPool2d(1))]))
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
    loss = F.mse_loss(reg(xb), yb)
    loss.backward()
""",
    "bool minus": """
mask = torch.tensor([[1, 1, 0], [1, 0, 0]]).bool()
scores = torch.randn(2, 3)
scores = scores - 1e9 * (1 - mask)  # CRASH
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
]
