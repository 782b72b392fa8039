"""Scripts whose graph is not as their backward needs it."""

HEAD = """
import torch
from torch import nn
import torch.nn.functional as F
torch.manual_seed(0)
"""

SCRIPTS = {
    "hidden state": """
class Speaker(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = nn.LSTM(3, 4, batch_first=True)
        self.out = nn.Linear(4, 1)
    def forward(self, x, memory):
        y, memory = self.cell(x, memory)
        return self.out(y), memory

speaker = Speaker()
adam = torch.optim.Adam(speaker.parameters())
memory = (torch.zeros(1, 2, 4), torch.zeros(1, 2, 4))
for index in range(3):
    x = torch.randn(2, 5, 3)
    guess, memory = speaker(x, memory)
    cost = guess.pow(2).mean()
    adam.zero_grad()
    cost.backward()  # CRASH
    adam.step()
""",
    "hidden state in a function": """
def one_step(net, x, state, opt):
    y, state = net(x, state)
    loss = y.pow(2).mean()
    opt.zero_grad()
    loss.backward()  # CRASH
    opt.step()
    return loss.item(), state

def main():
    net = nn.GRU(3, 4)
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    state = torch.zeros(1, 2, 4)
    for _ in range(3):
        value, state = one_step(net, torch.randn(5, 2, 3), state, opt)

main()
""",
    "state on a module": """
class Stateful(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(6, 3)
        self.last = None
    def forward(self, x):
        last = torch.zeros(len(x), 3) if self.last is None else self.last
        self.last = torch.tanh(self.lin(torch.cat([x, last], 1)))
        return self.last

stateful = Stateful()
opt = torch.optim.SGD(stateful.parameters(), lr=0.1)
for _ in range(3):
    loss = stateful(torch.randn(2, 3)).sum()
    loss.backward()  # CRASH
""",
    "computed once": """
encoder, head = nn.Sequential(nn.Linear(3, 4), nn.Tanh()), nn.Linear(4, 1)
opt = torch.optim.SGD(head.parameters(), lr=0.1)
features = encoder(torch.randn(8, 3))
for _ in range(3):
    loss = head(features).pow(2).mean()
    opt.zero_grad()
    loss.backward()  # CRASH
    opt.step()
""",
    "two losses": """
net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
for x in torch.randn(2, 8, 3):
    out = net(x)
    first = out[:, 0].pow(2).mean()
    second = out[:, 1].abs().mean()
    first.backward()
    second.backward()  # CRASH
""",
    "in place on a relu": """
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(8, 8)
    def forward(self, x):
        y = F.relu(self.lin(x))
        y += x  # CHANGE
        return y

net = nn.Sequential(nn.Linear(3, 8), Block(), nn.Linear(8, 1))
loss = net(torch.randn(4, 3)).mean()
loss.backward()  # CRASH
""",
    "in place in the loop": """
net = nn.Linear(3, 8)
for x in torch.randn(2, 4, 3):
    gate = torch.sigmoid(net(x))
    value = gate * 2
    gate[:, 0] = 0.0  # CHANGE
    value.sum().backward()  # CRASH
""",
    "in place by a module": """
class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(4, 4)
        self.act = nn.ReLU(inplace=True)
    def forward(self, x):
        y = torch.exp(self.lin(x))
        return self.act(y - 1) + self.act(y)  # CHANGE

net = Twice()
net(torch.randn(2, 4)).sum().backward()  # CRASH
""",
    "step before backward": """
gen, disc = nn.Linear(2, 3), nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
opt_d = torch.optim.SGD(disc.parameters(), lr=0.1)
opt_g = torch.optim.SGD(gen.parameters(), lr=0.1)
for _ in range(2):
    fake = gen(torch.randn(4, 2))
    g_loss = disc(fake).mean()
    d_loss = -disc(fake.detach()).mean()
    opt_d.zero_grad()
    d_loss.backward()
    opt_d.step()  # CHANGE
    g_loss.backward()  # CRASH
    opt_g.step()
""",
    "retained graph": """
rnn = nn.RNN(3, 4)
opt = torch.optim.SGD(rnn.parameters(), lr=0.1)
h = torch.zeros(1, 2, 4)
for _ in range(3):
    out, h = rnn(torch.randn(5, 2, 3), h)
    loss = out.mean()
    loss.backward(retain_graph=True)  # CRASH
    opt.step()
""",
    "leaf in place": """
weight = torch.randn(3, requires_grad=True)
(weight * 2).sum().backward()
weight -= 0.1 * weight.grad  # CRASH
""",
    "parameter in place": """
class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(3))
    def forward(self, x):
        self.gain.clamp_(0, 1)  # CRASH
        return x * self.gain

class Whole(nn.Module):
    def __init__(self):
        super().__init__()
        self.scaled = Scaled()
    def forward(self, x):
        return self.scaled(x)

whole = Whole()
whole(torch.ones(2, 3))
""",
    "argmax": """
net = nn.Linear(3, 5)
x, y = torch.randn(4, 3), torch.randint(0, 5, (4,))
scores = net(x)
picked = scores.argmax(1).float()  # CUT
error = F.mse_loss(picked, y.float())
error.backward()  # CRASH
""",
    "no_grad": """
net = nn.Linear(3, 1)
x = torch.randn(4, 3)
with torch.no_grad():  # CUT
    out = net(x)
loss = out.mean()
loss.backward()  # CRASH
""",
    "no_grad on a method": """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(3, 1)
    @torch.no_grad()  # CUT
    def forward(self, x):
        return self.lin(x)

net = Net()
net(torch.randn(4, 3)).mean().backward()  # CRASH
""",
    "detached inside": """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(3, 1)
    def forward(self, x):
        y = self.lin(x).detach()  # CUT
        return y * 2

net = Net()
loss = net(torch.randn(4, 3)).mean()
loss.backward()  # CRASH
""",
    "switched off": """
torch.set_grad_enabled(False)  # CUT
net = nn.Linear(3, 1)
loss = net(torch.randn(4, 3)).mean()
try:
    loss.backward()  # CRASH
finally:
    CLEANUP.append(lambda: torch.set_grad_enabled(True))
""",
    "all frozen": """
net = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))
for p in net.parameters():
    p.requires_grad = False
loss = net(torch.randn(4, 3)).mean()
loss.backward()  # CRASH
""",
    "checkpoint": """
from torch.utils.checkpoint import checkpoint
import warnings
warnings.simplefilter("ignore")
net = nn.Linear(3, 1)
out = checkpoint(net, torch.randn(4, 3), use_reentrant=True)  # CUT
loss = out.mean()
loss.backward()  # CRASH
""",
    "item": """
net = nn.Linear(3, 1)
total = 0.0
for x in torch.randn(2, 4, 3):
    total = total + net(x).mean().item()  # CUT
loss = torch.tensor(total)
loss.backward()  # CRASH
""",
    "inference forward": """
net = nn.Linear(3, 1)
with torch.inference_mode():  # CUT
    out = net(torch.randn(4, 3))
loss = out.mean()
loss.backward()  # CRASH
""",
    "no scalar": """
net = nn.Linear(3, 2)
loss = F.mse_loss(net(torch.randn(4, 3)), torch.zeros(4, 2), reduction="none")
loss.backward()  # CRASH
""",
    "inference tensor": """
backbone, head = nn.Linear(3, 4), nn.Linear(4, 1)
with torch.inference_mode():
    feats = backbone(torch.randn(2, 3))
score = head(feats)  # CRASH
""",
    "detach view": """
net = nn.Linear(3, 4)
out = net(torch.randn(2, 3))
first = out[:, 0]
first.detach_()  # CRASH
""",
    "numpy": """
net = nn.Linear(3, 4)
out = net(torch.randn(2, 3))
history = out.numpy()  # CRASH
""",
    "grad is None": """
net = nn.ModuleDict({"used": nn.Linear(3, 1), "spare": nn.Linear(3, 1)})
net["used"](torch.randn(2, 3)).sum().backward()
for p in net.parameters():
    p.data -= 0.1 * p.grad.data  # CRASH
""",
    "grad of a non-leaf": """
w = torch.randn(3, requires_grad=True) * 0.01
import warnings
warnings.simplefilter("ignore")
(w * 2).sum().backward()
step = w.grad * 0.1  # CRASH
""",
    "unused in grad": """
net = nn.Linear(3, 1)
other = torch.ones(3, requires_grad=True)
y = net(torch.randn(2, 3)).sum()
g = torch.autograd.grad(y, [net.weight, other])  # CRASH
""",
    "deepcopy": """
import copy
net = nn.Linear(3, 1)
net.cache = net(torch.randn(2, 3))
twin = copy.deepcopy(net)  # CRASH
""",
    "flags of a non-leaf": """
net = nn.Linear(3, 1)
out = net(torch.randn(2, 3))
out.requires_grad = False  # CRASH
""",
    "nan found by anomaly mode": """
x = torch.zeros(3, requires_grad=True)
import warnings
warnings.simplefilter("ignore")
with torch.autograd.detect_anomaly():
    y = (torch.sqrt(x) * 0).sum()
    y.backward()  # CRASH
""",
}
