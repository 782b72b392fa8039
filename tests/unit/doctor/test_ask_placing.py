"""Targets that a net is given at their place, and tokens without an order: each fault beside its healthy twin."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from test_doctor_ask import answer, nothing_was_compiled

__all__ = ["nothing_was_compiled"]

Net = Callable[[torch.Tensor], torch.Tensor]
ROWS, PLACES, WORDS = 6, 9, 20


class Going(nn.Module):
    """Goes along a sequence of numbers, with what was before."""

    def __init__(self, noise: float = 0.0) -> None:
        super().__init__()
        self.cell, self.head, self.noise = nn.GRUCell(1, 8), nn.Linear(8, 1), noise

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state, out = torch.zeros(len(x), 8), []
        for one in x.split(1, 1):
            state = self.cell(one, state)
            out.append(self.head(state + self.noise * torch.randn_like(state) if self.noise else state))
        return torch.cat(out, 1)


def forecasts(net: nn.Module, ahead: int, places: int = PLACES) -> None:
    optimizer = torch.optim.Adam(net.parameters())
    for _ in range(4):
        data = torch.randn(ROWS, places + 1)
        x, y = data[:, :-1].clone(), data[:, ahead : places + ahead].clone()
        optimizer.zero_grad()
        F.mse_loss(net(x), y).backward()
        optimizer.step()


@pytest.mark.parametrize(
    ("net", "ahead", "expected"),
    [
        (Going, 0, "yes"),
        (Going, 1, "no"),
        (lambda: Going(noise=0.5), 0, "no"),  # a code for each place
        (lambda: nn.Sequential(nn.Linear(PLACES, 2), nn.Linear(2, PLACES)), 0, "no"),  # a code for all of it
        (lambda: nn.Sequential(nn.Unflatten(1, (-1, 1)), nn.Linear(1, 1), nn.Flatten()), 0, "no"),  # each by itself
    ],
)
def test_a_forecast_of_what_is_given_is_told(net: Callable[[], nn.Module], ahead: int, expected: str) -> None:
    assert answer(lambda: forecasts(net(), ahead), "given at its place") == expected


class Reading(nn.Module):
    """Reads a series, in one direction or from both ends."""

    def __init__(self, *, both: bool, normal: bool = False) -> None:
        super().__init__()
        self.rnn = nn.GRU(2, 8, batch_first=True, bidirectional=both)
        self.head, self.norm = nn.Linear(16 if both else 8, 1), nn.BatchNorm1d(8) if normal else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = self.rnn(x)[0]
        made = made if self.norm is None else self.norm(made.transpose(1, 2)).transpose(1, 2)
        found: torch.Tensor = self.head(made)
        return found


def series(net: nn.Module, ahead: int = 1) -> None:
    optimizer = torch.optim.Adam(net.parameters())
    for _ in range(4):
        data = torch.randn(ROWS, PLACES + 3, 2)
        x, y = data[:, :PLACES].clone(), data[:, ahead : PLACES + ahead, 1:].clone()
        optimizer.zero_grad()
        F.mse_loss(net(x), y).backward()
        optimizer.step()


@pytest.mark.parametrize(
    ("net", "ahead", "expected"),
    [
        (lambda: Reading(both=True), 1, "yes"),
        (lambda: Reading(both=False), 1, "no"),
        (lambda: Reading(both=True), 2, "no"),  # what is asked has not been given at the next place
        (lambda: Reading(both=False, normal=True), 1, "unknown"),  # statistics of the batch are of all places
    ],
)
def test_a_forecast_that_sees_the_next_value_is_told(net: Callable[[], nn.Module], ahead: int, expected: str) -> None:
    assert answer(lambda: series(net(), ahead), "given ahead") == expected


def test_a_field_that_moves_round_by_one_place_is_no_series() -> None:
    def train() -> None:
        net = nn.Conv1d(1, 1, 5, padding=2)
        optimizer = torch.optim.Adam(net.parameters())
        for _ in range(4):
            field = torch.randn(ROWS, 1, PLACES)
            x, y = field.transpose(1, 2).clone(), field.roll(-1, 2).transpose(1, 2).clone()
            optimizer.zero_grad()
            F.mse_loss(net(x.transpose(1, 2)).transpose(1, 2), y).backward()
            optimizer.step()

    assert answer(train, "given ahead") != "yes"


class Words(nn.Module):
    """Says the next word of a sentence, (time, batch), by an own loop."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.cell, self.head = nn.Embedding(WORDS, 8), nn.GRUCell(8, 8), nn.Linear(8, WORDS)

    def forward(self, sentence: torch.Tensor) -> torch.Tensor:
        state, out = torch.zeros(sentence.shape[1], 8), []
        for at in range(len(sentence) - 1):
            state = self.cell(self.table(sentence[at]), state)
            out.append(self.head(state))
        return torch.stack(out)


@pytest.mark.parametrize(("ahead", "expected"), [(0, "yes"), (1, "no")])
def test_words_that_are_to_be_repeated_are_told(ahead: int, expected: str) -> None:
    def train() -> None:
        net = Words()
        optimizer = torch.optim.Adam(net.parameters())
        for _ in range(4):
            sentence = torch.randint(WORDS, (PLACES, ROWS))
            optimizer.zero_grad()
            made = net(sentence).reshape(-1, WORDS)
            F.cross_entropy(made, sentence[ahead : PLACES - 1 + ahead].reshape(-1)).backward()
            optimizer.step()

    assert answer(train, "given at its place") == expected


class Attending(nn.Module):
    """Classifies sentences by attention among their words."""

    def __init__(self, places: bool) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(WORDS, 8), nn.Linear(8, 2)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.places = nn.Embedding(PLACES, 8) if places else None

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.words(tokens)
        if self.places is not None:
            x = x + self.places(torch.arange(PLACES))
        out: torch.Tensor = self.head(self.attention(x, x, x)[0].mean(1))
        return out


class Bag(nn.Module):
    """Classifies sentences by the mean of their words."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(WORDS, 8), nn.Linear(8, 2)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.words(tokens).mean(1))
        return out


def repeated() -> torch.Tensor:
    return torch.randint(1, 6, (ROWS, PLACES))


def of_sets() -> torch.Tensor:
    return torch.stack([torch.randperm(WORDS)[:PLACES] for _ in range(ROWS)])


@pytest.mark.parametrize(
    ("net", "draw", "expected"),
    [
        (lambda: Attending(places=False), repeated, "yes"),
        (lambda: Attending(places=True), repeated, "no"),
        (lambda: Attending(places=False), of_sets, "no"),
        (Bag, repeated, "no"),
    ],
)
def test_attention_that_does_not_see_the_order_is_told(
    net: Callable[[], nn.Module], draw: Callable[[], torch.Tensor], expected: str
) -> None:
    def train() -> None:
        model = net()
        optimizer = torch.optim.Adam(model.parameters())
        for _ in range(4):
            optimizer.zero_grad()
            F.cross_entropy(model(draw()), torch.arange(ROWS) % 2).backward()
            optimizer.step()

    assert answer(train, "order ignored") == expected


class Driven(nn.Module):
    """Follows other columns of the sequence than that of its targets, or all of them."""

    def __init__(self, columns: slice) -> None:
        super().__init__()
        self.columns, self.head = columns, nn.Linear(8, 1)
        self.net = nn.GRU(len(range(3)[columns]), 8, batch_first=True)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.net(batch[..., self.columns])[0]).squeeze(-1)
        return F.mse_loss(out, batch[..., 0])


def of_its_own_loss(net: nn.Module, width: int) -> None:
    optimizer = torch.optim.Adam(net.parameters())
    for _ in range(4):
        optimizer.zero_grad()
        net(torch.randn(ROWS, PLACES, width)).backward()
        optimizer.step()


@pytest.mark.parametrize(("columns", "expected"), [(slice(1, 3), "no"), (slice(0, 3), "yes")])
def test_a_target_that_is_a_column_beside_the_inputs_is_not_given(columns: slice, expected: str) -> None:
    assert answer(lambda: of_its_own_loss(Driven(columns), 3), "given at its place") == expected


class Codec(nn.Module):
    """Goes along a sequence, and makes each place again from fewer numbers, or from more."""

    def __init__(self, code: int, *, copies: bool) -> None:
        super().__init__()
        self.encoder, self.code = nn.GRU(4, 8, batch_first=True), nn.Linear(8, code)
        self.decoder, self.head, self.copies = nn.GRU(code, 8, batch_first=True), nn.Linear(8, 4), copies

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = self.head(self.decoder(self.code(self.encoder(x)[0]))[0])
        return F.mse_loss(made, x.clone() if self.copies else x)


@pytest.mark.parametrize("copies", [False, True])
def test_an_auto_encoder_that_goes_along_a_sequence_is_given_what_it_makes_again(copies: bool) -> None:
    for code in (2, 8) if not copies else (2,):
        assert answer(partial(of_its_own_loss, Codec(code, copies=copies), 4), "given at its place") == "no"


class Distances(nn.Module):
    """Attention that knows how far places are apart, and not which one is first."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(WORDS, 8), nn.Linear(8, 2)
        self.far = (torch.arange(PLACES)[:, None] - torch.arange(PLACES)).abs()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.words(tokens)
        out: torch.Tensor = self.head(((x @ x.transpose(1, 2) - self.far).softmax(-1) @ x).tanh().mean(1))
        return out


def test_attention_that_knows_distances_sees_the_order() -> None:
    def train() -> None:
        model = Distances()
        optimizer = torch.optim.Adam(model.parameters())
        for _ in range(4):
            optimizer.zero_grad()
            F.cross_entropy(model(repeated()), torch.arange(ROWS) % 2).backward()
            optimizer.step()

    assert answer(train, "order ignored") == "no"


class Told(nn.Module):
    """Says a word for each place of a text, from its own class, (batch, time) or (time, batch) as asked."""

    def __init__(self, *, time_first: bool, norm: bool = False) -> None:
        super().__init__()
        self.table, self.rnn, self.head = nn.Embedding(WORDS, 8), nn.GRU(8, 8), nn.Linear(8, WORDS)
        self.time_first, self.norm = time_first, nn.BatchNorm1d(8) if norm else nn.Identity()

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        made = self.rnn(self.table(words.t()))[0]
        scores: torch.Tensor = self.head(self.norm(made.transpose(1, 2)).transpose(1, 2))
        return scores if self.time_first else scores.transpose(0, 1)


def translated(net: nn.Module, turned: bool, sizes: tuple[int, int] = (ROWS, PLACES), numbers: int = 0) -> None:
    optimizer = torch.optim.Adam(net.parameters())
    for _ in range(4):
        words, others = (torch.randint(WORDS, sizes) for _ in range(2))
        wanted = torch.randn(*sizes, WORDS)
        optimizer.zero_grad()
        scores = net(words)
        if numbers:
            wanted = wanted.transpose(0, 1) if turned else wanted
            F.mse_loss(scores.reshape(-1, WORDS), wanted.reshape(-1, WORDS)).backward()
        else:
            others = others.t() if turned else others
            F.cross_entropy(scores.reshape(-1, WORDS), others.reshape(-1)).backward()
        optimizer.step()


@pytest.mark.parametrize("numbers", [0, 1])
@pytest.mark.parametrize("time_first", [False, True])
@pytest.mark.parametrize("turned", [False, True])
def test_scores_and_targets_that_are_flattened_in_two_orders_are_told(
    time_first: bool, turned: bool, numbers: int
) -> None:
    """Scores that are time first belong to targets that are."""
    expected = "yes" if time_first != turned else "no"
    net = Told(time_first=time_first)
    assert answer(lambda: translated(net, turned, numbers=numbers), "flattened apart") == expected


def test_where_samples_mix_or_the_axes_are_alike_no_order_is_told() -> None:
    for net, sizes in ((Told(time_first=True, norm=True), (ROWS, PLACES)), (Told(time_first=True), (ROWS, ROWS))):
        assert answer(partial(translated, net, turned=False, sizes=sizes), "flattened apart") == "no"


def test_a_target_in_another_order_is_not_called_one_that_is_given() -> None:
    """A decoder that is given the words of each place and is to say the next ones, with its scores time first."""

    def train() -> None:
        net = Told(time_first=True)
        optimizer = torch.optim.Adam(net.parameters())
        for _ in range(4):
            words = torch.randint(WORDS, (ROWS, PLACES))
            optimizer.zero_grad()
            F.cross_entropy(net(words)[:-1].reshape(-1, WORDS), words[:, 1:].reshape(-1)).backward()
            optimizer.step()

    assert answer(train, "given at its place") == "no"
    assert answer(train, "flattened apart") == "yes"
