"""Where gradients end, pairs belong to other rows or an optimizer has another net: told, and not of healthy ones."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from anybatch.doctor.ask.asking import run_probes
from anybatch.doctor.diagnosing import diagnose
from anybatch.doctor.recorder import Doctor
from anybatch.records.findings import Finding
from test_doctor_ask import ROWS, answer, nothing_was_compiled

__all__ = ["nothing_was_compiled"]


def told(doctor: Doctor) -> list[Finding]:
    """What is said of a training that has ended, with what was asked after it."""
    for one in run_probes(doctor):
        doctor.emit(one)
    return list(diagnose(doctor.run))


class Pooled(nn.Module):
    """Parts of a row, weighed by a softmax along an axis."""

    def __init__(self, axis: int) -> None:
        super().__init__()
        self.embed, self.score, self.head, self.axis = nn.Linear(3, 8), nn.Linear(8, 1), nn.Linear(8, 2), axis

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = torch.tanh(self.embed(x))
        made: torch.Tensor = self.head((F.softmax(self.score(parts), dim=self.axis) * parts).sum(1))
        return made


def findings(net: nn.Module, *, count: int = 24) -> list[Finding]:
    torch.manual_seed(0)
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    with Doctor(every=3) as doctor:
        for _ in range(count):
            x = torch.randn(16, 5, 3)
            optimizer.zero_grad()
            F.cross_entropy(net(x), (x[:, 0, 0] > 0).long()).backward()
            optimizer.step()
    return told(doctor)


def test_graph_cut_fires_at_a_softmax_along_an_axis_with_one_entry() -> None:
    first = findings(Pooled(-1))[0]
    assert (first.name, "softmax" in first.message) == ("GRAPH_CUT", True)
    assert first.place.parameters == ("score.weight", "score.bias")


def test_graph_cut_is_quiet_on_a_softmax_over_the_parts() -> None:
    assert "GRAPH_CUT" not in {one.name for one in findings(Pooled(1))}


class Beside(nn.Module):
    """Attention over a sequence of one part, beside the part itself."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.head = nn.Linear(6, 8), nn.Linear(6, 8), nn.Linear(6, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x[:, None]
        weights = F.softmax(self.query(x) @ self.key(x).mT, dim=-1)
        return self.head(x + weights @ x)[:, 0]  # type: ignore[no-any-return]


class Guarded(nn.Module):
    """A mean and a variance, and a number that counts once it is large."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.spread, self.g = nn.Linear(6, 1), nn.Linear(6, 2), nn.Parameter(torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)  # type: ignore[no-any-return]


def regression(net: nn.Module, more: Callable[[torch.Tensor], Any]) -> list[Finding]:
    torch.manual_seed(0)
    optimizer = torch.optim.Adam(net.parameters(), lr=2e-2)
    with Doctor(every=3) as doctor:
        for _ in range(200):
            x = torch.randn(32, 6)
            optimizer.zero_grad()
            (F.mse_loss(net(x), x.sum(1, keepdim=True)) + more(x)).backward()
            optimizer.step()
    return told(doctor)


def test_graph_cut_is_a_note_where_a_softmax_of_one_entry_stands_beside_what_learns() -> None:
    assert {one.severity for one in regression(Beside(), lambda _: 0.0) if one.name == "GRAPH_CUT"} <= {"info"}


def test_graph_cut_is_quiet_on_terms_that_are_within_their_bounds() -> None:
    net = Guarded()

    def bounded(x: torch.Tensor) -> torch.Tensor:
        return F.relu(net.g - 0.5) + torch.clamp(net.spread(x).square().mean() * 1e-3, min=0.5)

    assert "GRAPH_CUT" not in {one.name for one in regression(net, bounded)}


class Halved(nn.Module):
    """A coupling layer, and the logarithm of how it stretches volumes, times a sign."""

    def __init__(self, sign: int) -> None:
        super().__init__()
        self.net, self.sign = nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 6)), sign

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scale, shift = self.net(x[:, :3]).chunk(2, 1)
        return torch.cat([x[:, :3], x[:, 3:] * scale.exp() + shift], 1), self.sign * scale.sum(1)


def density(sign: int, *, normal: bool = False, apart: bool = False, stretch_by: float = 0.0) -> None:
    net = Halved(sign)
    if stretch_by:
        nn.init.constant_(net.get_parameter("net.2.bias"), stretch_by)
        nn.init.normal_(net.get_parameter("net.2.weight"), std=1e-3)
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-4 if stretch_by else 1e-2)
    for _ in range(8):
        x = torch.randn(ROWS, 6) * 2
        if apart:  # the halves are taken before anything that is seen
            kept, moved = x[:, :3], x[:, 3:]
            scale, shift = net.net(kept).chunk(2, 1)
            z, stretch = torch.cat([kept, moved * scale.exp() + shift], 1), sign * scale.sum(1)
        else:
            z, stretch = net(x)
        own = torch.distributions.Normal(0.0, 1.0).log_prob(z).sum(1) if normal else -z.pow(2).sum(1) / 2
        loss = -(own + stretch).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@pytest.mark.parametrize("normal", [False, True])
def test_a_determinant_with_the_other_sign_is_told_and_one_with_its_own_is_not(normal: bool) -> None:
    assert answer(lambda: density(-1, normal=normal), "turned volume") == "yes"
    assert answer(lambda: density(1, normal=normal), "turned volume") == "no"


def test_a_volume_of_half_the_constant_of_a_normal_density_is_no_sign() -> None:
    """Less its squares, such a loss is that volume as well as minus it and the constant."""
    assert answer(lambda: density(1, normal=True, stretch_by=math.log(math.tau) / 2), "turned volume") == "no"


def test_a_determinant_is_known_where_the_program_takes_the_entries_apart() -> None:
    assert answer(lambda: density(-1, apart=True), "turned volume") == "yes"
    assert answer(lambda: density(1, apart=True), "turned volume") == "no"
    assert answer(lambda: density(1, apart=True), "false volume") == "no"


def flow(kind: str) -> None:
    """Couplings, each of which moves the other half by the one that it keeps."""
    layers = [Halved(1) for _ in range(2)]
    if kind == "a first layer that is not seen":  # in evaluation mode a call begins no step
        layers.insert(0, Halved(1).eval())
    optimizer = torch.optim.Adam(nn.ModuleList(layers).parameters(), lr=1e-2)
    for _ in range(8):
        x = torch.randn(ROWS, 6) * 2
        claimed, means = torch.zeros(ROWS), torch.zeros(())
        for one in layers:
            x, stretch = one(x.flip(1))
            claimed = stretch if kind == "the last layer only" else claimed + stretch
            means = means + stretch.mean()
        if kind == "a scale of what it scales":
            scale = torch.tanh(3 * layers[0].net(x[:, :3]))
            x, claimed = x * scale.exp(), claimed + scale.sum(1)
        if kind == "in other units":
            claimed = claimed - 3.0
        mixed = x + 0.01 * x.mean(0) if kind == "rows that are mixed" else x
        loss = (0.5 * mixed.pow(2).sum(1) - claimed).mean()
        if kind == "a sum of means":
            loss = (0.5 * x.pow(2).sum(1)).mean() - means
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@pytest.mark.parametrize("kind", ["the last layer only", "a scale of what it scales"])
def test_a_volume_that_is_not_that_of_the_map_is_told(kind: str) -> None:
    assert answer(lambda: flow(kind), "false volume") == "yes"


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("all layers", "no"),
        ("a sum of means", "no"),
        ("in other units", "no"),
        ("rows that are mixed", "unknown"),
        ("a first layer that is not seen", "unknown"),
    ],
)
def test_a_volume_that_is_that_of_the_map_is_not_told(kind: str, expected: str) -> None:
    assert answer(lambda: flow(kind), "false volume") == expected


def critics(sign: int, times: int) -> None:
    maker, critic = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 6)), nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 1))
    makes, judges = (torch.optim.Adam(one.parameters()) for one in (maker, critic))
    for _ in range(4):
        for _ in range(times):
            fake = maker(torch.randn(ROWS, 4)).detach()
            judges.zero_grad()
            (critic(fake).mean() - critic(torch.randn(ROWS, 6) + 2).mean()).backward()
            judges.step()
        makes.zero_grad()
        (sign * critic(maker(torch.randn(ROWS, 4))).mean()).backward()
        makes.step()


@pytest.mark.parametrize("times", [1, 4])
def test_a_generator_that_steps_seldom_is_asked_too(times: int) -> None:
    assert answer(lambda: critics(1, times), "helped") == "yes"
    assert answer(lambda: critics(-1, times), "helped") == "no"


def table(scale: float) -> None:
    net = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = torch.optim.Adam(net.parameters(), lr=3e-3)
    for _ in range(4):
        x = torch.randn(32, 4)
        optimizer.zero_grad()
        F.mse_loss(net(x * scale + scale), x.sum(1, keepdim=True)).backward()
        optimizer.step()


def test_large_columns_that_are_learned_better_when_standardised_are_told_and_small_ones_are_not() -> None:
    assert answer(lambda: table(1000.0), "scaled") == "yes"
    assert answer(lambda: table(1.0), "scaled") == "no"


def pairs(*, torn: bool, constant: bool = False) -> list[Finding]:
    torch.manual_seed(0)
    one, other = nn.Linear(6, 8), nn.Linear(6, 8)
    optimizer = torch.optim.Adam([*one.parameters(), *other.parameters()], lr=2e-2)
    with Doctor() as doctor:
        for _ in range(400):
            x = torch.randn(16, 6)
            y = torch.randn(16, 6) if torn else x + 0.1 * torch.randn(16, 6)
            a, b = (F.normalize(net(given), dim=1) for net, given in ((one, x), (other, y)))
            labels = torch.zeros(16, dtype=torch.long) if constant else torch.arange(16)
            loss = F.cross_entropy(a @ b.T / 0.1, labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return told(doctor)


def test_not_learning_fires_where_pairs_are_torn_apart_and_is_quiet_where_they_belong_together() -> None:
    assert "NOT_LEARNING" in {one.name for one in pairs(torn=True)}
    assert not {one.name for one in pairs(torn=False)} & {"NOT_LEARNING", "TARGETS_CONSTANT"}


def test_targets_constant_fires_on_pairs_whose_own_place_is_the_first_for_all() -> None:
    assert pairs(torn=False, constant=True)[0].name == "TARGETS_CONSTANT"


def two(own: Callable[[nn.Module, nn.Module], nn.Module]) -> list[Finding]:
    torch.manual_seed(0)
    maker, critic = nn.Linear(4, 6), nn.Linear(6, 1)
    makes, judges = torch.optim.Adam(own(maker, critic).parameters()), torch.optim.Adam(critic.parameters())
    with Doctor() as doctor:
        for _ in range(12):
            critic.zero_grad()
            fake = maker(torch.randn(16, 4))
            (critic(fake.detach()) - critic(torch.randn(16, 6))).mean().backward()
            judges.step()
            maker.zero_grad()
            (-critic(fake).mean()).backward()
            makes.step()
    return told(doctor)


def test_an_optimizer_of_another_net_is_told_by_the_net_that_has_none() -> None:
    names = [one.name for one in two(lambda maker, critic: critic)]
    assert names[0] == "OPT_PARAM_MISSING"
    assert "ZERO_GRAD_MISSING" not in names
    assert "OPT_PARAM_MISSING" not in {one.name for one in two(lambda maker, critic: maker)}


def hinges(sign: int) -> None:
    normed = nn.utils.parametrizations.spectral_norm
    maker, critic = nn.Linear(4, 6), nn.Sequential(normed(nn.Linear(6, 8)), nn.LeakyReLU(), normed(nn.Linear(8, 1)))
    makes, judges = (torch.optim.Adam(one.parameters()) for one in (maker, critic))
    for _ in range(4):
        with torch.no_grad():
            fake = maker(torch.randn(ROWS, 4))
        judges.zero_grad()
        (F.relu(1 - critic(torch.randn(ROWS, 6) + 4)).mean() + F.relu(1 + critic(fake)).mean()).backward()
        judges.step()
        makes.zero_grad()
        (sign * critic(maker(torch.randn(ROWS, 4))).mean()).backward()
        makes.step()


def test_a_generator_is_compared_with_a_critic_whose_weights_are_normed_at_each_call() -> None:
    assert answer(lambda: hinges(1), "helped") == "yes"
    assert answer(lambda: hinges(-1), "helped") == "no"
