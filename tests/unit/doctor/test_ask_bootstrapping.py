"""A value that is learned from the state itself, or counts at the ends alone, is told; one of what follows is not."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from test_doctor_ask import answer, nothing_was_compiled

__all__ = ["nothing_was_compiled"]

Sides = tuple[torch.Tensor, torch.Tensor]
Learner = Callable[[nn.Module, nn.Module, torch.Tensor, torch.Tensor], Sides]
ROWS = 16


def learned(sides: Learner, following: Callable[[torch.Tensor], torch.Tensor] = torch.randn_like) -> None:
    net, old = nn.Linear(5, 2), nn.Linear(5, 2)
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    for _ in range(6):
        states = torch.randn(ROWS, 5)
        optimizer.zero_grad()
        F.smooth_l1_loss(*sides(net, old, states, following(states))).backward()
        optimizer.step()


def of_actions(net: nn.Module, old: nn.Module, states: torch.Tensor, following: torch.Tensor) -> Sides:
    reward, goes_on = torch.rand(ROWS, 1), torch.ones(ROWS, 1)
    taken = net(states).gather(1, torch.randint(0, 2, (ROWS, 1)))
    best = old(following).max(1)[0].unsqueeze(1).detach()
    return taken, reward + 0.98 * best * goes_on


def flattened(net: nn.Module, old: nn.Module, states: torch.Tensor, following: torch.Tensor) -> Sides:
    """Of a buffer whose rewards and ends are columns, behind a call that chooses an action."""
    reward, ends = torch.rand(ROWS, 1), torch.zeros(ROWS, 1)
    net(torch.randn(1, 5)).argmax(1)
    with torch.no_grad():
        best, _ = old(following).max(dim=1)
        wanted = reward.flatten() + 0.98 * best * (1 - ends.flatten())
    return wanted, net(states).gather(1, torch.randint(0, 2, (ROWS, 1))).squeeze()


def shifted(net: nn.Module, old: nn.Module, states: torch.Tensor, _: torch.Tensor) -> Sides:
    """All states of an episode are given to both nets."""
    with torch.no_grad():
        after = old(states).max(1)[0].roll(-1)
    return net(states)[:, 0], torch.rand(ROWS) + 0.9 * after


def of_one_call(net: nn.Module, old: nn.Module, states: torch.Tensor, _: torch.Tensor) -> Sides:
    values = net(states)
    return values[:, 0], torch.rand(ROWS) + 0.9 * values[:, 1].detach()


def distilled(net: nn.Module, old: nn.Module, states: torch.Tensor, _: torch.Tensor) -> Sides:
    return net(states), 0.3 * torch.rand(ROWS, 2) + 0.7 * old(states).detach()


@pytest.mark.parametrize(
    ("sides", "following", "expected"),
    [
        (of_actions, torch.randn_like, "no"),
        (of_actions, lambda states: states, "yes"),
        (of_actions, torch.clone, "yes"),  # one array that the environment wrote into
        (flattened, torch.randn_like, "no"),
        (flattened, torch.clone, "yes"),
        (shifted, torch.clone, "no"),
        (of_one_call, torch.clone, "no"),
        (distilled, torch.clone, "no"),
    ],
)
def test_the_value_of_a_state_from_the_state_itself_is_told(
    sides: Learner, following: Callable[[torch.Tensor], torch.Tensor], expected: str
) -> None:
    assert answer(lambda: learned(sides, following), "same state") == expected


def of_episodes(net: nn.Module, old: nn.Module, _: torch.Tensor, __: torch.Tensor) -> Sides:
    """All states of each row are given to both nets, and the values of one are those after the other's."""
    states = torch.randn(ROWS, 7, 5)
    with torch.no_grad():
        after = old(states)[:, 1:, 0]
    return net(states)[:, :-1, 0], torch.rand(ROWS, 6) + 0.9 * after


def of_goals(net: nn.Module, old: nn.Module, states: torch.Tensor, following: torch.Tensor) -> Sides:
    goal = torch.randn(ROWS, 5)
    return net(states) + net(goal), torch.rand(ROWS, 2) + 0.9 * (old(following) + old(goal)).detach()


@pytest.mark.parametrize("sides", [of_episodes, of_goals])
def test_states_that_follow_and_goals_of_both_are_not(sides: Learner) -> None:
    assert answer(lambda: learned(sides), "same state") == "no"


@pytest.mark.parametrize("shape", [(1, 5), (5,)])
@pytest.mark.parametrize(("is_trained", "expected"), [(False, "no"), (True, "unknown")])
def test_calls_that_choose_actions_are_on_no_batch_where_they_are_not_trained(
    shape: tuple[int, ...], is_trained: bool, expected: str
) -> None:
    """What was chosen one state at a time is no row of the batch of a net that is trained beside it."""
    net, value = nn.Linear(5, 2), nn.Linear(5, 1)

    def train() -> None:
        optimizer = torch.optim.Adam([*net.parameters(), *value.parameters()], lr=1e-3)
        for _ in range(6):
            chosen = [net(torch.randn(shape)).reshape(1, 2).log_softmax(1)[:, 0] for _ in range(ROWS)]
            loss = F.mse_loss(value(torch.randn(ROWS, 5)), torch.rand(ROWS, 1))
            optimizer.zero_grad()
            (loss - 0.1 * torch.cat(chosen).mean() if is_trained else loss).backward()
            optimizer.step()

    found = answer(train, "same state")
    assert found == (expected if len(shape) == 2 else "no")
    assert answer(train, "axes") == ("unknown" if is_trained and len(shape) == 2 else "no")


def of_ends(often: float, *, inverted: bool) -> Learner:
    def sides(net: nn.Module, old: nn.Module, states: torch.Tensor, following: torch.Tensor) -> Sides:
        reward, done = torch.rand(ROWS), (torch.rand(ROWS) < often).float()
        done[:2] = torch.tensor([0.0, 1.0])
        with torch.no_grad():
            best = old(following).max(1)[0]
        made = net(states)[:, 0]
        return made, reward + 0.97 * ((done if inverted else 1 - done) * best.float()).float()  # which gives itself

    return sides


@pytest.mark.parametrize(
    ("often", "inverted", "expected"), [(0.05, True, "yes"), (0.05, False, "no"), (0.4, False, "no")]
)
def test_a_value_that_counts_at_the_ends_alone_is_told(often: float, inverted: bool, expected: str) -> None:
    assert answer(lambda: learned(of_ends(often, inverted=inverted)), "ends alone") == expected
