"""Columns that tell the target in training alone, and tokens that are numbered anew in evaluation: yes and no."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from anybatch.doctor.ask import batches
from anybatch.records.runs import Run
from test_doctor_ask import answer, nothing_was_compiled

__all__ = ["nothing_was_compiled"]
Data = Callable[[bool], tuple[torch.Tensor, torch.Tensor]]


def evaluated(net: nn.Module, data: Data, loss: Callable[..., torch.Tensor]) -> None:
    optimizer = torch.optim.Adam(net.parameters())
    for _ in range(3):
        net.train()
        for _ in range(10):
            x, y = data(True)
            optimizer.zero_grad()
            loss(net(x), y).backward()
            optimizer.step()
        net.eval()
        with torch.no_grad():
            for _ in range(10):
                x, y = data(False)
                loss(net(x), y)


def table(of_training: float, of_evaluation: float, classes: int) -> Data:
    def data(training: bool) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.randn(64, 6)
        y = torch.bucketize(x[:, 0] + 0.5 * torch.randn(64), torch.linspace(-0.5, 0.5, classes - 1))
        x[:, 4] += (of_training if training else of_evaluation) * y
        return x, y

    return data


@pytest.mark.parametrize("classes", [2, 3])
def test_a_column_that_tells_the_target_in_training_alone_is_told(classes: int) -> None:
    loss = F.cross_entropy
    assert answer(lambda: evaluated(nn.Linear(6, classes), table(2.5, 0.0, classes), loss), "columns") == "yes"


def test_a_column_that_tells_targets_that_are_numbers_is_told() -> None:
    def data(training: bool) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.randn(64, 6)
        return x, x[:, :1] if training else x[:, 1:2]

    assert answer(lambda: evaluated(nn.Linear(6, 1), data, F.mse_loss), "columns") == "yes"


@pytest.mark.parametrize(("is_torn", "told"), [(True, "yes"), (False, "")])
def test_targets_that_no_column_tells_in_evaluation_are_told_and_not_a_column(is_torn: bool, told: str) -> None:
    def data(training: bool) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.randn(64, 6)
        y = x @ torch.tensor([[2.0], [1.0], [-1.0], [1.0], [0.0], [0.0]])
        return x, y if training or not is_torn else y.flip(0)

    def run() -> None:
        evaluated(nn.Linear(6, 1), data, F.mse_loss)

    assert (answer(run, "evaluated apart"), answer(run, "columns")) == (told, "")


@pytest.mark.parametrize("both", [(2.5, 2.5), (0.0, 0.0), (2.5, 1.5), (0.0, 2.5)])
def test_columns_that_tell_it_in_evaluation_too_are_not(both: tuple[float, float]) -> None:
    assert answer(lambda: evaluated(nn.Linear(6, 2), table(*both, 2), F.cross_entropy), "columns") == ""


def texts(numbers: torch.Tensor, share: torch.Tensor, other: torch.Tensor | None = None) -> Data:
    def data(training: bool) -> tuple[torch.Tensor, torch.Tensor]:
        words = torch.multinomial(share if training or other is None else other, 64 * 12, replacement=True)
        words = words.view(64, 12)
        return words if training else numbers[words], (words < 5).sum(1) % 2

    return data


class Bag(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(60, 8), nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.head(self.table(x).mean(1))
        return scores


USUAL = 1 / torch.arange(2.0, 62.0)


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (texts(torch.randperm(60), USUAL), "yes"),
        (texts(torch.arange(60), USUAL), ""),
        (texts(torch.arange(60), USUAL, torch.ones(60)), ""),  # all of a catalogue, of which some are bought often
        (texts(torch.arange(60), torch.ones(60)), ""),
        (texts(torch.arange(60), USUAL * (torch.arange(60) < 30), USUAL.flip(0) * (torch.arange(60) >= 30)), ""),
    ],
)
def test_tokens_that_are_numbered_anew_are_told(data: Data, expected: str) -> None:
    assert answer(lambda: evaluated(Bag(), data, F.cross_entropy), "tokens") == expected


@pytest.mark.parametrize(("numbers", "expected"), [(torch.arange(120), 0), (torch.randperm(120), 1)])
def test_words_as_frequent_as_each_other_differ_by_chance(numbers: torch.Tensor, expected: int) -> None:
    torch.manual_seed(0)
    share = torch.ones(120) if not expected else 1 / torch.arange(2.0, 122.0)
    first, other = (torch.multinomial(share, count, replacement=True) for count in (2400, 2400))
    counts = {(0, True): first.bincount(minlength=120), (0, False): numbers[other].bincount(minlength=120)}
    counts[0, False][0] += 40  # a few more of one, as by a topic
    kept: Any = SimpleNamespace(tokens=counts)
    assert len(list(batches.about_tokens(kept, Run([])))) == expected


def filled(places: str, number: int) -> Data:
    """Texts in which a number that no training has takes some places of those that are evaluated."""

    def data(training: bool) -> tuple[torch.Tensor, torch.Tensor]:
        words, at = torch.randint(3, 60, (64, 12)), torch.arange(12)
        length = torch.randint(4, 10, (64, 1))
        new = {"between": torch.rand(64, 12) < 0.5, "behind": at >= length, "before": at < length, "nowhere": at < 0}
        return words if training else words.where(~new[places], torch.tensor(number)), (words < 30).sum(1) % 2

    return data


@pytest.mark.parametrize(("places", "expected"), [("between", "yes"), ("behind", ""), ("before", ""), ("nowhere", "")])
def test_a_word_that_evaluated_texts_alone_are_full_of_is_told_and_padding_is_not(places: str, expected: str) -> None:
    assert answer(lambda: evaluated(Bag(), filled(places, 1), F.cross_entropy), "unknown tokens") == expected


def pictures(flipped: str) -> Data:
    every = torch.randn(96, 1, 6, 6)
    points = torch.rand(96, 2)

    def data(training: bool) -> tuple[torch.Tensor, torch.Tensor]:
        rows = torch.randperm(96)[:64]
        x, y = every[rows], points[rows].clone()
        turn = torch.rand(64) < 0.5
        if flipped:
            x = torch.where(turn[:, None, None, None], x.flip(-1), x)
        if flipped == "both":
            y[turn, 0] = 1 - y[turn, 0]
        return x, y[:, :1] if flipped == "a number" else y

    return data


@pytest.mark.parametrize(("flipped", "expected"), [("alone", "yes"), ("both", ""), ("a number", ""), ("", "")])
def test_pictures_that_are_flipped_without_their_points_are_told(flipped: str, expected: str) -> None:
    net = nn.Sequential(nn.Flatten(), nn.Linear(36, 1 if flipped == "a number" else 2))
    assert answer(lambda: evaluated(net, pictures(flipped), F.mse_loss), "mirrored") == expected


def of_pictures(noisy_target: bool, noisy_input: bool = True, evaluated_clean: bool = False) -> Data:
    def data(training: bool) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.randn(64, 6)
        noisy = x + 0.5 * torch.randn(64, 6) if noisy_input else x
        if not training:
            return (x, x) if evaluated_clean else (noisy, x)
        return noisy, noisy if noisy_target else x

    return data


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (of_pictures(noisy_target=True), "yes"),
        (of_pictures(noisy_target=False), ""),
        (of_pictures(noisy_target=True, evaluated_clean=True), ""),  # an autoencoder whose data are augmented
        (of_pictures(noisy_target=False, noisy_input=False, evaluated_clean=True), ""),
    ],
)
def test_targets_that_are_the_input_in_training_alone_are_told(data: Data, expected: str) -> None:
    assert answer(lambda: evaluated(nn.Linear(6, 6), data, F.mse_loss), "copied") == expected


def test_a_model_that_changes_its_input_itself_may_have_it_as_its_target() -> None:
    net = nn.Sequential(nn.Dropout(0.2), nn.Linear(6, 6))
    assert answer(lambda: evaluated(net, of_pictures(noisy_target=True), F.mse_loss), "copied") == ""
