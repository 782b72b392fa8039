"""An encoding of places that is one row for all of them is told, and rows of kinds, levels and times are not."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from test_doctor_ask import answer, nothing_was_compiled

__all__ = ["nothing_was_compiled"]

Encode = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
LENGTH, WIDTH = 12, 8


class Net(nn.Module):
    pe: torch.Tensor

    def __init__(self, encode: Encode, table: tuple[int, ...] = (1, 50, WIDTH), first: bool = False) -> None:
        super().__init__()
        self.embedding, self.encode, self.first = nn.Embedding(10, WIDTH), encode, first
        self.register_buffer("pe", torch.randn(table))
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.0, batch_first=not first)
        self.encoder, self.head = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False), nn.Linear(WIDTH, 10)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x: torch.Tensor = self.embedding(tokens.T if self.first else tokens)
        x = self.head(self.encoder(self.encode(x, self.pe)))
        return x.transpose(0, 1) if self.first else x


def told(net: Net) -> str:
    torch.manual_seed(0)

    def loss(logits: torch.Tensor) -> torch.Tensor:
        return logits.flatten(0, 1).logsumexp(1).mean()

    optimizer = torch.optim.Adam(net.parameters(), 1e-3)

    def train() -> None:
        for _ in range(3):
            optimizer.zero_grad()
            loss(net(torch.randint(0, 10, (6, LENGTH)))).backward()
            optimizer.step()

    return answer(train, "one place")


@pytest.mark.parametrize(
    "net",
    [
        Net(lambda x, pe: x + pe[:, x.shape[1], :]),
        Net(lambda x, pe: x + pe[:, x.shape[1]].detach()),
        Net(lambda x, pe: pe[:, x.size(1) - 1] + x),
        Net(lambda x, pe: (1 * x).add_(pe[:, x.size(1)])),
        Net(lambda x, pe: x + pe[x.size(0)], table=(50, 1, WIDTH), first=True),
    ],
)
def test_one_row_for_all_places_is_told(net: Net) -> None:
    assert told(net) == "yes"


@pytest.mark.parametrize(
    "net",
    [
        Net(lambda x, pe: x + pe[:, : x.shape[1], :]),
        Net(lambda x, pe: x + pe[: x.size(0)], table=(50, 1, WIDTH), first=True),
        Net(lambda x, pe: x + pe[0, 1]),  # of a kind
        Net(lambda x, pe: x + pe[3], table=(4, WIDTH)),  # of a level
        Net(lambda x, pe: x + pe[0, 5] + pe[0, x.shape[1]]),  # of two levels
        Net(lambda x, pe: torch.cat([x[:, i : i + 1] + pe[:, i] for i in range(x.shape[1])], 1)),  # one after the other
        Net(lambda x, pe: x + pe[0, 37]),  # of a time
        Net(lambda x, pe: torch.cat([pe[:, 12:13].expand(len(x), 1, -1), x], 1)),  # of a class
        Net(lambda x, pe: x + pe[torch.arange(x.shape[1])], table=(50, WIDTH)),
    ],
)
def test_rows_of_places_kinds_levels_and_times_are_not(net: Net) -> None:
    assert told(net) == "no"
