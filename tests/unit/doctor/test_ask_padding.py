"""Whether the output of a net changes with what only fills rows of tokens up.

How it could be silently wrong: rounding of an output that is the same for all rows counts as a change; a mask that
stands beside the tokens is not made as long as they are; a net that takes one length only is called faulty.
"""

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence

from anybatch.doctor.ask.leaks import padding_read
from anybatch.doctor.ask.trials import Trial, Unknown
from anybatch.records.runs import Run


class Text(nn.Module):
    """A net over tokens, of which 0 fills rows up."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.kind = kind
        self.embed = nn.Embedding(50, 16)
        self.rnn = nn.GRU(16, 16, batch_first=True)
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.flat = nn.Linear(16 * 12, 3)
        self.head = nn.Linear(16, 3)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        """Gives scores for each row."""
        is_token = (x != 0).to(torch.float32) if mask is None else mask
        h = self.embed(x)
        if self.kind == "last":
            pooled = self.rnn(h)[0][:, -1]
        elif self.kind == "last token":
            pooled = self.rnn(h)[0][torch.arange(len(x)), is_token.sum(1).long() - 1]
        elif self.kind == "packed":
            lengths = is_token.sum(1).long()
            pooled = self.rnn(pack_padded_sequence(h, lengths, batch_first=True, enforce_sorted=False))[1][0]
        elif self.kind == "mean":
            pooled = h.mean(1)
        elif self.kind == "masked mean":
            pooled = (h * is_token[..., None]).sum(1) / is_token.sum(1, keepdim=True)
        elif self.kind == "attention":
            pooled = self.encoder(h, src_key_padding_mask=is_token == 0)[:, 0]
        elif self.kind == "dead":
            pooled = h.mean(1) * 1e-12
        elif self.kind == "flat":
            return self.flat(h.flatten(1))  # type: ignore[no-any-return]
        else:
            return self.head(h)  # type: ignore[no-any-return]
        return self.head(pooled)  # type: ignore[no-any-return]


def asked(kind: str, *, length: int = 12, masked: bool = False) -> Any:
    torch.manual_seed(1)
    tokens = torch.randint(1, 50, (8, length))
    for row in range(8):
        tokens[row, 4 + row % 5 :] = 0
    given = (tokens, (tokens != 0).float()) if masked else (tokens,)
    return padding_read(Trial(Text(kind), given, {}, 2.0**40), Run([]), 0)


@pytest.mark.parametrize("masked", [False, True], ids=["", "mask"])
@pytest.mark.parametrize("length", [8, 12, 60])
@pytest.mark.parametrize("kind", ["last", "mean"])
def test_a_net_that_reads_the_padding_is_found(kind: str, length: int, masked: bool) -> None:
    assert asked(kind, length=length, masked=masked).answer == "yes"


@pytest.mark.parametrize("masked", [False, True], ids=["", "mask"])
@pytest.mark.parametrize("length", [8, 60])
@pytest.mark.parametrize("kind", ["last token", "packed", "masked mean", "attention", "dead"])
def test_a_net_that_leaves_it_out_is_not(kind: str, length: int, masked: bool) -> None:
    assert asked(kind, length=length, masked=masked).answer == "no"


@pytest.mark.parametrize("kind", ["flat", "tokens"])
def test_what_is_not_known_is_not_said(kind: str) -> None:
    with pytest.raises(Unknown):
        asked(kind)
