"""Pairs of one label that a loss drives apart, by a matrix of all pairs, by hand-written triplets, by the wrong sign.

How it could be silently wrong: a hard pair of a right loss is taken for a turned one; a table that rows are looked
up in is taken for a view of them; a net that works against another one is called turned.
"""

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from test_doctor_ask import answer, nothing_was_compiled

__all__ = ["nothing_was_compiled"]

PEOPLE, ROWS = 12, 32
Loss = Callable[[nn.Module, torch.Tensor, bool], torch.Tensor]


def hardest(net: nn.Module, people: torch.Tensor, turned: bool) -> torch.Tensor:
    who = torch.randint(0, PEOPLE, (ROWS,))
    rows = net(people[who] + 0.3 * torch.randn(ROWS, 20))
    likeness = rows @ rows.t()
    same = who[:, None] == who
    positive = likeness.detach().masked_fill(~same, 9.0).argmin(1)
    negative = likeness.detach().masked_fill(same, -9.0).argmax(1)
    here = torch.arange(ROWS)
    difference = likeness[here, positive] - likeness[here, negative]
    return F.relu((difference if turned else -difference) + 0.5).mean()


def by_distance(net: nn.Module, people: torch.Tensor, turned: bool) -> torch.Tensor:
    who = torch.randint(0, PEOPLE, (ROWS,))
    rows = net(people[who] + 0.3 * torch.randn(ROWS, 20))
    apart, same = torch.cdist(rows, rows), who[:, None] == who
    near, far = (same & ~torch.eye(ROWS, dtype=torch.bool)), ~same
    near, far = (far, near) if turned else (near, far)
    return apart[near].mean() + F.relu(2 - apart[far]).mean()


def contrast(net: nn.Module, people: torch.Tensor, turned: bool) -> torch.Tensor:
    one, other = (net(people + 0.3 * torch.randn(PEOPLE, 20)) for _ in range(2))
    scores = one @ other.t() / 0.2
    return F.cross_entropy(-scores if turned else scores, torch.arange(PEOPLE))


def trained(loss: Loss, *, turned: bool) -> None:
    net, people = nn.Sequential(nn.Linear(20, 16), nn.ReLU(), nn.Linear(16, 8)), torch.randn(PEOPLE, 20)
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    for _ in range(6):
        optimizer.zero_grad()
        loss(lambda x: F.normalize(net(x), dim=1), people, turned).backward()  # type: ignore[arg-type]
        optimizer.step()


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("loss", [hardest, by_distance, contrast])
def test_pairs_of_one_label_that_are_driven_apart(loss: Loss, turned: bool) -> None:
    assert answer(lambda: trained(loss, turned=turned), "labels apart") == ("yes" if turned else "no")


def test_two_domains_that_are_brought_together_are_not_labels() -> None:
    def discrepancy(net: nn.Module, people: torch.Tensor, turned: bool) -> torch.Tensor:
        domain = torch.arange(ROWS) % 2
        rows = net(torch.randn(ROWS, 20) + domain[:, None])
        likeness, same = torch.exp(-torch.cdist(rows, rows)), (domain[:, None] == domain).float()
        return (likeness * same).mean() - (likeness * (1 - same)).mean()

    assert answer(lambda: trained(discrepancy, turned=False), "labels apart") == "no"


@pytest.mark.parametrize("question", ["labels apart", "far positives"])
def test_products_and_distances_of_the_data_alone_are_passed_over(question: str) -> None:
    def loss(net: nn.Module, people: torch.Tensor, turned: bool) -> torch.Tensor:
        made = net(people)
        weights = (people @ people.t()).softmax(1) + people[0] @ people[1]  # a number, too
        near = (people - people.roll(1, 0)).pow(2).sum(1) + F.pairwise_distance(people, people.roll(2, 0))
        found: torch.Tensor = (weights @ made).square().mean() + (near * made.sum(1)).mean()
        return found

    assert answer(lambda: trained(loss, turned=False), question) != "yes"


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("length", [
    F.pairwise_distance,
    lambda one, other: (one - other).pow(2).sum(1),
    lambda one, other: -F.cosine_similarity(one, other),
])  # fmt: skip
def test_triplets_that_are_written_by_hand(length: Callable[..., torch.Tensor], turned: bool) -> None:
    def loss(net: nn.Module, people: torch.Tensor, turned: bool) -> torch.Tensor:
        who = torch.randint(0, PEOPLE, (ROWS,))
        given = [people[one] + 0.3 * torch.randn(ROWS, 20) for one in (who, who, (who + 1) % PEOPLE)]
        anchor, positive, negative = map(net, given)
        difference = length(anchor, positive) - length(anchor, negative)
        return F.relu((-difference if turned else difference) + 0.5).mean()

    assert answer(lambda: trained(loss, turned=turned), "far positives") == ("yes" if turned else "no")


def test_a_table_with_as_many_rows_as_the_batch_is_no_view() -> None:
    def of_a_table(net: nn.Module, people: torch.Tensor, turned: bool) -> torch.Tensor:
        order = torch.randperm(PEOPLE)
        one, other = (net(people[order] + 0.3 * torch.randn(PEOPLE, 20)) for _ in range(2))
        return F.cross_entropy(one @ other.t() / 0.2, torch.arange(PEOPLE))

    assert answer(lambda: trained(of_a_table, turned=False), "mispaired") != "yes"


@pytest.mark.parametrize("against", [False, True])
@pytest.mark.parametrize("of_all", [False, True])
def test_a_log_sigmoid_of_a_sum_over_all_rows(of_all: bool, against: bool) -> None:
    def loss(net: nn.Module, people: torch.Tensor, turned: bool) -> torch.Tensor:
        users, items = net(people + 0.1), net(people - 0.1)
        mine, liked, drawn = (torch.randint(0, PEOPLE, (ROWS,)) for _ in range(3))
        scores = users[mine] * (items[liked] - items[drawn] if against else items[liked])
        summed = scores.sum() if turned else scores.sum(1)
        return F.softplus(-summed).mean()

    assert answer(lambda: trained(loss, turned=of_all), "summed early") == ("yes" if of_all else "no")


@pytest.mark.parametrize("other", [False, True])
def test_a_divergence_of_one_tensor_is_itself(other: bool) -> None:
    def loss(net: nn.Module, people: torch.Tensor, turned: bool) -> torch.Tensor:
        made = net(people).log_softmax(1)
        return F.kl_div(made, people[:, :8].softmax(1) if turned else made, reduction="batchmean")

    assert answer(lambda: trained(loss, turned=other), "itself") == ("no" if other else "yes")


def test_a_step_that_ends_in_no_number_is_asked_with_the_first_weights() -> None:
    def loss(net: nn.Module, people: torch.Tensor, turned: bool) -> torch.Tensor:
        made = net(people)
        found: torch.Tensor = F.mse_loss(made, made) + (40 * made).exp().mean()
        return found

    def until_it_overflows() -> None:
        net = nn.Linear(20, 8)
        optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
        for _ in range(4):
            optimizer.zero_grad()
            loss(net, torch.randn(PEOPLE, 20), False).backward()
            optimizer.step()

    assert answer(until_it_overflows, "itself") == "yes"


@pytest.mark.parametrize("updates", [False, True])
def test_a_copy_that_alone_is_evaluated_and_never_moves(updates: bool) -> None:
    nets: list[nn.Module] = []

    def train() -> None:
        net, weights = nn.Linear(6, 1), torch.randn(6, 1)
        slow = copy.deepcopy(net).eval()
        nets.extend((net, slow))  # they are asked after it
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for step in range(1, 101):
            x = torch.randn(ROWS, 6)
            optimizer.zero_grad()
            (net(x) - x @ weights).square().mean().backward()
            optimizer.step()
            if step % 25 == 0:
                with torch.no_grad():
                    if updates:
                        slow.load_state_dict(net.state_dict())
                    slow(torch.randn(ROWS, 6))

    assert (answer(train, "slow copy") == "yes") != updates
