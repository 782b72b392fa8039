"""Ratios, triplets, labels, edges and derivatives that are the wrong way round: yes, and no of those that are right."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributions import Categorical

from test_doctor_ask import answer, nothing_was_compiled

__all__ = ["nothing_was_compiled"]


def stepped(net: nn.Module, loss: Callable[[], torch.Tensor], count: int = 12) -> None:
    optimizer = torch.optim.Adam(net.parameters())
    for _ in range(count):
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()


def clipped(turned: bool, negated: bool) -> None:
    net = nn.Linear(4, 3)

    def loss() -> torch.Tensor:
        x = torch.randn(64, 4)
        with torch.no_grad():
            old = Categorical(logits=net(x))
            taken = old.sample()
            before = old.log_prob(taken)
        weight = (taken == 0).float() - 0.4
        now = Categorical(logits=net(x)).log_prob(taken)
        ratio = (before - now).exp() if turned else (now - before).exp()
        if negated:
            worse: torch.Tensor = torch.max(-weight * ratio, -weight * ratio.clamp(0.8, 1.2))
            return worse.mean()
        better: torch.Tensor = torch.min(weight * ratio, weight * ratio.clamp(0.8, 1.2))
        return -better.mean()

    stepped(net, loss)


@pytest.mark.parametrize("negated", [False, True])
@pytest.mark.parametrize("turned", [False, True])
def test_a_ratio_of_probabilities_that_is_turned_round_is_told(turned: bool, negated: bool) -> None:
    assert answer(lambda: clipped(turned, negated), "rewarded") == ("yes" if turned else "no")


def weighed(turned: bool, scaled: bool) -> None:
    net, value = nn.Linear(4, 3), nn.Linear(4, 1)

    def loss() -> torch.Tensor:
        x = torch.randn(64, 4)
        policy, v = Categorical(logits=net(x)), value(x)[:, 0]
        taken = policy.sample()
        gained = (taken == 0).float() + 0.1 * torch.randn(64)
        ahead = v.detach() - gained if turned else gained - v.detach()
        ahead = (ahead - ahead.mean()) / ahead.std() if scaled else ahead
        found: torch.Tensor = (v - gained).square().mean() - (policy.log_prob(taken) * ahead).mean()
        return found

    stepped(nn.ModuleList([net, value]), loss)


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("turned", [False, True])
def test_a_value_minus_what_it_is_to_become_is_told(turned: bool, scaled: bool) -> None:
    assert answer(lambda: weighed(turned, scaled), "rewarded") == ("yes" if turned else "no")


def triplets(turned: bool) -> None:
    net = nn.Linear(6, 4)

    def loss() -> torch.Tensor:
        anchor = torch.randn(32, 6)
        near, far = anchor + 0.3 * torch.randn(32, 6), torch.randn(32, 6)
        others = (far, near) if turned else (near, far)
        return F.triplet_margin_loss(net(anchor), *(net(one) for one in others))

    stepped(net, loss)


@pytest.mark.parametrize("turned", [False, True])
def test_triplets_whose_positives_are_far_are_told(turned: bool) -> None:
    assert answer(lambda: triplets(turned), "far positives") == ("yes" if turned else "no")


class Tokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.cell, self.head = nn.Embedding(20, 8), nn.GRU(8, 8, batch_first=True), nn.Linear(8, 20)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        scores = self.head(self.cell(self.table(x))[0])
        return F.cross_entropy(scores[:, :-1].reshape(-1, 20), y[:, 1:].reshape(-1))


@pytest.mark.parametrize(("ahead", "expected"), [(0, "no"), (1, "yes")])
def test_labels_that_a_model_shifts_again_are_told(ahead: int, expected: str) -> None:
    net = Tokens()

    def loss() -> torch.Tensor:
        tokens = torch.randint(0, 20, (8, 16))
        found: torch.Tensor = net(tokens[:, :-1], tokens[:, ahead : ahead + 15])
        return found

    assert answer(lambda: stepped(net, loss), "far ahead") == expected


def test_labels_two_ahead_beside_those_of_the_next_token_are_not_told() -> None:
    net = Tokens()

    def loss() -> torch.Tensor:
        tokens = torch.randint(0, 20, (8, 16))
        found: torch.Tensor = net(tokens[:, :-1], tokens[:, :-1]) + net(tokens[:, :-1], tokens[:, 1:])
        return found

    assert answer(lambda: stepped(net, loss), "far ahead") == "no"


def graph(kind: str) -> None:
    net = nn.Linear(6, 3)
    y = torch.randint(0, 3, (300,))
    x = (torch.randn(3, 6)[y] if kind != "plain" else 0) + torch.randn(300, 6)
    same = (y[:, None] == y).nonzero()
    pairs = same[torch.randperm(len(same))[:900]]
    edges = pairs.reshape(2, -1) if kind == "torn" else torch.randint(0, 300, (2, 900)) if kind == "any" else pairs.t()

    def loss() -> torch.Tensor:
        source, target = edges
        return F.cross_entropy(torch.zeros(300, 3).index_add(0, target, net(x)[source]), y)

    stepped(net, loss)


@pytest.mark.parametrize(("kind", "expected"), [("torn", "yes"), ("whole", "no"), ("any", "no"), ("plain", "no")])
def test_edges_that_a_reshape_tore_apart_are_told(kind: str, expected: str) -> None:
    assert answer(lambda: graph(kind), "torn edges") == expected


@pytest.mark.parametrize(("kind", "expected"), [("once", "yes"), ("twice", "no"), ("tree", "no")])
def test_edges_that_all_go_one_way_are_told(kind: str, expected: str) -> None:
    net, x, y = nn.Linear(6, 3), torch.randn(200, 6), torch.randint(0, 3, (200,))
    pairs = torch.randint(0, 200, (2, 900)).sort(0).values
    edges = pairs[:, pairs[0] < pairs[1]]
    if kind == "tree":
        edges = torch.stack([torch.arange(1, 200) // 2, torch.arange(1, 200)])
    source, target = torch.cat([edges, edges.flip(0)], 1) if kind == "twice" else edges

    def loss() -> torch.Tensor:
        return F.cross_entropy(torch.zeros(200, 3).index_add(0, target, net(x)[source]), y)

    assert answer(lambda: stepped(net, loss), "one-way edges") == expected


def lists(kind: str) -> torch.Tensor:
    order, other = torch.arange(150).repeat_interleave(4), torch.randint(0, 300, (600,))
    if kind == "chain":
        return torch.stack((torch.arange(299), torch.arange(1, 300)))
    if kind == "both ways":  # each edge and behind it the same one in the other direction
        first, second = torch.arange(150), torch.arange(150, 300)
        return torch.stack((torch.stack((first, second), 1).flatten(), torch.stack((second, first), 1).flatten()))
    pairs = torch.stack((other, order) if kind == "by second" else (order, other), 1)
    return pairs.t() if kind == "whole" else pairs.reshape(2, -1)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [("by first", "yes"), ("by second", "yes"), ("whole", "no"), ("chain", "no"), ("both ways", "no")],
)
def test_edges_that_a_reshape_tore_out_of_their_order_are_told(kind: str, expected: str) -> None:
    net, x, y, (source, target) = nn.Linear(6, 3), torch.randn(300, 6), torch.randint(0, 3, (300,)), lists(kind)

    def loss() -> torch.Tensor:
        return F.cross_entropy(torch.zeros(300, 3).index_add(0, target, net(x)[source]), y)

    assert answer(lambda: stepped(net, loss), "torn edges") == expected


def equation(activation: nn.Module, order: int, growth: float = 1.0) -> None:
    first = nn.Linear(1, 8)
    net = nn.Sequential(first, activation, nn.Linear(8, 1))

    def loss() -> torch.Tensor:
        with torch.no_grad():
            first.bias.mul_(growth)
        x = torch.rand(32, 1, requires_grad=True)
        u = net(x)
        for _ in range(order):
            (u,) = torch.autograd.grad(u, x, torch.ones_like(u), create_graph=True)
        rest: torch.Tensor = u + net(x) - torch.sin(x)
        return rest.square().mean()

    stepped(net, loss)


@pytest.mark.parametrize(
    ("activation", "order", "expected"), [(nn.ReLU(), 2, "yes"), (nn.ReLU(), 1, "no"), (nn.Tanh(), 2, "no")]
)
def test_a_second_derivative_of_straight_pieces_is_told(activation: nn.Module, order: int, expected: str) -> None:
    assert answer(lambda: equation(activation, order), "flat derivative") == expected


def test_a_second_derivative_of_units_that_are_saturated_by_now_is_not() -> None:
    assert answer(lambda: equation(nn.Tanh(), 2, growth=3.0), "flat derivative") == "no"


def test_the_rate_of_a_second_phase_is_asked_by_itself() -> None:
    def train() -> None:
        net = nn.Linear(6, 3)
        x = torch.randn(64, 6)
        y = x[:, :3].argmax(1)
        for rate in (0.1, 1e-6):
            optimizer = torch.optim.SGD(net.parameters(), lr=rate)
            for _ in range(60 if rate < 0.1 else 20):
                optimizer.zero_grad()
                F.cross_entropy(net(x if rate == 0.1 else -x), y).backward()
                optimizer.step()

    assert answer(train, "rate") == "yes"


class OfPoints(nn.Module):
    def __init__(self, pool: Callable[[torch.Tensor], torch.Tensor], channels: int = 16) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv1d(3, channels, 1), nn.BatchNorm1d(channels)
        self.head, self.pool = nn.Linear(16, 3), pool

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.head(self.pool(F.relu(self.norm(self.conv(x)), inplace=True)))
        return scores


@pytest.mark.parametrize(
    ("pool", "channels", "expected"),
    [
        (lambda x: x.max(1)[0], 16, "yes"),
        (lambda x: x.mean(dim=1).flatten(1), 16, "yes"),  # which gives the same tensor
        (lambda x: x.amax(2), 16, "no"),
        (lambda x: (x * x.mean(1, keepdim=True).sigmoid()).mean(2), 16, "no"),  # attention to places
        (lambda x: x.mean(2) + x.mean(1), 16, "no"),  # the channels come in beside it
        (lambda x: x.mean(1), 1, "no"),
    ],
)
def test_channels_that_are_pooled_in_place_of_points_are_told(
    pool: Callable[[torch.Tensor], torch.Tensor], channels: int, expected: str
) -> None:
    net = OfPoints(pool, channels)
    optimizer = torch.optim.Adam(net.parameters())

    def train() -> None:
        for _ in range(4):
            optimizer.zero_grad()
            F.cross_entropy(net(torch.randn(12, 3, 16)), torch.randint(0, 3, (12,))).backward()
            optimizer.step()

    assert answer(train, "pooled channels") == expected
