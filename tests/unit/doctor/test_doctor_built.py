"""Small programs whose models are built otherwise than they look, and healthy ones that look like them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from anybatch.doctor.recorder import Doctor
from anybatch.records.findings import Finding

pytestmark = pytest.mark.asks


def first(program: Callable[[], Any]) -> tuple[Finding, ...]:
    torch.manual_seed(0)
    with Doctor(every=20) as doctor:
        program()
    return doctor.findings


def trained(model: nn.Module, outputs: int = 3, loss: Callable[[Tensor, Tensor], Tensor] | None = None) -> None:
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05)
    for _ in range(30):
        x = torch.randn(32, 8)
        y = x[:, :outputs].argmax(1)
        out = model(x)
        value = F.cross_entropy(out, y) if loss is None else loss(out, x[:, :1])
        optimizer.zero_grad()
        value.backward()
        optimizer.step()


class Anew(nn.Module):
    """Makes a layer in each forward."""

    def __init__(self, *, assigned: bool) -> None:
        super().__init__()
        self.assigned, self.a, self.b = assigned, nn.Linear(8, 16), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        inner = nn.Linear(16, 16)
        if self.assigned:
            self.inner = inner
        out: Tensor = self.b(torch.relu(inner(torch.relu(self.a(x)))))
        return out


class Blocks(nn.Module):
    """Runs a list of blocks."""

    def __init__(self, blocks: list[nn.Module]) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList(blocks), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + torch.relu(block(x))
        out: Tensor = self.head(x)
        return out


def rounded(out: Tensor, y: Tensor) -> Tensor:
    return ((out.round() - y) ** 2).mean()


def bent() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))


FAULTY: dict[str, tuple[Callable[[], Any], str, str]] = {
    "anew, assigned": (lambda: trained(Anew(assigned=True)), "OPT_PARAM_MISSING", "self.inner = nn.Linear(...)"),
    "anew": (lambda: trained(Anew(assigned=False)), "OPT_PARAM_UNREGISTERED", "once, in __init__ of Anew"),
    "blocks": (lambda: trained(Blocks([nn.Linear(8, 8)] * 4)), "MODULE_REPEATED", "for _ in range(4)"),
    "linear": (lambda: trained(nn.Sequential(nn.Linear(8, 32), nn.Linear(32, 3))), "NO_ACTIVATION", "relu"),
    "linear, normed": (
        lambda: trained(nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.Dropout(), nn.Linear(32, 3))),
        "NO_ACTIVATION",
        "relu",
    ),
    "rounded": (lambda: trained(bent(), loss=rounded), "GRAPH_CUT", "straight through"),
    "relu": (
        lambda: trained(nn.Sequential(bent(), nn.ReLU()), loss=F.mse_loss),
        "OUTPUT_RANGE",
        "remove the relu",
    ),
    "momentum": (
        lambda: trained(
            nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16, momentum=0.999), nn.ReLU(), nn.Linear(16, 3))
        ),
        "BN_MOMENTUM",
        "momentum",
    ),
    "dropout": (
        lambda: trained(
            nn.Sequential(nn.Dropout(0.95), nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.95), nn.Linear(16, 3))
        ),
        "DROPOUT_TOO_HIGH",
        "nn.Dropout",
    ),
}


@pytest.mark.parametrize(("program", "name", "fix"), FAULTY.values(), ids=FAULTY)
def test_a_faulty_program_is_named_first(program: Callable[[], Any], name: str, fix: str) -> None:
    one = first(program)[0]
    assert (one.name, one.severity in ("error", "warning")) == (name, True), one
    assert fix in one.fix


class LowRank(nn.Module):
    """A layer with an adapter of low rank, whose result nothing bends."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.base = nn.Linear(8, 2), nn.Linear(2, 3), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.base(x) + self.b(self.a(x))
        return out


class SideBySide(nn.Module):
    """Two layers of the same size whose results are added, as of the season and the trend of a series."""

    def __init__(self) -> None:
        super().__init__()
        self.season, self.trend = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        trend = x.mean(1, keepdim=True).expand_as(x)
        out: Tensor = self.season(x - trend) + self.trend(trend)
        return out[:, :3]


class OverTime(nn.Module):
    """A linear system, whose state is multiplied by the same matrix again and again."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.state, self.out = nn.Linear(1, 6), nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        state = torch.zeros(len(x), 6)
        for t in range(x.shape[1]):
            state = self.state(state) + self.into(x[:, t : t + 1])
        out: Tensor = self.out(state)
        return out


class Gated(nn.Module):
    """Two layers that are multiplied with each other."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.out = nn.Linear(8, 16), nn.Linear(8, 16), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.out(self.a(x) * self.b(x))
        return out


class Attending(nn.Module):
    """Attention over eight places, between linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.inp, self.attention, self.out = (
            nn.Linear(1, 8),
            nn.MultiheadAttention(8, 2, batch_first=True),
            nn.Linear(8, 3),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x.unsqueeze(-1))
        out: Tensor = self.out(self.attention(x, x, x)[0].mean(1))
        return out


class Last(nn.Module):
    """A recurrent net over one place."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.GRU(8, 16, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.rnn(x.unsqueeze(1))[0][:, -1]
        return out


class Heads(nn.Module):
    """One head for the outputs of several layers, in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.heads = nn.ModuleList([nn.Linear(8, 3)] * 3)

    def forward(self, x: Tensor) -> Tensor:
        total = x.new_zeros(())
        for block, head in zip(self.blocks, self.heads, strict=True):
            x = x + torch.relu(block(x))
            total = total + head(x)
        return total


HEALTHY: dict[str, Callable[[], nn.Module]] = {
    "logistic": lambda: nn.Linear(8, 3),
    "low rank": LowRank,
    "one head for all": Heads,
    "side by side": SideBySide,
    "over time": OverTime,
    "blocks": lambda: Blocks([nn.Linear(8, 8) for _ in range(4)]),
    "shared by a loop": lambda: Blocks([nn.Linear(8, 8)]),
    "shared activation": lambda: nn.Sequential(
        nn.Linear(8, 16), act := nn.ReLU(), nn.Linear(16, 16), act, nn.Linear(16, 3)
    ),
    "gated": Gated,
    "attention": Attending,
    "recurrent": lambda: nn.Sequential(nn.Linear(8, 8), Last(), nn.Linear(16, 3)),
    "normed": lambda: nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 3)),
    "usual dropout": lambda: nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Dropout(0.5), nn.Linear(32, 3)),
}


@pytest.mark.parametrize("make", HEALTHY.values(), ids=HEALTHY)
def test_a_healthy_program_has_no_error_and_no_warning(make: Callable[[], nn.Module]) -> None:
    assert not [one for one in first(lambda: trained(make())) if one.severity != "info"]


class Scaled(nn.Module):
    """Has parameters of its own beside modules, one inside another, and a weight in two places."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)) for _ in range(6)])
        self.tied, self.head = nn.Linear(8, 8), nn.Linear(8, 8)
        self.head.weight = self.tied.weight
        self.shifts = nn.ParameterList([torch.zeros(8), torch.zeros(8)])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + torch.relu(block(x))
        out: Tensor = self.head(self.tied(x)) * self.scale + self.shifts[0] + self.shifts[1]
        return out[:, :3]


@pytest.mark.parametrize(
    ("left", "fix"),
    [
        (["scale"], "[model.scale]"),
        (["scale", "blocks.1.0.bias"], "[model.scale, model.blocks[1][0].bias]"),
        (["blocks.1.0", "blocks.2"], "[*model.blocks[1][0].parameters(), *model.blocks[2].parameters()]"),
        (["blocks."], "model.blocks.parameters()"),
        (["head.bias", "shifts.1"], "[model.head.bias, model.shifts[1]]"),
        (["tied"], "model.tied.parameters()"),
        (["tied.weight"], "[model.tied.weight]"),
        ([".0.bias"], "[p for p in model.parameters() if"),
    ],
)
def test_the_group_that_is_missing_can_be_added_as_it_is_written(left: list[str], fix: str) -> None:
    torch.manual_seed(0)
    with Doctor(every=20) as doctor:
        model = Scaled()
        missing = [name for name, _ in model.named_parameters() if any(part in name for part in left)]
        optimizer = torch.optim.SGD([p for name, p in model.named_parameters() if name not in missing], lr=0.05)
        for _ in range(10):
            x = torch.randn(32, 8)
            optimizer.zero_grad()
            F.cross_entropy(model(x), x[:, :3].argmax(1)).backward()
            optimizer.step()
    (found,) = [one for one in doctor.findings if one.name == "OPT_PARAM_MISSING"]
    assert found.fix.startswith(f'optimizer.add_param_group({{"params": {fix}')
    exec(found.fix, {"model": model, "optimizer": optimizer})
    held = [id(p) for group in optimizer.param_groups for p in group["params"]]
    assert sorted(held) == sorted(id(p) for p in model.parameters())
