"""Several losses of the same rows: targets that disagree, and two predictions that are one."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from test_doctor_ask import answer, nothing_was_compiled

__all__ = ["nothing_was_compiled"]

Kept = Callable[[torch.Tensor], torch.Tensor]
ROWS = 64


def distilled(kept: Kept, wrong: float = 0.0) -> None:
    """A student that learns from labels and from what a teacher said of the rows, some of which it has wrong."""
    torch.manual_seed(0)
    student = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 4))
    optimizer = torch.optim.Adam(student.parameters())
    for _ in range(4):
        x = torch.randn(ROWS, 6)
        labels = x[:, :4].argmax(1)
        known = labels.where(torch.rand(ROWS) >= wrong, torch.randint(0, 4, (ROWS,)))
        teacher = kept(3.0 * F.one_hot(known, 4).float())
        scores = student(x)
        soft = F.kl_div(F.log_softmax(scores / 2, 1), F.softmax(teacher / 2, 1), reduction="batchmean")
        optimizer.zero_grad()
        (0.5 * F.cross_entropy(scores, labels) + 2 * soft).backward()
        optimizer.step()


def test_what_a_teacher_said_of_other_rows_is_told() -> None:
    assert answer(lambda: distilled(lambda said: said[torch.randperm(ROWS)]), "targets at odds") == "yes"


@pytest.mark.parametrize("wrong", [0.0, 0.5])
def test_a_teacher_that_is_right_of_some_rows_is_not(wrong: float) -> None:
    assert answer(lambda: distilled(lambda said: said, wrong), "targets at odds") == "no"


def test_a_teacher_that_is_asked_of_the_same_rows_is_not() -> None:
    """Whatever the labels are."""
    asked = nn.Linear(4, 4, bias=False).requires_grad_(False)
    asked.weight.copy_(torch.eye(4))
    assert answer(lambda: distilled(lambda said: asked(said[torch.randperm(ROWS)])), "targets at odds") == "no"


def test_a_teacher_that_is_sure_of_nothing_is_not() -> None:
    assert answer(lambda: distilled(lambda said: 0.1 * torch.randn(ROWS, 4)), "targets at odds") == "no"


def test_a_teacher_of_rows_without_labels_is_not() -> None:
    """As in semi-supervised learning, where a batch of either kind is given to one net at once."""

    def train() -> None:
        torch.manual_seed(0)
        net = nn.Linear(6, 4)
        optimizer = torch.optim.Adam(net.parameters())
        for _ in range(4):
            x = torch.randn(2 * ROWS, 6)
            scores = net(x)
            said = F.softmax(3.0 * F.one_hot(x[ROWS:, :4].argmax(1), 4).float(), 1)
            loss = F.cross_entropy(scores[:ROWS], x[:ROWS, :4].argmax(1))
            loss = loss + F.kl_div(F.log_softmax(scores[ROWS:], 1), said, reduction="batchmean")
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    assert answer(train, "targets at odds") == "no"


def headed(apart: bool, labels: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]) -> None:
    torch.manual_seed(0)
    trunk, heads = nn.Linear(6, 16), [nn.Linear(16, 4) for _ in range(2)]
    optimizer = torch.optim.Adam([*trunk.parameters(), *heads[0].parameters(), *heads[1].parameters()])
    for _ in range(4):
        x = torch.randn(ROWS, 6)
        one, other = (head(trunk(x).relu()) for head in (heads if apart else heads[:1] * 2))
        first, second = labels(x)
        optimizer.zero_grad()
        (F.cross_entropy(one, first) + F.cross_entropy(other, second)).backward()
        optimizer.step()


def of_two_kinds(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x[:, :4].argmax(1), (x[:, 4] > 0).long()


def of_mixed_samples(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    labels = x[:, :4].argmax(1)
    return labels, labels.flip(0)


@pytest.mark.parametrize(
    ("apart", "labels", "expected"),
    [(False, of_two_kinds, "yes"), (True, of_two_kinds, "no"), (False, of_mixed_samples, "no")],
)
def test_one_prediction_for_two_kinds_of_targets_is_told(
    apart: bool, labels: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]], expected: str
) -> None:
    assert answer(lambda: headed(apart, labels), "one for two") == expected


def test_one_prediction_that_several_targets_are_for_is_not() -> None:
    """As of annotators who do not agree: it is one tensor, whatever is computed of it twice."""
    torch.manual_seed(0)
    net = nn.Linear(6, 4)
    optimizer = torch.optim.Adam(net.parameters())

    def train() -> None:
        for _ in range(4):
            x = torch.randn(ROWS, 6)
            scores, labels = net(x), x[:, :4].argmax(1)
            others = labels.where(torch.rand(ROWS) > 0.3, torch.randint(0, 4, (ROWS,)))
            loss = F.nll_loss(F.log_softmax(scores, 1), labels) + F.nll_loss(F.log_softmax(scores, 1), others)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    assert answer(train, "one for two") == "no"


class Recurrent(nn.GRU):
    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        found: torch.Tensor = super().forward(x)[0]
        return found


@pytest.mark.parametrize(
    ("net", "turns", "expected"),
    [
        (Recurrent(6, 5, batch_first=True), False, "yes"),
        (Recurrent(6, 5, batch_first=True), True, "no"),
        (nn.Linear(6, 5), False, "no"),  # reads each place by itself, and nothing says which of both dims is time
    ],
)
def test_a_ctc_loss_that_takes_samples_for_steps_of_time_is_told(net: nn.Module, turns: bool, expected: str) -> None:
    torch.manual_seed(0)
    optimizer = torch.optim.Adam(net.parameters())

    def train() -> None:
        for _ in range(4):
            likely = F.log_softmax(net(torch.randn(12, 12, 6)), 2)
            lengths, targets = torch.full((12,), 12), torch.randint(1, 5, (12, 3))
            optimizer.zero_grad()
            F.ctc_loss(likely.transpose(0, 1) if turns else likely, targets, lengths, torch.full((12,), 3)).backward()
            optimizer.step()

    assert answer(train, "batch before time") == expected
