"""Terms that outweigh others, losses that do not see errors, and states that are their own next ones: yes and no."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from anybatch.doctor.ask import fitting
from test_doctor_ask import answer, asked, nothing_was_compiled

__all__ = ["nothing_was_compiled"]


def trained(net: nn.Module, batch: Callable[[], tuple[torch.Tensor, ...]], loss: Callable[..., torch.Tensor]) -> None:
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
    for _ in range(40):
        x, *rest = batch()
        optimizer.zero_grad()
        loss(net(x), *rest).backward()
        optimizer.step()


class Latent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = nn.Linear(24, 4), nn.Linear(2, 24)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        mean, log_var = self.encode(x).chunk(2, 1)
        return self.decode(mean + torch.randn_like(mean) * (log_var / 2).exp()), mean, log_var


def of_images() -> tuple[torch.Tensor, torch.Tensor]:
    x = 2 * torch.randn(32, 2) @ torch.linspace(-1, 1, 48).reshape(2, 24).sin() + 0.3
    return x, x


def noise() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(32, 24), torch.randn(32, 24)


def divergence(mean: torch.Tensor, log_var: torch.Tensor) -> torch.Tensor:
    return -0.5 * (1 + log_var - mean.square() - log_var.exp()).sum(1).mean()


def weighed(weight: float) -> Callable[..., torch.Tensor]:
    return lambda made, x: F.mse_loss(made[0], x) + weight * divergence(*made[1:])


@pytest.mark.parametrize(
    ("loss", "batch", "expected"),
    [
        (weighed(100.0), of_images, "yes"),
        (weighed(1e-4), of_images, "no"),
        (lambda made, x: F.mse_loss(made[0], x, reduction="sum") + 0.01 * divergence(*made[1:]), of_images, "no"),
        (lambda made, x: F.mse_loss(made[0], x) + 1e-4 * made[1].square().mean(), of_images, "no"),
        (weighed(1e-4), noise, "no"),  # of which one batch is learned by heart with the whole loss, too
        (lambda made, x: F.mse_loss(made[0], x), of_images, "no"),
    ],
)
def test_a_term_that_outweighs_another_is_told(loss: Callable[..., torch.Tensor], batch: Any, expected: str) -> None:
    assert answer(lambda: trained(Latent(), batch, loss), "outweighed") == expected


def test_a_penalty_on_the_weights_that_outweighs_the_loss_is_told_as_one() -> None:
    net = Latent()

    def penalised(made: Any, x: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(made[0], x) + 10.0 * sum((one.square().sum() for one in net.parameters()), torch.zeros(()))

    (found,) = [one for one in asked(lambda: trained(net, of_images, penalised), "outweighed") if one.answer == "yes"]
    assert found.evidence["penalty"]
    assert not asked(lambda: trained(Latent(), of_images, weighed(100.0)), "outweighed")[0].evidence["penalty"]


@pytest.mark.parametrize(("times", "expected"), [(0.5, "yes"), (1.5, "no")])
def test_a_term_that_is_no_less_by_itself_was_not_outweighed(
    times: float, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def learned(step: Any, part: Any, *_: Any) -> float | None:
        return None if part.slot == step.loss.slot else times * float(step.values[part.slot].detach().sum())

    monkeypatch.setattr(fitting, "_learned", learned)
    assert answer(lambda: trained(Latent(), of_images, weighed(100.0)), "outweighed") == expected


def test_rows_are_not_told_apart_by_the_noise_that_was_drawn_for_them() -> None:
    net = Latent()
    net.decode = nn.Sequential(nn.Linear(2, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 24))  # type: ignore[assignment]
    assert answer(lambda: trained(net, of_images, weighed(10.0)), "outweighed") == "yes"


def test_terms_that_are_added_in_place_are_terms_too() -> None:
    """What is written to is made of itself, which must not be followed for ever."""

    def in_place(made: Any, x: torch.Tensor) -> torch.Tensor:
        loss = F.mse_loss(made[0], x)
        loss += 1e-4 * divergence(*made[1:])
        return loss

    assert answer(lambda: trained(Latent(), of_images, in_place), "outweighed") == "no"


def boxes() -> tuple[torch.Tensor, torch.Tensor]:
    size = 0.1 + 0.3 * torch.rand(32, 2)
    box = torch.cat([size / 2 + (1 - size) * torch.rand(32, 2), size], 1)
    return box @ torch.randn(4, 24, generator=torch.Generator().manual_seed(1)), box


def corners(box: torch.Tensor) -> torch.Tensor:
    return torch.cat([box[:, :2] - box[:, 2:] / 2, box[:, :2] + box[:, 2:] / 2], 1)


def area(box: torch.Tensor) -> torch.Tensor:
    return (box[:, 2:] - box[:, :2]).clamp(min=0).prod(1)


def iou_loss(one: torch.Tensor, two: torch.Tensor) -> torch.Tensor:
    both = area(torch.cat([torch.maximum(one[:, :2], two[:, :2]), torch.minimum(one[:, 2:], two[:, 2:])], 1))
    around = area(torch.cat([torch.minimum(one[:, :2], two[:, :2]), torch.maximum(one[:, 2:], two[:, 2:])], 1))
    union = area(one) + area(two) - both
    return (1 - both / (union + 1e-6) + (around - union) / (around + 1e-6)).mean()


def epsilon(made: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    return ((made - wanted).abs() - 0.05).clamp(min=0).mean()


@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        (iou_loss, "yes"),
        (lambda made, wanted: iou_loss(corners(made), corners(wanted)), "no"),
        (lambda made, wanted: F.l1_loss(made, wanted) + iou_loss(corners(made), corners(wanted)), "no"),
        (F.smooth_l1_loss, "no"),
        (epsilon, "no"),  # nothing to gain where it is right, but with the targets of other rows
        (lambda made, wanted: (F.mse_loss(made, wanted, reduction="none").mean(1) * (wanted[:, 0] > 0.3)).mean(), "no"),
    ],
)
def test_a_loss_that_does_not_see_what_is_nearly_right_is_told(
    loss: Callable[..., torch.Tensor], expected: str
) -> None:
    assert (
        answer(lambda: trained(nn.Sequential(nn.Linear(24, 4), nn.Sigmoid()), boxes, loss), "unseen errors") == expected
    )


def values(kind: str) -> None:
    """Some steps of Q-learning, or of what only looks like it."""
    net, copy = nn.Linear(3, 4), nn.Linear(3, 4)
    copy.load_state_dict(net.state_dict())
    optimizer = torch.optim.Adam(net.parameters())
    for _ in range(12):
        states, actions = torch.randn(16, 3), torch.randint(0, 4, (16, 1))
        after = states.clone() if kind == "one array" else states + torch.randn(16, 3)
        with torch.no_grad():
            net(torch.randn(1, 3))  # acts
            target = torch.rand(16) + 0.9 * copy(after if kind in ("one array", "steps") else states).max(1).values
            if kind == "munchausen":
                target += copy(after).max(1).values
        made = net(states) if kind not in ("policy", "preferences") else torch.zeros(16, 4)
        made = made.max(1).values if kind == "teacher" else made.gather(1, actions)[:, 0]
        optimizer.zero_grad()
        loss = F.smooth_l1_loss(made, target)
        if kind in ("policy", "preferences"):  # a copy is given the same for good
            with torch.no_grad():
                old = copy(states).log_softmax(1).gather(1, actions)
            scores = net(states)
            new = scores.log_softmax(1).gather(1, actions)
            if kind == "preferences":
                new = scores.gather(1, actions) - scores.logsumexp(1, keepdim=True)
            loss = -(new - old).exp().mean() if kind == "policy" else -F.logsigmoid(new - old).mean()
        loss.backward()
        optimizer.step()
        copy.load_state_dict(
            {name: 0.9 * one + 0.1 * net.state_dict()[name] for name, one in copy.state_dict().items()}
        )


@pytest.mark.parametrize(
    ("kind", "expected"),
    [("one array", "yes"), ("steps", "no"), ("munchausen", "no"), ("teacher", ""), ("policy", ""), ("preferences", "")],
)
def test_states_that_are_their_own_next_ones_are_told(kind: str, expected: str) -> None:
    assert answer(lambda: values(kind), "unmoved") == expected


class Heads(nn.Module):
    """The mean and the deviation of a code by a layer each, and a second task."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.mean, self.log_var = nn.Linear(24, 8), nn.Linear(8, 2), nn.Linear(8, 2)
        self.decode, self.other = nn.Linear(2, 24), nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        hidden = self.encode(x).relu()
        return hidden, self.mean(hidden), self.log_var(hidden), self.other(hidden)


def coded(kind: str) -> None:
    net, critic = Heads(), nn.Linear(24, 1)

    def loss(given: tuple[torch.Tensor, ...], x: torch.Tensor) -> torch.Tensor:
        _, mean, log_var, other = given
        drawn = torch.randn_like(mean) * (log_var / 2).exp() if kind == "drawn" else 0.0
        made = net.decode(mean + drawn)
        total = F.mse_loss(made, x) + (divergence(mean, log_var).mean() if kind in ("drawn", "point") else 0.0)
        if kind == "same targets":  # of a rare class, which this batch does not have
            total = total + F.binary_cross_entropy_with_logits(other, torch.zeros(len(x), 2))
        if kind == "sparse":
            total = total + 0.1 * mean.abs().mean()
        if kind == "critic":
            total = total + F.softplus(-critic(made)).mean()
        if kind == "forgotten":
            total = total + other.square().mean()
        return total

    trained(net, of_images, loss)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("point", "yes"),
        ("forgotten", "yes"),
        ("drawn", "no"),
        ("same targets", "no"),
        ("sparse", "no"),
        ("critic", "no"),
    ],
)
def test_what_only_a_penalty_sees_is_told(kind: str, expected: str) -> None:
    assert answer(lambda: coded(kind), "only penalised") == expected


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.inner, self.last = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, z: torch.Tensor) -> torch.Tensor:
        hidden = self.first(z)
        found: torch.Tensor = self.last(hidden + self.inner(hidden).relu())
        return found


def test_a_generator_with_a_shortcut_is_not_asked() -> None:
    """What it makes is of no row of anything, and rows that are mixed within it are others."""
    critic = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))

    def loss(made: torch.Tensor) -> torch.Tensor:
        return F.softplus(-critic(made)).mean()

    assert answer(lambda: trained(Residual(), lambda: (torch.randn(32, 4),), loss), "only penalised") == "unknown"


class Apart(nn.Module):
    """A policy that hardly learns of its targets, and a net of its own that makes large values."""

    def __init__(self) -> None:
        super().__init__()
        self.policy, self.value = nn.Linear(24, 3), nn.Linear(24, 1)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.policy(x), self.value(x)


def test_a_term_is_not_outweighed_by_one_that_trains_another_net(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fitting, "_is_nothing", lambda *_: True)
    monkeypatch.setattr(fitting, "_learned", lambda step, part, *_: None if part.slot == step.loss.slot else -1.0)

    def batch() -> tuple[torch.Tensor, torch.Tensor]:
        return torch.randn(32, 24), torch.randn(32, 3)

    def loss(made: Any, y: torch.Tensor) -> torch.Tensor:
        far: torch.Tensor = (made[1] - y[:, :1]).square().mean()
        return F.mse_loss(made[0], y) + 1000.0 * far

    assert answer(lambda: trained(Apart(), batch, loss), "outweighed") == "no"


@pytest.mark.parametrize(("is_reward", "expected"), [(False, "yes"), (True, "unknown")])
def test_a_term_beside_one_that_is_weighed_with_rewards_is_not_said_to_be_outweighed(
    is_reward: bool, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fitting, "_is_nothing", lambda *_: True)
    monkeypatch.setattr(fitting, "_learned", lambda step, part, *_: None if part.slot == step.loss.slot else -1.0)

    def of_rewards(made: Any, x: torch.Tensor) -> torch.Tensor:
        advantage = -x[:, 0]
        weighed: torch.Tensor = made[1].log_softmax(1)[:, 0] * advantage
        return F.mse_loss(made[0], x) + weighed.mean()

    def of_others(made: Any, x: torch.Tensor) -> torch.Tensor:
        other = -x[:, 0]
        weighed: torch.Tensor = made[1].log_softmax(1)[:, 0] * other
        return F.mse_loss(made[0], x) + weighed.mean()

    loss = of_rewards if is_reward else of_others
    assert answer(lambda: trained(Latent(), of_images, loss), "outweighed") == expected


def test_zeros_of_a_mask_that_take_the_gradient_away_are_no_errors() -> None:
    """Values of the next states count where an episode goes on, by a net that is not detached."""

    def learns() -> None:
        net = nn.Linear(6, 1)
        optimizer = torch.optim.Adam(net.parameters())
        for _ in range(4):
            state, after, ends = torch.randn(32, 6), torch.randn(32, 6), (torch.arange(32)[:, None] % 16 == 0).float()
            optimizer.zero_grad()
            F.smooth_l1_loss(net(state), torch.rand(32, 1) + 0.9 * net(after) * ends).backward()
            optimizer.step()

    assert answer(learns, "unseen errors") == "no"
