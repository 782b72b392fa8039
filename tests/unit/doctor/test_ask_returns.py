"""Returns that are summed up from the first reward on are told, and those of what is to come are not."""

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.distributions import Categorical

from test_doctor_ask import answer, nothing_was_compiled

__all__ = ["nothing_was_compiled"]


def summed(rewards: list[float], gamma: float) -> list[float]:
    total, found = 0.0, list[float]()
    for one in rewards:
        total = one + gamma * total
        found.append(total)
    return found


def past(rewards: list[float]) -> torch.Tensor:
    return torch.tensor(summed(rewards, 0.97))


def to_come(rewards: list[float]) -> torch.Tensor:
    return past(rewards[::-1]).flip(0)


def scaled(returns: torch.Tensor) -> torch.Tensor:
    return (returns - returns.mean()) / (returns.std() + 1e-8)


def played(weights: Callable[[list[float]], torch.Tensor], reward: float = 1.0) -> None:
    net = nn.Linear(4, 2)
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
    for episode in range(30):
        policy = Categorical(logits=net(torch.randn(10 + episode % 7, 4)))
        scores = policy.log_prob(policy.sample())
        optimizer.zero_grad()
        (-scores * weights([reward] * len(scores))).sum().backward()
        optimizer.step()


@pytest.mark.parametrize(
    "weights",
    [
        past,
        lambda rewards: scaled(past(rewards)),
        lambda rewards: torch.tensor(summed(rewards, 1.0)),
        lambda rewards: torch.cat([past(rewards[:6]), past(rewards[6:])]),
    ],
)
def test_returns_of_the_past_are_told(weights: Callable[[list[float]], torch.Tensor]) -> None:
    assert answer(lambda: played(weights), "past sums") == "yes"


@pytest.mark.parametrize(
    ("weights", "reward"),
    [
        (to_come, 1.0),
        (lambda rewards: scaled(to_come(rewards)), -1.0),
        (lambda rewards: torch.tensor(summed(rewards, 1.0)).flip(0), -1.0),
        (lambda rewards: 0.97 ** torch.arange(len(rewards)), 1.0),
        (lambda rewards: past([*rewards[::3], 0.5, *rewards]).flip(0)[: len(rewards)], 1.0),
    ],
)
def test_sums_of_what_is_to_come_are_not(weights: Callable[[list[float]], torch.Tensor], reward: float) -> None:
    assert answer(lambda: played(weights, reward), "past sums") == "no"


def rewarded(weights: Callable[[list[float]], torch.Tensor], kinds: list[float], *, advantage: bool = False) -> None:
    """Actions are right or wrong at once."""
    net, critic = nn.Linear(4, 2), nn.Linear(4, 1)
    optimizer = torch.optim.Adam([*net.parameters(), *critic.parameters()], lr=1e-2)
    for _ in range(30):
        x = torch.randn(20, 4)
        policy, value = Categorical(logits=net(x)), critic(x)[:, 0]
        scores = policy.log_prob(policy.sample())
        returns = weights([kinds[int(one)] for one in torch.randint(0, len(kinds), (20,))])
        optimizer.zero_grad()
        (-scores * (returns - value.detach() if advantage else returns)).sum().backward()
        optimizer.step()


@pytest.mark.parametrize("advantage", [True, False])
@pytest.mark.parametrize("kinds", [[1.0, -0.2], [0.0, 1.0, 0.0], [1.0, 0.0, -1.0]])
def test_returns_that_were_not_turned_round_are_told(kinds: list[float], advantage: bool) -> None:
    def appended(rewards: list[float]) -> torch.Tensor:
        return past(rewards[::-1])

    assert answer(lambda: rewarded(appended, kinds, advantage=advantage), "past sums") == "yes"
    assert answer(lambda: rewarded(to_come, kinds, advantage=advantage), "past sums") == "no"


def test_rewards_of_many_kinds_are_not() -> None:
    def drawn(rewards: list[float]) -> torch.Tensor:
        return to_come(torch.randn(20).tolist())

    assert answer(lambda: rewarded(drawn, [1.0]), "past sums") == "no"
    assert answer(lambda: rewarded(torch.tensor, [1.0, 0.0]), "past sums") == "no"


def one_by_one(order: str) -> None:
    """Each log-probability meets its return alone, in a loop over the steps of an episode."""
    net = nn.Linear(4, 2)
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
    for _ in range(12):
        acted = [Categorical(logits=net(one)) for one in torch.randn(20, 4)]
        scores = [one.log_prob(one.sample()) for one in acted]
        many = torch.stack(scores)
        states, actions = torch.randn(20, 4), torch.randint(0, 2, (20,))
        optimizer.zero_grad()
        if order == "appended":
            sums = scaled(past([1.0] * 20))
            total = sum(-one * two for one, two in zip(scores, sums, strict=True))
        elif order == "put in front":
            sums = scaled(to_come([1.0] * 20))
            total = sum(-one * two for one, two in zip(scores, sums, strict=True))
        elif order == "turned round":
            total = -(torch.stack(scores[::-1]) * past([1.0] * 20)).sum()
        elif order == "joined":
            total = -(many * past([1.0] * 20)).sum()
        else:  # from the end on, as each return is made
            sums, total = torch.tensor(0.0), torch.tensor(0.0)
            for place in reversed(range(20)):
                sums = 1.0 + 0.97 * sums
                if order == "numbers":
                    total = total - many[place] * float(sums)
                elif order == "again":
                    total = total - Categorical(logits=net(states[place])).log_prob(actions[place]) * sums
                else:
                    total = total - (scores[place] if order == "backwards" else many[place]) * sums
        total.backward()
        optimizer.step()


@pytest.mark.parametrize(
    ("order", "told"), [("appended", "yes"), ("put in front", "no"), ("backwards", "no"), ("places", "no"),
                        ("numbers", "no"), ("again", "no"), ("turned round", "no"), ("joined", "yes")],
)  # fmt: skip
def test_numbers_that_meet_one_by_one_are_in_the_order_of_their_steps(order: str, told: str) -> None:
    assert answer(lambda: one_by_one(order), "past sums") == told
