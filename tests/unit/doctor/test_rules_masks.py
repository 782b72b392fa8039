"""Padding masks with the wrong sign are found, and others are not looked at."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from answer_runs import asked
from anybatch.doctor.recorder import Doctor
from anybatch.records.findings import Finding
from number_runs import fires, silent

PAD = 0
pytestmark = pytest.mark.asks


def test_mask_inverted_fires() -> None:
    assert fires(asked("hidden tokens", "yes").run(), "MASK_INVERTED", "error").evidence["op"]


@pytest.mark.parametrize("answer", ["no", "unknown"])
def test_mask_inverted_is_quiet(answer: str) -> None:
    silent(asked("hidden tokens", answer).run(), "MASK_INVERTED")


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


class Attending(nn.Module):
    """An attention that is given its mask."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.head = nn.MultiheadAttention(4, 1, batch_first=True), nn.Linear(4, 2)

    def forward(self, x: Tensor, key: Tensor, mask: Tensor | None) -> Tensor:
        made, _ = self.attention(x, key, key, key_padding_mask=mask)
        out: Tensor = self.head(made[:, 0])
        return out


@pytest.mark.parametrize(
    ("kind", "expected"),
    [("kept", True), ("hidden", False), ("none", False), ("full", False), ("all", False), ("mostly", True),
     ("a part", False), ("keys alone", True), ("of numbers", True)],
)  # fmt: skip
def test_zeros_at_the_end_are_padding_and_all_else_is_not(kind: str, expected: bool) -> None:
    net = Attending()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    with Doctor() as doctor:
        for _ in range(3):
            x = torch.randn(8, 12, 4)
            lengths = torch.randint(4, 9, (8,))
            keep = torch.arange(12) < lengths[:, None]
            key = x if kind == "full" else x * keep[..., None]
            masks = {"hidden": ~keep, "none": None, "all": torch.ones_like(keep) & (torch.arange(12) > 0),
                     "of numbers": torch.zeros(8, 12).masked_fill(keep, float("-inf"))}  # fmt: skip
            mask = masks.get(kind, keep)
            if kind == "mostly":
                mask = keep ^ (torch.arange(96) % 19 == 1).reshape(8, 12)
            if kind == "a part":
                mask = keep & (torch.arange(12) > 2)
            scores = net(x if kind == "keys alone" else key, key, mask)
            optimizer.zero_grad()
            F.cross_entropy(scores.nan_to_num(), torch.arange(8) % 2).backward()
            optimizer.step()
    assert ("MASK_INVERTED" in {one.name for one in doctor.findings}) == expected
