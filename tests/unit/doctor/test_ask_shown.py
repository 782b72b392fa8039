"""A loss that counts what the model is shown, and not what is hidden from it, is told; padding and gaps are not."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from test_doctor_ask import answer, nothing_was_compiled

__all__ = ["nothing_was_compiled"]

ROWS, LENGTH, WORDS, STEPS = 16, 12, 9, 12
HIDDEN, PADDING, IGNORED = WORDS, WORDS + 1, -100

Batch = tuple[torch.Tensor, torch.Tensor]


def tokens() -> torch.Tensor:
    """Rows of a small set of them."""
    rows = torch.randint(0, WORDS, (4 * ROWS, LENGTH), generator=torch.Generator().manual_seed(4))
    return rows[torch.randperm(4 * ROWS)[:ROWS]]


def chosen(share: float = 0.2) -> torch.Tensor:
    return torch.rand(ROWS, LENGTH) < share


def inverted() -> Batch:
    x, hidden = tokens(), chosen()
    return x.masked_fill(hidden, HIDDEN), x.masked_fill(hidden, IGNORED)


def right() -> Batch:
    x, hidden = tokens(), chosen()
    return x.masked_fill(hidden, HIDDEN), x.masked_fill(~hidden, IGNORED)


def replaced() -> Batch:
    """Some of what is chosen is left as it is, or is another word, as BERT has it."""
    x, hidden = tokens(), chosen(0.4)
    given = x.masked_fill(hidden & chosen(0.8), HIDDEN)
    return torch.where(hidden & chosen(0.1), tokens(), given), x.masked_fill(~hidden, IGNORED)


def whole() -> Batch:
    x = tokens()
    return x.masked_fill(chosen(), HIDDEN), x


def padded() -> Batch:
    x = tokens()
    is_behind = torch.arange(LENGTH) >= torch.randint(4, LENGTH + 1, (ROWS, 1))
    return x.masked_fill(is_behind, PADDING), x.masked_fill(is_behind, IGNORED)


def padded_on_the_left() -> Batch:
    x, y = padded()
    return x.flip(1), y.flip(1)


def sentences() -> Batch:
    """Each row has three of them, each with its padding."""
    x, is_behind = tokens(), torch.arange(4) >= torch.randint(1, 5, (ROWS, 3, 1))
    return x.masked_fill(is_behind.flatten(1), PADDING), x.masked_fill(is_behind.flatten(1), IGNORED)


def next_word() -> Batch:
    x, y = padded()
    return x, torch.cat((y[:, 1:], torch.full((ROWS, 1), IGNORED)), 1)


def tags() -> Batch:
    x = tokens()
    return x, (x % 3).masked_fill(chosen(), IGNORED)


def unknown() -> Batch:
    """Words that are in no dictionary are always the same ones, and a net that makes a row again may skip them."""
    x = tokens()
    rare = (7 * x + x.roll(1, 1) + 3 * x.roll(2, 1)) % 6 == 0
    return x.masked_fill(rare, HIDDEN), x.masked_fill(rare, IGNORED)


def trained(make: Callable[[], Batch]) -> None:
    net = nn.Sequential(nn.Embedding(WORDS + 2, 8), nn.Linear(8, WORDS + 2))
    optimizer = torch.optim.Adam(net.parameters())
    for _ in range(STEPS):
        x, y = make()
        optimizer.zero_grad()
        F.cross_entropy(net(x).flatten(0, 1), y.flatten(), ignore_index=IGNORED).backward()
        optimizer.step()


@pytest.mark.parametrize(
    "make", [right, replaced, whole, padded, padded_on_the_left, sentences, next_word, tags, unknown]
)
def test_what_is_hidden_counts_or_is_padding(make: Callable[[], Batch]) -> None:
    assert answer(lambda: trained(make), "shown") == "no"


def test_a_loss_of_what_is_shown_alone_is_told() -> None:
    assert answer(lambda: trained(inverted), "shown") == "yes"


def given_as_it_is() -> Batch:
    x, hidden = tokens(), chosen(0.4)
    return x, x.masked_fill(~hidden, IGNORED)


def padded_copies() -> Batch:
    x, y = padded()
    return x.masked_fill(x == PADDING, 0), y


@pytest.mark.parametrize(
    "make", [right, replaced, whole, inverted, padded, padded_copies, sentences, next_word, tags, unknown]
)
def test_what_counts_is_hidden_or_is_all_there_is(make: Callable[[], Batch]) -> None:
    assert answer(lambda: trained(make), "copied places") == "no"


def test_a_loss_of_some_places_that_are_given_as_they_are_is_told() -> None:
    assert answer(lambda: trained(given_as_it_is), "copied places") == "yes"


class Others(nn.Module):
    """Says each word from the others: a place does not attend to itself, or does."""

    def __init__(self, *, hides: bool) -> None:
        super().__init__()
        self.words, self.places, self.head = (
            nn.Embedding(WORDS, 8),
            nn.Parameter(torch.randn(LENGTH, 8)),
            nn.Linear(8, 9),
        )
        self.hidden = torch.eye(LENGTH, dtype=torch.bool) & hides

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights = (self.places @ self.places.T).masked_fill(self.hidden, -1e9).softmax(-1)
        out: torch.Tensor = self.head(weights @ self.words(x))
        return out


@pytest.mark.parametrize(("hides", "expected"), [(True, "no"), (False, "yes")])
def test_a_place_that_does_not_attend_to_itself_copies_nothing(hides: bool, expected: str) -> None:
    def train() -> None:
        net = Others(hides=hides)
        optimizer = torch.optim.Adam(net.parameters())
        for _ in range(STEPS):
            x, y = given_as_it_is()
            optimizer.zero_grad()
            F.cross_entropy(net(x).transpose(1, 2), y, ignore_index=IGNORED).backward()
            optimizer.step()

    assert answer(train, "copied places") == expected


class Filling(nn.Module):
    """Draws what is hidden from it, or is given what is missing."""

    def __init__(self, *, draws: bool) -> None:
        super().__init__()
        self.draws, self.net = draws, nn.Linear(10, 10)

    def forward(self, x: torch.Tensor, known: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        known = (torch.rand_like(x) > 0.3).to(x.dtype) if self.draws else known
        return self.net(x * known), known


@pytest.mark.parametrize(("draws", "of", "expected"), [
    (True, "known", "yes"), (True, "hidden", "no"), (True, "all", "no"), (False, "known", "no"),
])  # fmt: skip
def test_gaps_of_the_data_are_not_hidden_from_a_model(draws: bool, of: str, expected: str) -> None:
    def train() -> None:
        net = Filling(draws=draws)
        optimizer = torch.optim.Adam(net.parameters())
        for _ in range(4):
            x = torch.randn(ROWS, 10)
            made, known = net(x, (torch.rand_like(x) > 0.3).to(x.dtype))
            counted = {"known": known, "hidden": 1 - known, "all": torch.ones_like(known)}[of]
            optimizer.zero_grad()
            (((made - x) ** 2 * counted).sum() / counted.sum()).backward()
            optimizer.step()

    assert answer(train, "shown") == expected
