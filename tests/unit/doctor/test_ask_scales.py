"""Scores that are too flat for a softmax, and quantiles whose error is turned round: yes, and no beside them."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from test_doctor_ask import answer, nothing_was_compiled

__all__ = ["nothing_was_compiled"]
Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def stepped(net: nn.Module, loss: Callable[[], torch.Tensor]) -> None:
    optimizer = torch.optim.Adam(net.parameters())
    for _ in range(12):
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()


def contrast(times: float, *, masked: bool = False) -> None:
    net = nn.Linear(8, 6)

    def loss() -> torch.Tensor:
        x = torch.randn(32, 8)
        one, other = (F.normalize(net(x + 0.1 * torch.randn(32, 8)), dim=1) for _ in range(2))
        scores = one @ other.t() * times
        if not masked:
            return F.cross_entropy(scores, torch.arange(32))
        own = (one @ one.t() * times).fill_diagonal_(-1e9)
        return F.cross_entropy(own, torch.arange(32).roll(1))

    stepped(net, loss)


@pytest.mark.parametrize("masked", [False, True])
def test_cosines_times_a_temperature_are_told(masked: bool) -> None:
    assert answer(lambda: contrast(0.1, masked=masked), "flat scores") == "yes"


@pytest.mark.parametrize("times", [1.0, 2.0, 14.0])
def test_cosines_divided_by_one_are_not(times: float) -> None:
    assert answer(lambda: contrast(times), "flat scores") == "no"


def test_a_scale_that_is_learned_and_scores_of_any_size_are_not() -> None:
    net = nn.Linear(8, 6)
    net.scale = scale = nn.Parameter(torch.tensor(0.1))
    stepped(net, lambda: F.cross_entropy(
        F.normalize(net(torch.randn(32, 8)), dim=1) @ F.normalize(torch.randn(6, 32), dim=0) * scale,
        torch.arange(32),
    ))  # fmt: skip
    plain, y = nn.Linear(8, 6), torch.arange(32) % 6
    small = lambda: F.cross_entropy(0.01 * plain(torch.randn(32, 8)), y)  # noqa: E731
    learned = lambda: F.cross_entropy(scale * F.normalize(net(torch.randn(32, 8))), y)  # noqa: E731
    assert answer(lambda: stepped(plain, small), "flat scores") == "no"
    assert answer(lambda: stepped(net, learned), "flat scores") == "no"


def focal(weight: Callable[[torch.Tensor], torch.Tensor], sign: int = 1) -> None:
    net = nn.Linear(6, 1)

    def loss() -> torch.Tensor:
        x = torch.randn(64, 6)
        each = F.binary_cross_entropy_with_logits(net(x)[:, 0], (x[:, 0] > 0).float(), reduction="none")
        return sign * (weight((-each).exp()) * each).mean()

    stepped(net, loss)


@pytest.mark.parametrize(
    ("weight", "sign", "expected"),
    [
        (lambda p: p**4, 1, "yes"),
        (lambda p: (1 - p) ** 4, 1, "no"),
        (torch.ones_like, 1, "no"),
        (lambda p: p.detach(), 1, "no"),
        (torch.ones_like, -1, "no"),  # which is of another kind: right ones are pushed away, too
    ],
)
def test_what_is_clearly_wrong_and_pushed_farther_is_told(
    weight: Callable[[torch.Tensor], torch.Tensor], sign: int, expected: str
) -> None:
    assert answer(lambda: focal(weight, sign), "worse preferred") == expected


def of_classes(weight: Callable[[torch.Tensor], torch.Tensor], **options: float) -> None:
    net = nn.Linear(6, 5)

    def loss() -> torch.Tensor:
        x = torch.randn(64, 6)
        each = F.cross_entropy(net(x), x[:, :5].argmax(1), reduction="none", **options)  # type: ignore[arg-type]
        return (weight(each) * each).mean()

    stepped(net, loss)


@pytest.mark.parametrize(
    ("weight", "options", "expected"),
    [
        (lambda each: (1 - each) ** 2, {}, "yes"),
        (lambda each: (1 - (-each).exp()) ** 2, {}, "no"),
        (lambda each: (1 + each) ** 2, {}, "no"),
        (lambda each: (each < 0.7).float(), {}, "no"),  # rows of a small loss alone count, as for noisy labels
        (lambda each: torch.linspace(-1, 1.2, 64), {}, "no"),  # how good an action was
        (torch.ones_like, {"label_smoothing": 0.1}, "no"),
    ],
)
def test_what_is_halfway_right_and_pushed_back_is_told(
    weight: Callable[[torch.Tensor], torch.Tensor], options: dict[str, float], expected: str
) -> None:
    assert answer(lambda: of_classes(weight, **options), "halfway preferred") == expected


def test_marks_that_are_halfway_right_and_pushed_back_are_told() -> None:
    net = nn.Linear(6, 1)

    def loss() -> torch.Tensor:
        x = torch.randn(64, 6)
        each = F.binary_cross_entropy_with_logits(net(x)[:, 0], (x[:, 0] > 0).float(), reduction="none")
        return ((1 - each) ** 2 * each).mean()

    assert answer(lambda: stepped(net, loss), "halfway preferred") == "yes"
