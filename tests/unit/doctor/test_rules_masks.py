"""Padding masks with the wrong sign are found, and others are not looked at."""

import dataclasses
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from anybatch.doctor.recorder import Doctor
from anybatch.doctor.samples.activations import PaddingLook
from anybatch.records.findings import Finding
from anybatch.records.samples import Activations
from number_runs import Training, fires, silent

PAD = 0


def masked(*hidden: tuple[float, float] | None) -> Training:
    class Masked(Training):
        def _activations(self, step: int, at: int) -> Activations:
            return dataclasses.replace(super()._activations(step, at), hidden=hidden[step % len(hidden)])

    return Masked()


def test_mask_inverted_fires() -> None:
    one = fires(masked((1.0, 0.0), None).run(), "MASK_INVERTED", "error")
    assert one.evidence["content_hidden"] == 1.0


@pytest.mark.parametrize("hidden", [[(0.0, 1.0)], [None], [(1.0, 0.0), (0.0, 1.0)], [(1.0, 1.0)], [(0.3, 0.0)]])
def test_mask_inverted_is_quiet(hidden: list[tuple[float, float] | None]) -> None:
    silent(masked(*hidden).run(), "MASK_INVERTED")


class Reader(nn.Module):
    """A transformer over tokens, with a padding mask in one form or another."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.embed = how, nn.Embedding(20, 16)
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.encoder, self.head = nn.TransformerEncoder(layer, 2), nn.Linear(16, 2)

    def forward(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
        hide = {"right": ids == PAD, "inverted": ids != PAD, "none": None, "given": mask}[self.how]
        out: Tensor = self.head(self.encoder(self.embed(ids), src_key_padding_mask=hide)[:, 0])
        return out


def findings(how: str) -> tuple[Finding, ...]:
    torch.manual_seed(0)
    model = Reader(how)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    with Doctor(every=10) as doctor:
        for _ in range(20):
            ids = torch.randint(1, 20, (16, 12))
            for row, length in enumerate(torch.randint(4, 11, (16,)).tolist()):
                ids[row, length:] = PAD
            loss = F.cross_entropy(model(ids, (ids != PAD).float().log() if how == "given" else None), ids[:, 0] % 2)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return doctor.findings


def test_a_program_with_an_inverted_mask_is_named_first() -> None:
    first = findings("inverted")[0]
    assert (first.name, first.severity) == ("MASK_INVERTED", "error")


@pytest.mark.parametrize("how", ["right", "none", "given"])
def test_other_masks_are_quiet(how: str) -> None:
    assert not [one for one in findings(how) if one.severity != "info"]


def looked(attention: nn.Module, *args: Any, **kwargs: Any) -> tuple[float, float] | None:
    look = PaddingLook()
    with look.attached(attention):
        attention(*args, **kwargs)
    assert not attention._forward_pre_hooks
    return look.result


def test_zeros_at_the_end_are_padding_and_all_else_is_not() -> None:
    attention = nn.MultiheadAttention(4, 1, batch_first=True)
    x = torch.cat([torch.ones(2, 3, 4), torch.zeros(2, 2, 4)], 1)
    keep = torch.tensor([[True] * 3 + [False] * 2] * 2)
    assert looked(attention, x, x, x, key_padding_mask=keep) == (1.0, 0.0)
    assert looked(attention, x, x, x, ~keep) == (0.0, 1.0)
    assert looked(attention, x, x, x) is None
    assert looked(attention, x + 1, x, x, ~keep) == (0.0, 1.0)  # the keys have zeros
    full = torch.ones(2, 5, 4)
    assert looked(attention, full, full, full, key_padding_mask=keep) is None
    assert looked(nn.Linear(4, 2), x) is None
