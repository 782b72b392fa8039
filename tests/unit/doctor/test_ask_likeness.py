"""Which way scores go, and what makes a difference to them: each fault beside its healthy twin."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from test_doctor_ask import answer, nothing_was_compiled

__all__ = ["nothing_was_compiled"]

Scores = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def of_prototypes(scores: Scores) -> None:
    net = nn.Linear(6, 4)
    optimizer = torch.optim.Adam(net.parameters())
    for _ in range(4):
        optimizer.zero_grad()
        made = scores(net(torch.randn(20, 6)), net(torch.randn(5, 6)))
        F.cross_entropy(made, torch.arange(5).repeat(4)).backward()
        optimizer.step()


def squares(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    return ((one[:, None] - other) ** 2).sum(2)


@pytest.mark.parametrize(
    ("scores", "expected"),
    [
        (squares, "yes"),
        (torch.cdist, "yes"),
        (lambda x, y: (x[:, None] - y).norm(dim=-1) / 2, "yes"),
        (lambda x, y: 0 - (0 - squares(x, y)), "yes"),
        (lambda x, y: -squares(x, y), "no"),
        (lambda x, y: torch.cdist(x, y) * -0.5, "no"),
        (lambda x, y: 4 - torch.cdist(x, y), "no"),
        (lambda x, y: (x[:, None] * y).sum(2), "no"),
        (lambda x, y: (x[:, None] * y).norm(dim=-1), "no"),  # the length of a capsule
    ],
)
def test_distances_in_the_place_of_scores_are_told(scores: Scores, expected: str) -> None:
    assert answer(lambda: of_prototypes(scores), "distance as score") == expected


def of_words(sign: float, *, draws: bool = True) -> None:
    """Skip-grams with negative samples that are drawn in the step, or come with the batch."""
    words, contexts = nn.Embedding(30, 8), nn.Embedding(30, 8)
    optimizer = torch.optim.Adam([*words.parameters(), *contexts.parameters()])
    for _ in range(4):
        i, o = torch.randint(30, (16,)), torch.randint(30, (16,))
        given = torch.randint(30, (16, 5))
        optimizer.zero_grad()
        anchor = words(i)[:, :, None]
        n = torch.empty(16, 5).uniform_(0, 29).long() if draws else given
        near, far = contexts(o)[:, None] @ anchor, contexts(n) @ anchor
        (-(F.logsigmoid(near).mean() + F.logsigmoid(sign * far).mean())).backward()
        optimizer.step()


@pytest.mark.parametrize(("sign", "draws", "expected"), [(1, True, "yes"), (-1, True, "no"), (1, False, "no")])
def test_random_rows_that_are_drawn_near_are_told(sign: float, draws: bool, expected: str) -> None:
    assert answer(lambda: of_words(sign, draws=draws), "drawn near") == expected


def attends(dim: int, *, time_first: bool = False) -> None:
    """Additive attention over the places of a sequence, whose samples may lie along its second dim."""
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    out = nn.Linear(4, 2)
    optimizer = torch.optim.Adam([*net.parameters(), *out.parameters()])
    for _ in range(4):
        x = torch.randn(6, 12, 4) if time_first else torch.randn(12, 6, 4)
        optimizer.zero_grad()
        x = x.transpose(0, 1) if time_first else x
        weights = torch.softmax(net(x).squeeze(2), dim=dim)
        F.cross_entropy(out(torch.bmm(weights.unsqueeze(1), x).squeeze(1)), torch.arange(12) % 2).backward()
        optimizer.step()


def test_attention_weights_over_the_batch_are_told() -> None:
    assert answer(lambda: attends(0), "softmax axis") == "yes"
    assert answer(lambda: attends(1), "softmax axis") == "no"


@pytest.mark.parametrize(("dims", "expected"), [((1, 0), "yes"), ((0, 1), "yes"), ((1, 1), "no"), ((1, -1), "no")])
def test_probabilities_that_are_compared_along_two_axes_are_told(dims: tuple[int, int], expected: str) -> None:
    def distils() -> None:
        net, teacher = nn.Linear(6, 4), nn.Linear(6, 4)
        optimizer = torch.optim.Adam(net.parameters())
        for _ in range(4):
            x = torch.randn(16, 6)
            with torch.no_grad():
                target = teacher(x).softmax(dims[1])
            optimizer.zero_grad()
            F.kl_div(F.log_softmax(net(x), dim=dims[0]), target, reduction="batchmean").backward()
            optimizer.step()

    assert answer(distils, "compared axes") == expected


def test_two_directions_of_one_matching_are_compared_as_is_meant() -> None:
    def matches() -> None:
        net, other = nn.Linear(6, 4), nn.Linear(6, 4)
        optimizer = torch.optim.Adam([*net.parameters(), *other.parameters()])
        for _ in range(4):
            scores = net(torch.randn(16, 6)) @ other(torch.randn(16, 6)).T
            optimizer.zero_grad()
            F.mse_loss(scores.softmax(1), scores.softmax(0)).backward()
            optimizer.step()

    assert answer(matches, "compared axes") == "no"


def test_attention_weights_over_the_batch_are_told_behind_the_time() -> None:
    assert answer(lambda: attends(0, time_first=True), "softmax axis") == "yes"
    assert answer(lambda: attends(1, time_first=True), "softmax axis") == "no"


def of_graph(mask: Callable[[torch.Tensor], torch.Tensor], *, whole: bool = False) -> None:
    """Attention among the neighbours in a graph."""
    net, out = nn.Linear(4, 8), nn.Linear(8, 2)
    optimizer = torch.optim.Adam([*net.parameters(), *out.parameters()])
    adjacency = torch.ones(12, 12) if whole else torch.eye(12) + torch.eye(12).roll(1, 0)
    for _ in range(4):
        x = torch.randn(12, 4)
        optimizer.zero_grad()
        made = net(x)
        scores = torch.where(mask(adjacency), made @ made.T, -9e15 * torch.ones(12, 12))
        F.cross_entropy(out(F.softmax(scores, dim=1) @ made), torch.arange(12) % 2).backward()
        optimizer.step()


@pytest.mark.parametrize(
    ("mask", "whole", "expected"),
    [
        (lambda one: one >= 0, False, "yes"),
        (lambda one: one < 0, False, "yes"),
        (lambda one: one > 0, False, "no"),
        (lambda one: one > 0, True, "no"),  # of a graph in which all are neighbours
        (lambda one: one != 0, True, "no"),
        (lambda one: one > -1, False, "no"),
    ],
)
def test_a_mask_that_tells_nothing_apart_is_told(
    mask: Callable[[torch.Tensor], torch.Tensor], whole: bool, expected: str
) -> None:
    assert answer(lambda: of_graph(mask, whole=whole), "hides nothing") == expected


def of_neighbours(numbers: list[torch.Tensor], mask: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Attention to lists of neighbours, a batch for each step."""
    table, score, out = nn.Embedding(9, 8), nn.Linear(8, 1), nn.Linear(8, 2)
    optimizer = torch.optim.Adam([*table.parameters(), *score.parameters(), *out.parameters()])
    for given in numbers:
        optimizer.zero_grad()
        made = table(given.clamp(min=0))
        weights = score(made).squeeze(2).masked_fill(mask(given), -1e9).softmax(1)
        F.cross_entropy(out((weights[:, :, None] * made).sum(1)), torch.arange(len(given)) % 2).backward()
        optimizer.step()


def nothing_there(numbers: torch.Tensor) -> torch.Tensor:
    return numbers < 0


def test_a_batch_without_padding_has_no_inverted_mask() -> None:
    padded, whole = (torch.randint(least, 4, (16, 6)) for least in (-1, 0))
    most_zeros = torch.arange(96).reshape(16, 6) % 3 // 2
    for one in (whole, most_zeros):
        batches = [padded, one, padded, padded]
        assert answer(partial(of_neighbours, batches, nothing_there), "hides nothing") == "no"


def test_a_window_as_wide_as_a_sequence_hides_nothing_and_is_none() -> None:
    far = (torch.arange(12)[:, None] - torch.arange(12)).abs()
    assert answer(lambda: of_neighbours([far.clamp(max=8)] * 4, lambda one: one > 8), "hides nothing") == "no"
