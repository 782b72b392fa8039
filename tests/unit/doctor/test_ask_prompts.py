"""Language models that see the next token, with targets of the end of a row alone, or with the time first."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from test_doctor_ask import answer, nothing_was_compiled

__all__ = ["nothing_was_compiled"]

ROWS, PROMPT, LENGTH, VOCABULARY, WIDTH = 12, 7, 14, 9, 8
Mask = Callable[[int], torch.Tensor | None]


class Model(nn.Module):
    """Attention under a mask, or an LSTM."""

    def __init__(self, mask: Mask | None, *, batch_first: bool = True, both: bool = False) -> None:
        super().__init__()
        self.mask, self.dim = mask, int(batch_first)
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.places = nn.Parameter(torch.randn(LENGTH, WIDTH))
        self.layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.0, batch_first=batch_first)
        self.lstm = nn.LSTM(WIDTH, WIDTH, batch_first=batch_first, bidirectional=both)
        self.out = nn.Linear((1 + both) * WIDTH, VOCABULARY)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        places = self.places[: ids.shape[self.dim]]
        x = self.embedding(ids) + (places if self.dim else places[:, None])
        made: torch.Tensor = self.out(self.lstm(x)[0] if self.mask is None else self.layer(x, self.mask(len(places))))
        return made


def none(length: int) -> None:
    return None


def causal(length: int) -> torch.Tensor:
    return torch.ones(length, length).triu(1).bool()


def prefix(length: int) -> torch.Tensor:
    """A prompt is seen whole."""
    mask = causal(length)
    mask[:, :PROMPT] = False
    return mask


def train(model: nn.Module, *, time_first: bool = False, answers: bool = False) -> None:
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(4):
        ids = torch.randint(0, VOCABULARY, (ROWS, LENGTH + 1))
        if time_first:
            scores, y = model(ids[:, :-1].t()), ids[:, 1:].t()
        else:
            scores, y = model(ids[:, :-1]), ids[:, 1:]
        if answers:
            scores, y = scores[:, PROMPT - 1 :], y[:, PROMPT - 1 :]
        optimizer.zero_grad()
        F.cross_entropy(scores.reshape(-1, VOCABULARY), y.reshape(-1)).backward()
        optimizer.step()


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda: Model(none), "yes"), (lambda: Model(None, both=True), "yes"), (lambda: Model(causal), "no"),
        (lambda: Model(prefix), "no"), (lambda: Model(None), "no"),
    ],
    ids=["no mask", "both directions", "causal", "a prompt is seen whole", "lstm"],
)  # fmt: skip
def test_a_loss_of_the_answers_alone(make: Callable[[], nn.Module], expected: str) -> None:
    assert answer(lambda: train(make(), answers=True), "time") == expected


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda: Model(none, batch_first=False), "yes"), (lambda: Model(None, both=True, batch_first=False), "yes"),
        (lambda: Model(causal, batch_first=False), "no"), (lambda: Model(None, batch_first=False), "no"),
    ],
    ids=["no mask", "both directions", "causal", "lstm"],
)  # fmt: skip
def test_time_that_comes_first(make: Callable[[], nn.Module], expected: str) -> None:
    assert answer(lambda: train(make(), time_first=True), "time") == expected
