"""Texts that are padded on the left: what padded places see is in no loss, and is no leak; a real leak is."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from anybatch.doctor.ask.asking import run_probes
from anybatch.doctor.recorder import Doctor

WORDS, DIM, PAD = 12, 16, 0


class Reader(nn.Module):
    def __init__(self, *, causal: bool, told: bool) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(WORDS, DIM), nn.Embedding(16, DIM)
        self.mixed, self.head = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, WORDS)
        self.causal, self.told = causal, told

    def forward(self, ids: torch.Tensor, attend: torch.Tensor | None = None) -> torch.Tensor:
        there = attend.bool() if attend is not None else ids != PAD
        h = self.embed(ids) + self.place(torch.arange(ids.shape[1]))
        q, k, v = self.mixed(h).chunk(3, -1)
        seen = there[:, None, :].expand(-1, ids.shape[1], -1)
        if self.causal:
            seen = seen & torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).tril()
        scores = (q @ k.transpose(1, 2) / DIM**0.5).masked_fill(~seen, -1e4)
        out: torch.Tensor = self.head(h + scores.softmax(-1) @ v)
        return out


def answered(*, causal: bool, told: bool) -> str:
    torch.manual_seed(0)
    reader = Reader(causal=causal, told=told)
    optimizer = torch.optim.Adam(reader.parameters(), lr=1e-2)
    with Doctor() as doctor:
        for _ in range(6):
            lengths = torch.randint(4, 9, (10,))
            ids = (torch.randint(1, WORDS, (10, 1)) + torch.arange(9)) % (WORDS - 1) + 1
            attend = torch.arange(9) >= 9 - lengths[:, None]
            ids = ids.masked_fill(~attend, PAD)
            scores = reader(ids, attend.long()) if told else reader(ids)
            target = ids[:, 1:].masked_fill(~attend[:, :-1], -100)
            optimizer.zero_grad()
            F.cross_entropy(scores[:, :-1].flatten(0, 1), target.flatten()).backward()
            optimizer.step()
    return next(one.answer for one in run_probes(doctor) if one.probe == "time")


@pytest.mark.parametrize("told", [False, True], ids=["by token", "by mask"])
def test_only_tokens_that_count_can_leak(told: bool) -> None:
    assert answered(causal=True, told=told) == "no"
    assert answered(causal=False, told=told) == "yes"
