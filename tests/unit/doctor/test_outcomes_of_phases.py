"""What becomes of a run whose loss has several targets, and of one that trains more of a net later."""

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from anybatch.doctor.recorder import Doctor
from anybatch.doctor.views.outcomes import outcome

ROWS = 64


def net(body: float) -> nn.Sequential:
    """A body that begins with weights of this size, and a head."""
    made = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 3))
    with torch.no_grad():
        for one in made[0].parameters():
            one.mul_(body)
    return made


def batches(count: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    for _ in range(count):
        x = torch.randn(ROWS, 8)
        yield x, x[:, :3].argmax(1)


def stages(first: nn.Module, *trained: nn.Module) -> str:
    """The word for a run of one loop, in which these parts of nets are trained in turn."""
    torch.manual_seed(0)
    with Doctor(every=5) as doctor:
        for stage, part in enumerate(trained):
            optimizer = torch.optim.Adam(part.parameters(), lr=1e-2)
            model = first if stage == 0 or part is first else part
            for x, y in batches(80):
                loss = F.cross_entropy(model(x), y)
                model.zero_grad()
                loss.backward()
                optimizer.step()
    return outcome(doctor.run).word


def test_a_head_that_learns_nothing_is_no_fault_where_all_is_trained_then() -> None:
    made = net(body=0.0)
    assert stages(made, made[2], made) == "learning"


def test_a_head_that_learns_nothing_is_one_at_the_end() -> None:
    made = net(body=0.0)
    assert stages(made, made[2]) == "not learning"


def test_another_net_that_learns_then_excuses_nothing() -> None:
    made = net(body=0.0)
    assert stages(made, made[2], net(body=1.0)) == "not learning"


@pytest.mark.parametrize(("steps", "word"), [(6, "undecided"), (80, "learning")])
def test_another_net_that_is_trained_for_a_few_steps_only_leaves_the_verdict_open(steps: int, word: str) -> None:
    torch.manual_seed(0)
    with Doctor(every=5) as doctor:
        for count in (80, steps):
            made = net(body=1.0)
            optimizer = torch.optim.Adam(made.parameters(), lr=1e-2)
            for x, y in batches(count):
                optimizer.zero_grad()
                F.cross_entropy(made(x), y).backward()
                optimizer.step()
    assert outcome(doctor.run).word == word


@pytest.mark.parametrize(("share", "learned"), [(0.8, True), (0.05, False)])
def test_of_two_targets_the_weighted_mean_counts(share: float, learned: bool) -> None:
    torch.manual_seed(0)
    made = net(body=1.0)
    optimizer = torch.optim.Adam(made.parameters(), lr=1e-2)
    with Doctor(every=5) as doctor:
        for x, y in batches(150):
            made_of, other = made(x), y[torch.randperm(ROWS)]
            loss = share * F.cross_entropy(made_of, y) + (1 - share) * F.cross_entropy(made_of, other)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    assert (outcome(doctor.run).word == "learning") == learned


def test_the_losses_of_all_steps_in_time_are_compared_with_as_many_guesses() -> None:
    """Their sum may end above the guess of one of them, which says nothing."""
    torch.manual_seed(0)
    cell, head, words = nn.RNNCell(4, 8), nn.Linear(8, 4), torch.tensor([0, 1, 0, 2, 3, 3, 1, 0])
    optimizer = torch.optim.Adam([*cell.parameters(), *head.parameters()], lr=5e-3)
    with Doctor(every=5) as doctor:
        for _ in range(60):
            state, loss = torch.zeros(1, 8), torch.zeros(())
            for now, then in zip(F.one_hot(words[:-1], 4).float(), words[1:], strict=True):
                state = cell(now[None], state)
                loss = loss + F.cross_entropy(head(state), then[None])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    assert doctor.run is not None
    assert outcome(doctor.run).word == "learning", outcome(doctor.run)
