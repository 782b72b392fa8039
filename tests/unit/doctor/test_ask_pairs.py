"""What belongs together and is kept apart, or the other way round: two nets, couplings, rounded scores."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from test_doctor_ask import answer, asked, nothing_was_compiled

__all__ = ["nothing_was_compiled"]

Tensor = torch.Tensor
Compared = Callable[[nn.Module, nn.Module, Tensor], Tensor]


def train(net: nn.Module, loss: Callable[[], Tensor], count: int = 4) -> None:
    optimizer = torch.optim.Adam(net.parameters(), 0.01)
    for _ in range(count):
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()


class Pair(nn.Module):
    """Two nets, and what is compared of them."""

    def __init__(self, compared: Compared) -> None:
        super().__init__()
        self.teacher, self.student, self.compared = nn.Linear(6, 3), nn.Linear(6, 3), compared

    def forward(self, x: Tensor) -> Tensor:
        """Gives the loss."""
        return self.compared(self.teacher, self.student, x)


def kl(teacher: nn.Module, student: nn.Module, x: Tensor) -> Tensor:
    return F.kl_div(student(x).log_softmax(1), teacher(x).softmax(1), reduction="batchmean")


def cut(teacher: nn.Module, student: nn.Module, x: Tensor) -> Tensor:
    return F.kl_div(student(x).log_softmax(1), teacher(x).detach().softmax(1), reduction="batchmean")


def labelled(net: nn.Module, x: Tensor) -> Tensor:
    return F.cross_entropy(net(x), x[:, :3].argmax(1))


@pytest.mark.parametrize(("compared", "expected"), [
    (kl, "yes"),
    (lambda t, s, x: F.mse_loss(s(x), t(x)), "yes"),
    (lambda t, s, x: 4 * F.cross_entropy(s(x), t(x).softmax(1)), "yes"),
    (cut, "no"),
    (lambda t, s, x: kl(t, s, x) + labelled(t, x) + labelled(s, x), "unknown"),
    (lambda t, s, x: kl(t, s, x) + labelled(s, x), "unknown"),
    (lambda t, s, x: kl(t, s, x) - (s(x) + t(x)).log_softmax(1)[:, 0].mean(), "no"),
    (lambda t, s, x: F.mse_loss(s(x), t(x) + x[:, :3].detach().roll(1, 0)), "no"),
    (lambda t, s, x: F.mse_loss(s(x), s(x + 0.1)), "no"),
    (lambda t, s, x: F.mse_loss(s(x), t(x)) + F.mse_loss(t(x).std(0), torch.ones(3)), "no"),
], ids=["kl", "squares", "classes", "detached", "mutual", "with labels", "by hand", "a rest", "one net",
        "spread"])  # fmt: skip
def test_two_nets_that_only_have_to_agree_are_told(compared: Compared, expected: str) -> None:
    net = Pair(compared)
    assert answer(lambda: train(net, lambda: net(torch.randn(16, 6))), "only agreeing") == expected


def test_a_teacher_that_no_optimizer_has_may_have_a_graph() -> None:
    net = Pair(kl)

    def run() -> None:
        optimizer = torch.optim.Adam(net.student.parameters())
        for _ in range(4):
            optimizer.zero_grad()
            net(torch.randn(16, 6)).backward()
            optimizer.step()

    assert answer(run, "only agreeing") == "no"


def test_nets_that_also_take_steps_of_labels_may_agree() -> None:
    net = Pair(kl)

    def run() -> None:
        optimizer = torch.optim.Adam(net.parameters())
        for step in range(8):
            x = torch.randn(16, 6)
            optimizer.zero_grad()
            (net(x) if step % 2 else labelled(net.student, x) + labelled(net.teacher, x)).backward()
            optimizer.step()

    assert answer(run, "only agreeing") == "unknown"


class Coupling(nn.Module):
    """An affine coupling."""

    mask: Tensor

    def __init__(self, mask: Tensor) -> None:
        super().__init__()
        self.register_buffer("mask", mask)
        self.net = nn.Linear(4, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Gives what it makes, and the logarithm of the determinant."""
        kept = x * self.mask
        s, t = self.net(kept).chunk(2, dim=1)
        s = s.tanh() * (1 - self.mask)
        return kept + (1 - self.mask) * (x * s.exp() + t), s.sum(1)


class Flow(nn.Module):
    """Some couplings."""

    def __init__(self, masks: list[Tensor], between: Callable[[Tensor], Tensor], scale: float = 1.0) -> None:
        super().__init__()
        self.layers, self.between, self.scale = nn.ModuleList(map(Coupling, masks)), between, scale

    def forward(self, x: Tensor) -> Tensor:
        """Gives the logarithm of the density."""
        total, x = torch.zeros(len(x)), x * self.scale
        for layer in self.layers:
            x, added = layer(self.between(x))
            total = total + added
        return torch.distributions.Normal(0.0, 1.0).log_prob(x).sum(1) + total  # type: ignore[no-any-return]


EVEN = torch.tensor([1.0, 0.0, 1.0, 0.0])


@pytest.mark.parametrize(("masks", "between", "expected"), [
    ([EVEN] * 4, lambda x: x, "yes"),
    ([EVEN.sort().values] * 2, lambda x: x, "yes"),
    ([EVEN, 1 - EVEN] * 2, lambda x: x, "no"),
    ([EVEN] * 4, lambda x: x.flip(1), "no"),
    ([EVEN, EVEN, 1 - EVEN], lambda x: x, "no"),
    ([EVEN], lambda x: x, "no"),
], ids=["one mask", "halves", "alternate", "turned", "the last one", "one layer"])  # fmt: skip
@pytest.mark.parametrize("scale", [1.0, 0.5])
def test_entries_that_pass_all_couplings_are_told(
    masks: list[Tensor], between: Callable[[Tensor], Tensor], expected: str, scale: float
) -> None:
    flow = Flow(masks, between, scale)
    assert answer(lambda: train(flow, lambda: -flow(torch.randn(16, 4)).mean()), "passed") == expected


def test_what_a_net_hands_through_beside_its_prediction_is_no_flow() -> None:
    net = nn.ModuleList([nn.Linear(4, 2), nn.Linear(4, 2)])

    def loss() -> Tensor:
        x = torch.randn(16, 4)
        made = x
        for layer in net:
            made = torch.cat([made[:, :2], layer(made)], 1)
        return F.mse_loss(made[:, 2:], x[:, 2:].flip(1))

    assert answer(lambda: train(net, loss), "passed") == "unknown"


def test_a_penalty_of_weights_is_no_density() -> None:
    net = nn.Linear(16, 16)
    assert answer(lambda: train(net, lambda: net(torch.randn(16, 16)).mean() + net.weight.pow(2).sum()), "passed") in (
        "no", "unknown")  # fmt: skip


@pytest.mark.parametrize(("turn", "expected"), [
    (torch.round, "yes"), (lambda made: made.sigmoid().round(), "no"), (lambda made: (made > 0).float(), "no"),
])  # fmt: skip
def test_rounded_scores_that_are_compared_with_labels_are_told(turn: Any, expected: str) -> None:
    net = nn.Linear(6, 1)
    nn.init.constant_(net.weight, 5.0)

    def train() -> None:
        optimizer = torch.optim.Adam(net.parameters())
        for _ in range(12):
            x = torch.randn(32, 6)
            y, made = (x.sum(1, keepdim=True) > 0).float(), net(x)
            (turn(made) == y).sum().float()
            optimizer.zero_grad()
            F.binary_cross_entropy_with_logits(made, y).backward()
            optimizer.step()

    assert answer(train, "compared scores") == expected


@pytest.mark.parametrize(("turn", "expected"), [
    (lambda t: t // 100, "yes"), (lambda t: t[:, 0] // 100, "yes"),
    (lambda t: (t / 100).long(), "yes"), (lambda t: t / 100, "no"),
    (lambda t: t // 10, "no"), (lambda t: torch.zeros(32, 1).long() // 7, "no"),
    (lambda t: (1 + torch.rand(32, 1)).floor(), "no"),
])  # fmt: skip
def test_numbers_of_rows_that_become_one_whole_number_are_told(turn: Any, expected: str) -> None:
    class Timed(nn.Linear):
        def forward(self, x: Tensor, t: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward(torch.cat([x, turn(t).float().reshape(32, 1)], 1))

    net = Timed(7, 1)

    def loss() -> Tensor:
        x, t = torch.randn(32, 6), torch.randint(0, 100, (32, 1))
        return F.mse_loss(net(x, t), x.sum(1, keepdim=True))

    assert answer(lambda: train(net, loss), "rounded alike") == expected


@pytest.mark.parametrize(("side", "collapsed"), [("max", True), ("min", False)])
def test_rows_become_alike_where_a_margin_drives_no_pair_apart(side: str, collapsed: bool) -> None:
    def paired() -> None:
        net = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 4))
        optimizer = torch.optim.Adam(net.parameters(), 0.02)
        for _ in range(60):
            same, one = torch.arange(32) % 2, torch.randn(32, 6)
            other = torch.where(same[:, None] > 0, one, torch.randn(32, 6)) + 0.3 * torch.randn(32, 6)
            away = F.pairwise_distance(net(one), net(other))
            left = 2 - away
            apart = (left.clamp_max(0.0) if side == "max" else left.clamp_min(0.0)).pow(2)
            optimizer.zero_grad()
            (same * away.pow(2) + (1 - same) * apart).mean().backward()
            optimizer.step()

    found = asked(paired, "related inputs")
    assert any(one.answer == "no" and one.evidence.get("collapsed") for one in found) == collapsed
