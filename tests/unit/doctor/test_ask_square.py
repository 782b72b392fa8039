"""Batches with as many words as texts, and other batches whose axes have other roles than a layer takes them for."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from test_doctor_ask import answer, nothing_was_compiled

__all__ = ["nothing_was_compiled"]


class Square(nn.Module):
    """Classes of texts by the last state of a layer that takes the time first, with a first state of one size."""

    def __init__(self, turned: bool) -> None:
        super().__init__()
        self.words, self.rnn, self.head, self.turned = nn.Embedding(9, 8), nn.LSTM(8, 8), nn.Linear(8, 3), turned

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.words(words)
        state = torch.zeros(1, 16, 8)
        made: torch.Tensor = self.head(self.rnn(x if self.turned else x.transpose(0, 1), (state, state))[1][0][-1])
        return made


def reads(net: nn.Module, time_first: bool, learned: bool) -> None:
    """Of as many words as there are texts in a batch."""
    words = torch.randint(0, 9, (64, 16))
    targets = words[:, -1] % 3 if learned else torch.randint(0, 3, (64,))
    loader = DataLoader(TensorDataset(words, targets), 16)
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    for _ in range(3):
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(net(x.t() if time_first else x), y).backward()
            optimizer.step()


@pytest.mark.parametrize(
    ("turned", "time_first", "expected"),
    [(True, False, "yes"), (False, False, "unknown"), (True, True, "unknown")],
)
def test_texts_with_as_many_words_as_rows_are_told_apart_by_the_loader(
    turned: bool, time_first: bool, expected: str
) -> None:
    """A layer with a first state of one size does not run with fewer rows, or gives other numbers of them."""
    found = answer(lambda: reads(Square(turned), time_first, learned=False), "batch")
    assert found == expected or (expected == "unknown" and found == "no")


class Highway(nn.Module):
    """The next numbers of series, by a line through the last ones of each, (batch, places, series)."""

    def __init__(self, places: int, series: int, kind: str) -> None:
        super().__init__()
        self.line, self.rest, self.kind = nn.Linear(places, 1), nn.Linear(places * series, series), kind

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, places, _ = x.shape
        if self.kind == "right":
            x = x.permute(0, 2, 1)
        found: torch.Tensor = self.line(x.contiguous().view(-1, places)).view(rows, -1)
        rest: torch.Tensor = self.rest(x.flatten(1))
        return found + rest


def forecast(net: nn.Module, places: int, series: int, classes: int = 0) -> None:
    optimizer = torch.optim.Adam(net.parameters())
    for _ in range(4):
        x, y = torch.randn(16, places, series), torch.randn(16, series)
        optimizer.zero_grad()
        if classes:
            F.cross_entropy(net(x), torch.randint(classes, (16,))).backward()
        else:
            F.mse_loss(net(x), y).backward()
        optimizer.step()


@pytest.mark.parametrize(("places", "series"), [(24, 6), (10, 7), (6, 24)])
@pytest.mark.parametrize(("kind", "expected"), [("torn", "yes"), ("right", "no")])
def test_series_that_are_read_across_are_told(kind: str, places: int, series: int, expected: str) -> None:
    net = Highway(places, series, kind)
    assert answer(lambda: forecast(net, places, series), "axes") == expected


def test_patches_of_inputs_are_no_series() -> None:
    """Three places at a time, of which a class is told."""
    net = nn.Sequential(nn.Flatten(), nn.Unflatten(1, (6, 24)), nn.Linear(24, 1), nn.Flatten())
    assert answer(lambda: forecast(net, 24, 6, classes=6), "axes") == "no"


class Drawn(nn.Module):
    """A small autoencoder with a drawn code."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.encoder, self.decoder, self.kind = nn.Linear(6, 8), nn.Linear(4, 6), kind

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        mean, log_var = self.encoder(x).chunk(2, 1)
        std, noise = (log_var / 2).exp(), torch.randn(len(x), 4)
        if self.kind == "mean":
            code = mean.detach() + std * noise
        elif self.kind == "data":
            code = noise * std + mean.data
        elif self.kind == "deviation":
            code = mean + (log_var.detach() / 2).exp() * noise
        elif self.kind == "distribution":
            code = torch.distributions.Normal(mean.detach(), std).rsample()
        elif self.kind == "noise of the data":  # which no loss trains
            code = mean + 0.1 * mean.std().detach() * noise
        elif self.kind == "straight through":
            code = mean + std * noise
            code = code + (code.round() - code).detach()
        else:
            code = mean + std * noise
        return self.decoder(code), mean, log_var


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("mean", "yes"),
        ("data", "yes"),
        ("deviation", "yes"),
        ("distribution", "yes"),
        ("noise of the data", "no"),
        ("straight through", "no"),
        ("right", "no"),
    ],
)
def test_a_mean_that_only_a_penalty_trains_is_told(kind: str, expected: str) -> None:
    def train() -> None:
        net = Drawn(kind)
        optimizer = torch.optim.Adam(net.parameters())
        for _ in range(4):
            x = torch.randn(16, 6)
            made, mean, log_var = net(x)
            optimizer.zero_grad()
            (F.mse_loss(made, x) - (1 + log_var - mean**2 - log_var.exp()).mean() / 2).backward()
            optimizer.step()

    assert answer(train, "detached draw") == expected


def test_a_mean_that_is_known_and_a_policy_are_not() -> None:
    """Noise around what another net predicts, which has a loss of its own elsewhere, with a deviation of data."""

    def train() -> None:
        first, second = nn.Linear(6, 6), nn.Linear(6, 6)
        optimizer = torch.optim.Adam(itertools.chain(first.parameters(), second.parameters()))
        for _ in range(4):
            x = torch.randn(16, 6)
            made = first(x)
            noised = made.detach() + 0.1 * torch.randn_like(made)
            optimizer.zero_grad()
            (F.mse_loss(made, x) + F.mse_loss(second(noised), x)).backward()
            optimizer.step()

    assert answer(train, "detached draw") == "no"


@pytest.mark.parametrize("kind", ["of its own size", "with a loss of its own"])
def test_noise_of_the_size_of_a_value_and_a_mean_with_a_loss_of_its_own_are_not(kind: str) -> None:
    def train() -> None:
        mean, spread, last = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)
        optimizer = torch.optim.Adam(itertools.chain(*(one.parameters() for one in (mean, spread, last))))
        for _ in range(4):
            x = torch.randn(16, 6)
            made = mean(x)
            optimizer.zero_grad()
            if kind == "of its own size":
                loss = F.mse_loss(last(made + made.detach() * 0.1 * torch.randn_like(made)), x)
            else:
                drawn = made.detach() + spread(x).exp() * torch.randn_like(made)
                loss = F.mse_loss(made, x) + (drawn - x).abs().mean()
            loss.backward()
            optimizer.step()

    assert answer(train, "detached draw") == "no"
