"""Two views of a pair that are one and the same: told where they are joined, too, and not where they only may be."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from test_doctor_ask import answer, nothing_was_compiled

__all__ = ["nothing_was_compiled"]


def contrast(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """NT-Xent."""
    both, rows = F.normalize(torch.cat([one, other]), dim=1), len(one)
    scores = (both @ both.t() / 0.2).masked_fill(torch.eye(2 * rows, dtype=torch.bool), -torch.inf)
    return F.cross_entropy(scores, torch.cat([torch.arange(rows) + rows, torch.arange(rows)]))


def trained(net: nn.Module, views: Any) -> None:
    optimizer = torch.optim.Adam(net.parameters())
    for _ in range(4):
        one, other = views(torch.randn(16, 6))
        optimizer.zero_grad()
        contrast(net(one), net(other)).backward()
        optimizer.step()


def noisy(x: torch.Tensor) -> torch.Tensor:
    return x + 0.1 * torch.randn_like(x)


def once(x: torch.Tensor) -> Any:
    view = noisy(x)
    return view, view


def copied(x: torch.Tensor) -> Any:
    view = noisy(x)
    return view, view.clone()


def encoder(*more: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), *more, nn.Linear(16, 8))


@pytest.mark.parametrize("views", [once, copied])
def test_one_view_given_as_both_is_told(views: Any) -> None:
    assert answer(lambda: trained(encoder(), views), "itself") == "yes"


def test_two_views_are_not() -> None:
    assert answer(lambda: trained(encoder(), lambda x: (noisy(x), noisy(x))), "itself") == "no"
    assert answer(lambda: trained(encoder(), lambda x: (x, noisy(x))), "itself") == "no"


def test_pairs_that_a_mask_forbids_do_not_make_views_one() -> None:
    """Beside a score of minus a billion all others are alike."""
    net = encoder()
    optimizer = torch.optim.Adam(net.parameters())

    def train() -> None:
        for _ in range(4):
            x, group = torch.randn(16, 6), torch.arange(16) % 4
            scores = F.normalize(net(noisy(x)), dim=1) @ F.normalize(net(noisy(x)), dim=1).t() / 0.2
            optimizer.zero_grad()
            F.cross_entropy(scores.masked_fill(group[:, None] != group, -1e9), torch.arange(16)).backward()
            optimizer.step()

    assert answer(train, "itself") == "no"


def test_the_largest_score_of_a_row_is_no_target_of_it() -> None:
    """A supervised contrast whose scores are shifted before their exponential, by which nothing changes."""
    net = encoder()
    optimizer = torch.optim.Adam(net.parameters(), 1e-3)

    def train() -> None:
        for _ in range(4):
            x, labels = torch.randn(16, 6), torch.arange(16) % 4
            both, labels = F.normalize(net(torch.cat([noisy(x), noisy(x)])), dim=1), torch.cat([labels, labels])
            own = torch.eye(32, dtype=torch.bool)
            scores = both @ both.t() / 0.1
            scores = scores - scores.max(1, keepdim=True).values.detach()
            log_likely = scores - scores.masked_fill(own, -1e9).logsumexp(1, keepdim=True)
            like = (labels[:, None] == labels) & ~own
            optimizer.zero_grad()
            (-(log_likely * like).sum(1) / like.sum(1)).mean().backward()
            optimizer.step()

    assert answer(train, "related") != "no"


def test_what_shifts_the_scores_of_all_pairs_is_no_target_of_them() -> None:
    """Pairs of one category are made harder by a number that is added to their scores."""
    one, other = encoder(), encoder()
    optimizer = torch.optim.Adam([*one.parameters(), *other.parameters()], 3e-3)

    def train() -> None:
        for _ in range(60):
            x, kinds = torch.randn(16, 6), torch.arange(16) % 4
            same = (kinds[:, None] == kinds) & ~torch.eye(16, dtype=torch.bool)
            optimizer.zero_grad()
            F.cross_entropy(one(x) @ other(x).t() + 0.7 * same, torch.arange(16)).backward()
            optimizer.step()

    assert answer(train, "error preferred") != "yes"


def test_dropout_makes_two_views_of_one() -> None:
    """As in SimCSE."""
    assert answer(lambda: trained(encoder(nn.Dropout(0.2)), lambda x: (x, x)), "itself") == "no"


def test_what_is_joined_for_another_reason_is_not() -> None:
    """Both heads of one trunk, and the values of two critics."""
    trunk, heads = nn.Linear(6, 8), nn.ModuleList([nn.Linear(8, 4), nn.Linear(8, 4)])
    critics = nn.ModuleList([nn.Linear(6, 1), nn.Linear(6, 1)])
    optimizer = torch.optim.Adam([*trunk.parameters(), *heads.parameters(), *critics.parameters()])

    def train() -> None:
        for _ in range(4):
            x, y = torch.randn(16, 6), torch.randn(16, 8)
            joined = torch.cat([head(trunk(x)) for head in heads], 1)
            values = torch.stack([critic(x) for critic in critics])
            optimizer.zero_grad()
            (F.mse_loss(joined, y) + (values - y[:, :1]).square().mean()).backward()
            optimizer.step()

    assert answer(train, "itself") == "no"


@pytest.mark.parametrize("in_turns", [False, True])
@pytest.mark.parametrize(("views", "expected"), [(1, "yes"), (2, "no")])
def test_one_view_given_twice_in_one_batch_is_told(in_turns: bool, views: int, expected: str) -> None:
    def train() -> None:
        net = encoder()
        optimizer = torch.optim.Adam(net.parameters())
        for _ in range(4):
            x = torch.randn(16, 6)
            first = noisy(x)
            second = noisy(x) if views == 2 else first
            both = torch.stack([first, second], 1).flatten(0, 1) if in_turns else torch.cat([first, second])
            made = F.normalize(net(both), dim=1)
            here = torch.arange(32)
            scores = (made @ made.t() / 0.2).masked_fill(torch.eye(32, dtype=torch.bool), -torch.inf)
            optimizer.zero_grad()
            F.cross_entropy(scores, here ^ 1 if in_turns else (here + 16) % 32).backward()
            optimizer.step()

    assert answer(train, "itself") == expected


def test_a_batch_twice_with_noise_or_for_another_reason_is_not() -> None:
    """Noise that the model draws tells the two apart; and negatives may be there twice."""

    class Noisy(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return noisy(x)

    def train(net: nn.Module, targets: torch.Tensor) -> None:
        optimizer = torch.optim.Adam(net.parameters())
        for _ in range(4):
            x = torch.randn(16, 6)
            made = F.normalize(net(torch.cat([x, x])), dim=1)
            scores = (made @ made.t() / 0.2).masked_fill(torch.eye(32, dtype=torch.bool), -torch.inf)
            optimizer.zero_grad()
            F.cross_entropy(scores, targets).backward()
            optimizer.step()

    here = torch.arange(32)
    assert answer(lambda: train(encoder(Noisy()), (here + 16) % 32), "itself") == "no"
    assert answer(lambda: train(encoder(nn.Dropout(0.2)), (here + 16) % 32), "itself") == "no"
    assert answer(lambda: train(encoder(), (here + 1) % 32), "itself") == "no"


def of_columns(kind: str) -> None:
    net, other = encoder(), encoder()
    optimizer = torch.optim.Adam([*net.parameters(), *other.parameters()])
    for _ in range(4):
        x = torch.randn(24, 6)
        one, two = net(noisy(x)), other(noisy(x))
        optimizer.zero_grad()
        dim = 1 if kind == "rows" else 0
        if kind == "by norm":
            one, two = one / one.norm(dim=0, keepdim=True), two / two.norm(dim=0, keepdim=True)
        else:
            one, two = F.normalize(one, dim=dim), F.normalize(two, dim=dim)
        if kind == "columns compared":  # as Barlow twins, with a softmax over columns
            F.cross_entropy(one.t() @ two / 0.2, torch.arange(8)).backward()
        elif kind == "no scores":
            (one @ two.t() - torch.eye(24)).square().mean().backward()
        else:
            F.cross_entropy(one @ two.t() / 0.2, torch.arange(24)).backward()
        optimizer.step()


@pytest.mark.parametrize(
    ("kind", "expected"),
    [("batch", "yes"), ("by norm", "yes"), ("rows", "no"), ("columns compared", "no"), ("no scores", "no")],
)
def test_rows_that_are_compared_after_columns_have_length_one_are_told(kind: str, expected: str) -> None:
    assert answer(lambda: of_columns(kind), "unit columns") == expected


def test_columns_of_weights_that_have_length_one_are_not() -> None:
    """As the centres of classes in ArcFace."""

    def train() -> None:
        net, centres = encoder(), nn.Parameter(torch.randn(8, 12))
        optimizer = torch.optim.Adam([*net.parameters(), centres])
        for _ in range(4):
            made = F.normalize(net(torch.randn(24, 6)), dim=1)
            optimizer.zero_grad()
            F.cross_entropy(made @ F.normalize(centres, dim=0) / 0.1, torch.randint(12, (24,))).backward()
            optimizer.step()

    assert answer(train, "unit columns") == "no"
