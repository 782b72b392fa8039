"""An end of text that is taken for padding is told, also where all rows have one width and the model names its end."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from anybatch.records.runs import Run
from number_runs import fires, silent
from test_rules_deceiving import Batches, Pair, ignoring, nothing_was_compiled, of, train

__all__ = ["nothing_was_compiled"]


class Speaker(nn.Module):
    """A model of the next token."""

    def __init__(self, tokens: int = 12, *, whole: bool = False) -> None:
        super().__init__()
        self.left_out = 0 if whole else 1  # of the places, the last one
        self.embed, self.rnn, self.head = nn.Embedding(tokens, 8), nn.GRU(8, 8, batch_first=True), nn.Linear(8, tokens)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.rnn(self.embed(x))[0][:, : x.shape[1] - self.left_out]).transpose(1, 2)  # type: ignore[no-any-return]


def texts(
    end: int | None, padding: int, width: int | None = None, *, counted: bool = False, whole: bool = False
) -> Batches:
    """Rows of 2 to 5 words, which an end may follow, filled up to the longest one, or to a width."""

    def batch(step: int) -> Pair:
        numbers = torch.Generator().manual_seed(step)
        rows = [
            torch.randint(2, 12, (int(n),), generator=numbers) for n in torch.randint(2, 6, (32,), generator=numbers)
        ]
        rows = [row if end is None else torch.cat([row, torch.tensor([end])]) for row in rows]
        x = torch.full((32, width or max(map(len, rows))), padding)
        for place, row in zip(x, rows, strict=True):
            place[: len(row)] = row
        y = F.pad(x[:, 1:], (0, int(whole)), value=-100)  # as transformers shifts them, where it is whole
        if not counted:
            y[y == padding] = -100
        return x, y

    return batch


@pytest.mark.parametrize("whole", [False, True])
def test_class_uncounted_fires_where_the_end_is_padding(whole: bool) -> None:
    def speaks(end: int) -> Run:
        return of(lambda: train(Speaker(whole=whole), texts(1, end, whole=whole), 200, ignoring()), ask=True)

    silent(speaks(0), "CLASS_UNCOUNTED")
    assert "where to stop" in fires(speaks(1), "CLASS_UNCOUNTED", "warning").message


@pytest.mark.parametrize("batches", [
    texts(1, 0), texts(None, 0), texts(1, 0, 8), texts(None, 0, 9), texts(1, 1, counted=True),
], ids=["an end of its own", "no end", "a width", "no end and a width", "counted"])  # fmt: skip
def test_class_uncounted_is_quiet_about_ends(batches: Batches) -> None:
    silent(of(lambda: train(Speaker(), batches, 200, ignoring()), ask=True), "CLASS_UNCOUNTED")


@pytest.mark.parametrize(("end", "told"), [(1, True), ([2, 1], True), (2, False), (None, False)])
def test_class_uncounted_fires_on_rows_of_one_width_where_the_model_knows_its_end(end: Any, told: bool) -> None:
    def speak() -> None:
        net = Speaker()
        net.config = SimpleNamespace(eos_token_id=end)  # type: ignore[assignment]
        train(net, texts(1, 1, 9), 200, ignoring())

    run = of(speak, ask=True)
    if told:
        assert "where to stop" in fires(run, "CLASS_UNCOUNTED", "warning").message
    else:
        silent(run, "CLASS_UNCOUNTED")
