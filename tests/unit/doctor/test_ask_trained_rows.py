"""An evaluation on rows that were trained on is told; one with a new row, or where rows are drawn from few, is not."""

import ast
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from anybatch.doctor.ask.heldout import held_out_names
from test_doctor_ask import answer

ROWS, CALLS, EPOCHS = 64, 4, 3


def run(
    evaluated: Callable[[torch.Tensor], torch.Tensor],
    *,
    noise: float = 0.0,
    drawn: bool = False,
    mode: bool = False,
    calls: int = CALLS,
) -> None:
    """Epochs over a set, each with an evaluation."""
    x_test = torch.randn(2 * ROWS, 6)  # read by nothing
    x = torch.randn(4, 6)[torch.randint(0, 4, (ROWS,))] if drawn else torch.randn(ROWS, 6)
    y, net = torch.randint(0, 3, (ROWS,)), nn.Linear(6, 3)
    optimizer = torch.optim.Adam(net.parameters())
    for _ in range(EPOCHS):
        net.train()
        for rows in torch.randperm(ROWS).split(ROWS // calls):
            optimizer.zero_grad()
            F.cross_entropy(net(x[rows] + noise * torch.randn(1)), y[rows]).backward()
            optimizer.step()
        net.train(mode)
        with torch.no_grad():
            net(evaluated(x))
    assert len(x_test) > 0


@pytest.mark.parametrize("mode", [False, True])
def test_an_evaluation_on_trained_rows_is_told(mode: bool) -> None:
    assert answer(lambda: run(lambda x: x, mode=mode), "trained rows") == "yes"


@pytest.mark.parametrize(
    "train",
    [
        lambda: run(lambda x: torch.randn(40, 6)),
        lambda: run(lambda x: torch.cat([x, torch.randn(ROWS, 6)])),
        lambda: run(lambda x: x, noise=0.1),
        lambda: run(lambda x: x, drawn=True),
        lambda: run(lambda x: x[:4]),
        lambda: run(lambda x: x, calls=1),
    ],
    ids=[
        "new rows",
        "some of them new",
        "noised in training",
        "drawn from few",
        "a few rows",
        "all rows in each batch",
    ],
)
def test_other_evaluations_are_not(train: Callable[[], None]) -> None:
    assert answer(train, "trained rows") == ""


def test_names_of_what_is_held_out_are_those_that_are_given_a_value() -> None:
    text = "test_loader = make()\nvalue = critic(state)\nprint(latest, val_acc)\nval = 3\nX_test: Any = x[9:]"
    text += "\nvalid = y > 0\nvalid_len = valid.sum()\ndev = 'cpu'"
    assert list(held_out_names(ast.parse(text))) == ["test_loader", "X_test"]
