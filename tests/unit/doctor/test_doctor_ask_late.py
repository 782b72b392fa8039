"""Weights of rows that meet the mean over the rows are found, and those that weigh something are not."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from anybatch import Doctor
from test_doctor_ask import ROWS, answer, asked, steps

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@pytest.fixture(autouse=True)
def nothing_was_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever other tests of this process have compiled: no step is written down after that."""
    monkeypatch.setattr("anybatch.doctor.ask.keeping.has_compiled", lambda: False)


def masked(scores: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    mask = (y > 0).float()
    return (F.cross_entropy(scores, y) * mask).sum() / mask.sum()


def weighted(scores: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.mean(torch.rand(ROWS) * F.mse_loss(scores[:, 0], y.float()))


def credited(scores: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    log_probs = scores.log_softmax(1)[torch.arange(ROWS), y]
    return -torch.sum(log_probs.mean() * y.float())


def by_row(scores: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    mask = (y > 0).float()
    return (F.cross_entropy(scores, y, reduction="none") * mask).sum() / mask.sum()


def of_whole_episodes(scores: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """One return for the whole of an episode, and a weight for each of several losses."""
    log_probs = scores.log_softmax(1)[torch.arange(ROWS), y]
    losses = torch.stack([-log_probs.sum() * y.float().sum(), F.cross_entropy(scores, y)])
    return (losses * torch.tensor([0.1, 0.9])).sum()


def filled(scores: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """A mean takes the place of scores that are missing, and what comes of it goes on."""
    there = (torch.rand(ROWS, 3) > 0.3).float()
    return F.cross_entropy(scores * there + scores.mean() * (1 - there), y)


def of_quantiles(scores: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """As many weights as there are terms, none of which is of a row."""
    return (F.cross_entropy(scores, y) * torch.tensor([0.1, 0.2, 0.3, 0.4, 0.5])).sum()


def all_alike(scores: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (F.cross_entropy(scores, y) * torch.ones(ROWS)).mean()


@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        (masked, "yes"), (weighted, "yes"), (credited, "yes"),
        (by_row, "no"), (of_whole_episodes, "no"), (filled, "no"), (of_quantiles, "no"), (all_alike, "no"),
    ],
)  # fmt: skip
def test_weights_of_rows_that_meet_a_mean_are_found(loss: Loss, expected: str) -> None:
    assert answer(lambda: steps(nn.Linear(6, 3), loss), "weighed late") == expected


def test_a_loss_of_which_only_the_gradient_is_used_is_no_term_of_the_loss() -> None:
    net = nn.Linear(6, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)

    def train() -> None:
        for _ in range(6):
            x = torch.randn(ROWS, 6)
            y, other = x[:, :1] - x[:, 1:2], torch.randn(ROWS, 1)
            inner = F.l1_loss(net(x), other)
            (slope,) = torch.autograd.grad(inner, net.weight, create_graph=True)
            outer = F.mse_loss(F.linear(x, net.weight - 0.01 * slope, net.bias), y)
            optimizer.zero_grad()
            outer.backward()
            optimizer.step()

    found = asked(train, "related")[-1]
    assert not found.evidence.get("apart")


def test_a_step_of_an_optimizer_that_begins_late_is_written_down_too() -> None:
    net = nn.Linear(6, 3)
    with Doctor() as doctor:
        steps(net, F.cross_entropy, count=40)
        steps(net, masked, count=40)
    assert sorted(doctor.kept.tapes) == [0, 1]


def of_log_softmax(scores: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.nll_loss(scores.log_softmax(1), y)


@pytest.mark.parametrize("term", [F.cross_entropy, of_log_softmax])
def test_the_lighter_of_two_labels_of_a_mixed_row_is_no_term_of_another_row(term: Loss) -> None:
    net = nn.Linear(6, 3)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.05)

    def train() -> None:
        for _ in range(40):
            x, order = torch.randn(64, 6), torch.randperm(64)
            y = x[:, :3].argmax(1)
            scores = net(0.98 * x + 0.02 * x[order])
            optimizer.zero_grad()
            (0.98 * term(scores, y) + 0.02 * term(scores, y[order])).backward()
            optimizer.step()

    (found,) = asked(train, "related")
    assert (found.answer, found.evidence["apart"]) == ("yes", [])
