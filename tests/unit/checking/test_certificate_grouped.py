"""Mixtures of experts, whose grouped products torch has in low precision only, are checked in float64."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import anybatch
from anybatch.checking.standins import _grouped_mm

pytestmark = pytest.mark.skipif(not hasattr(torch, "_grouped_mm"), reason="this torch has no grouped product")
ENDS = torch.tensor([16, 16, 48], dtype=torch.int32)  # the second group is empty


@pytest.mark.parametrize(
    ("a", "b", "offs"),
    [((48, 16), (3, 16, 32), ENDS), ((3, 16, 32), (32, 48), ENDS), ((16, 48), (48, 32), ENDS),
     ((3, 16, 32), (3, 32, 16), None)],
    ids=["rows", "columns", "sums", "batches"],
)  # fmt: skip
def test_the_product_is_torchs(a: tuple[int, ...], b: tuple[int, ...], offs: torch.Tensor | None) -> None:
    generator = torch.Generator().manual_seed(0)
    one, other = (torch.randn(*shape, generator=generator) for shape in (a, b))
    expected = torch._grouped_mm(one, other, offs=offs)
    found = _grouped_mm(one.double(), other.double(), offs=offs)
    assert found.dtype is torch.float64
    torch.testing.assert_close(found.float(), expected, rtol=1e-4, atol=1e-4)


class Experts(nn.Module):
    """Each token goes to one of three experts; all of one expert's are multiplied at once."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.router, self.weight = nn.Linear(8, 3), nn.Parameter(torch.randn(3, 8, 8) / 3)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        gate = self.router(x).softmax(-1)
        best, expert = gate.max(-1)
        order = expert.argsort(stable=True)
        ends = F.one_hot(expert, 3).sum(0).cumsum(0).to(torch.int32)
        products = torch._grouped_mm(x[order], self.weight, offs=ends)
        return products[order.argsort()] * best[:, None], gate


def loss_of(balance: float) -> Any:
    def loss_fn(model: Any, batch: torch.Tensor) -> torch.Tensor:
        out, gate = model(batch)
        loss: torch.Tensor = out.square().mean() + balance * gate.mean(0).square().sum()
        return loss

    return loss_fn


@pytest.mark.parametrize("balance", [0.0, 1e-6])
def test_a_balancing_term_far_below_the_rounding_of_float32_is_found(balance: float) -> None:
    batch = torch.randn(10, 8, generator=torch.Generator().manual_seed(1))
    certificate = anybatch.check(Experts(), loss_of(balance), batch)
    assert certificate.dtype == "float64"
    assert not certificate.notes
    assert [reason.code for reason in certificate.reasons] == (["not-additive"] if balance else [])
    assert certificate.exact == (balance == 0)
