"""A loss that is by its operations a sum over samples, which is then seen in its value only.

How this could be wrong: what couples samples is taken for a sum, or numbers leave torch unseen.
"""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from anybatch.checking.replaying import RowWise

torch.manual_seed(0)
OUT, TOKENS = torch.randn(16, 6), torch.randn(16, 10, 6)
Y, LABELS = torch.randint(6, (16,)), torch.randint(6, (16, 10))
MASK = (torch.rand(16) > 0.3).float()


def is_row_wise(loss: Callable[[torch.Tensor], object]) -> bool:
    operations = RowWise()
    with torch.no_grad(), operations.seeing():
        loss(OUT)
    return operations.is_so


@pytest.mark.parametrize(
    "loss",
    [
        lambda out: F.cross_entropy(TOKENS.flatten(0, 1), LABELS.flatten()),
        lambda out: F.cross_entropy(TOKENS.transpose(1, 2), LABELS),
        lambda out: F.cross_entropy(TOKENS[:, :-1].reshape(-1, 6), LABELS[:, 1:].reshape(-1)),
        lambda out: F.mse_loss(out, out + 1) + 0.1 * out.square().mean(),
        lambda out: (F.cross_entropy(out, Y, reduction="none") * MASK).mean(),
        lambda out: F.binary_cross_entropy_with_logits(out, (out > 0).float()),
        lambda out: -out.log_softmax(-1).gather(1, Y[:, None]).mean(),
        lambda out: F.kl_div(out.log_softmax(-1), out.softmax(-1), reduction="batchmean"),
        lambda out: 1 - F.l1_loss(out, 2 * out) / 3,
    ],
)
def test_sums_over_samples(loss: Callable[[torch.Tensor], object]) -> None:
    assert is_row_wise(loss)


@pytest.mark.parametrize(
    "loss",
    [
        lambda out: out.mean(0).square().sum(),
        lambda out: (out.sum(1) * MASK).sum() / MASK.sum(),
        lambda out: out[MASK.bool()].mean(),
        lambda out: F.cross_entropy(out @ out.T, torch.arange(16)),
        lambda out: out.t().softmax(-1).mean(),
        lambda out: out.softmax(0).mean(),
        lambda out: out.sum(1).topk(4).values.mean(),
        lambda out: out.sum(1)[:4].mean(),
        lambda out: out.mean().clamp(min=0),
        lambda out: out.mean() / out.mean().detach(),
        lambda out: out.mean() * out.mean().item(),
        lambda out: out.mean() * float(out.numpy().mean()),
        lambda out: out.mean() * out.tolist()[0][0],
        lambda out: (out.sum(1) - out.sum(1, keepdim=True)).relu().mean(),
        lambda out: out.view(8, 2, 6).amax(1).mean(),
        lambda out: (out - out.mean(0)).square().mean(),
        lambda out: out.roll(1, 0).mul(out).mean(),
        lambda out: out.cumsum(0).mean(),
        lambda out: out.view(6, 16).softmax(1).sum(),
        lambda out: out.std(),
        lambda out: out.max(),
    ],
)
def test_what_couples_samples(loss: Callable[[torch.Tensor], object]) -> None:
    assert not is_row_wise(loss)
