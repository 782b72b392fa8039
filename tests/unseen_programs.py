"""Small trainings of many kinds, faulty and healthy, that were written after the doctor and tried on it as it was."""

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

STEPS = 30


def layer_made_in_the_first_forward() -> None:
    class Fuse(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.text, self.out = nn.Linear(6, 16), nn.Linear(16, 2)
            self.align: nn.Linear | None = None

        def forward(self, text: torch.Tensor, image: torch.Tensor) -> torch.Tensor:
            if self.align is None:
                self.align = nn.Linear(image.shape[1], 16)
            out: torch.Tensor = self.out(torch.relu(self.text(text)) + self.align(image))
            return out

    fuse = Fuse()
    adam = torch.optim.Adam(fuse.parameters(), lr=2e-3)
    for _ in range(STEPS):
        text, image = torch.randn(32, 6), torch.randn(32, 9)
        loss = F.cross_entropy(fuse(text, image), (text[:, 0] + image[:, 0] > 0).long())
        adam.zero_grad()
        loss.backward()
        adam.step()


def thawed_without_the_optimizer() -> None:
    net = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 3))
    net[0].requires_grad_(False)
    optimizer = torch.optim.Adam([p for p in net.parameters() if p.requires_grad], lr=2e-3)
    for step in range(STEPS):
        if step == 12:
            net[0].requires_grad_(True)
        x = torch.randn(32, 12)
        loss = F.cross_entropy(net(x), x[:, :3].argmax(1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def temperature_of_nobody() -> None:
    tower, other = nn.Linear(8, 4), nn.Linear(6, 4)
    scale = torch.tensor(2.6, requires_grad=True)
    optimizer = torch.optim.AdamW([*tower.parameters(), *other.parameters()], lr=1e-3)
    for _ in range(STEPS):
        x = torch.randn(16, 8)
        similar = scale.exp() * F.normalize(tower(x), dim=-1) @ F.normalize(other(x[:, :6]), dim=-1).t()
        loss = F.cross_entropy(similar, torch.arange(16))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def frozen_but_carried_on() -> None:
    net = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 2))
    sgd = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.95, weight_decay=1e-2)
    for step in range(130):
        if step == 15:
            for parameter in net[0].parameters():
                parameter.requires_grad = False
        x = torch.randn(32, 8)
        loss = F.cross_entropy(net(x), (x[:, 0] > 0).long())
        sgd.zero_grad(set_to_none=False)
        loss.backward()
        sgd.step()


def outputs_kept() -> None:
    net = nn.Sequential(nn.Linear(12, 48), nn.ReLU(), nn.Linear(48, 3))
    optimizer, kept = torch.optim.Adam(net.parameters(), lr=1e-3), []
    for _ in range(60):
        x = torch.randn(32, 12)
        logits = net(x)
        loss = F.cross_entropy(logits, x[:, :3].argmax(1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        kept.append(logits)


def penalty_without_a_graph(create_graph: bool = False) -> None:
    critic = nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 1))
    optimizer = torch.optim.Adam(critic.parameters(), lr=1e-4)
    for _ in range(STEPS):
        real, fake = torch.randn(32, 2), torch.randn(32, 2) + 1
        mid = (0.5 * real + 0.5 * fake).requires_grad_()
        (slope,) = torch.autograd.grad(critic(mid).sum(), mid, create_graph=create_graph)
        loss = critic(fake).mean() - critic(real).mean() + 10 * ((slope.norm(2, dim=1) - 1) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def closure_that_clears_nothing(clears: bool = False, adam_first: bool = False) -> None:
    field = nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 1))
    t = torch.linspace(0, 1, 32)[:, None]
    lbfgs = torch.optim.LBFGS(field.parameters(), lr=0.3, max_iter=6)

    def closure() -> Any:
        if clears:
            lbfgs.zero_grad()
        loss = (field(t) - torch.sin(6 * t)).square().mean()
        loss.backward()
        return loss

    adam = torch.optim.Adam(field.parameters(), lr=1e-2)
    for _ in range(12 if adam_first else 0):
        closure()
        adam.step()
        adam.zero_grad()
    for _ in range(12):
        lbfgs.step(closure)


def codes_by_chance() -> None:
    coder, decoder = nn.Linear(10, 6), nn.Linear(6, 10)
    optimizer = torch.optim.Adam([*coder.parameters(), *decoder.parameters()], lr=1e-3)
    for _ in range(STEPS):
        x = torch.randn(32, 10)
        loss = (decoder(torch.bernoulli(torch.sigmoid(coder(x)))) - x).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def scores_into_nll() -> None:
    net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 5))
    optimizer = torch.optim.Adam(net.parameters(), lr=2e-3)
    for _ in range(STEPS):
        x = torch.randn(32, 16)
        loss = F.nll_loss(net(x), x[:, :5].argmax(1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def dropout_made_in_forward() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(14, 32), nn.Linear(32, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.b(nn.Dropout(0.5)(torch.relu(self.a(x))))
            return out

    net = Net()
    optimizer = torch.optim.Adam(net.parameters(), lr=2e-3)
    for step in range(STEPS):
        net.train()
        x = torch.randn(32, 14)
        loss = F.cross_entropy(net(x), x[:, :3].argmax(1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step > 10:
            net.eval()
            with torch.no_grad():
                net(x)


def returns_of_numbers() -> None:
    policy = nn.Linear(3, 2)
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2)
    for _ in range(STEPS):
        chances = []
        for _ in range(4):
            choice = torch.distributions.Categorical(logits=policy(torch.randn(3)))
            chances.append(choice.log_prob(choice.sample()).item())
        loss = -(torch.tensor(chances, requires_grad=True) * torch.randn(4)).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def teacher(*, evaluating: bool = False) -> None:
    def net() -> nn.Sequential:
        return nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 3))

    def fit(model: nn.Module, target: Any, steps: int) -> None:
        optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
        for _ in range(steps):
            x = torch.randn(32, 8)
            loss = F.cross_entropy(model(x), target(x))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    old, new = net(), net()
    fit(old, lambda x: x[:, :3].argmax(1), 30)
    old.requires_grad_(False)
    old.train(not evaluating)

    def soft(x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            out: torch.Tensor = old(x).softmax(1)
            return out

    fit(new, soft, 40)


def stepped_by_hand_beside_an_optimizer() -> None:
    net = nn.Sequential(nn.Linear(6, 24), nn.ReLU(), nn.Linear(24, 1))
    sgd = torch.optim.SGD(net.parameters(), lr=0.05)
    for _ in range(STEPS):
        x = torch.randn(32, 6)
        loss = (net(x) - x.sum(1, keepdim=True)).pow(2).mean()
        sgd.zero_grad()
        loss.backward()
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.sub_(sgd.param_groups[0]["lr"] * parameter.grad)


def average_teacher() -> None:
    student = nn.Sequential(nn.Linear(8, 24), nn.BatchNorm1d(24), nn.ReLU(), nn.Linear(24, 4))
    slow = copy.deepcopy(student).requires_grad_(False)
    optimizer = torch.optim.SGD(student.parameters(), lr=0.05, momentum=0.9)
    for _ in range(STEPS):
        x = torch.randn(32, 8)
        with torch.no_grad():
            target = slow(x + 0.1 * torch.randn_like(x))
        loss = F.mse_loss(student(x), target) + F.cross_entropy(student(x), x[:, :4].argmax(1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for one, other in zip(slow.parameters(), student.parameters(), strict=True):
                one.lerp_(other, 0.01)


def evaluated_before_it_is_trained(*, part: bool = False) -> None:
    """A model whose first part is in no optimizer; that part alone stays in evaluation mode, or it does not."""
    net = nn.Sequential(nn.Sequential(nn.Linear(16, 32), nn.ReLU()), nn.Linear(32, 4))
    net.train(False)
    with torch.no_grad():
        net(torch.randn(8, 16))
    optimizer = torch.optim.Adam(net[1].parameters(), lr=1e-2)
    net.train()
    net[0].train(not part)
    for _ in range(STEPS):
        x = torch.randn(32, 16)
        loss = F.cross_entropy(net(x), x[:, :4].argmax(1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def sequences_from_a_start_symbol() -> None:
    """The parts of a decoder are called one by one, and the first symbol of each sequence is the same."""
    embedding, cell, out = nn.Embedding(12, 16), nn.GRUCell(16, 32), nn.Linear(32, 12)
    parts = nn.ModuleList([embedding, cell, out])
    optimizer = torch.optim.Adam(parts.parameters(), lr=3e-3)
    for _ in range(STEPS):
        target = torch.randint(0, 11, (16, 5)).sort(1).values
        token, state, loss = torch.full((16,), 11), torch.randn(16, 32), torch.tensor(0.0)
        for step in range(5):
            state = cell(embedding(token), state)
            loss = loss + F.cross_entropy(out(state), target[:, step])
            token = target[:, step]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
