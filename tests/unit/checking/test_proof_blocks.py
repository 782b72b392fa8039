"""A coupled loss for some rows at a time is compared with that for all rows, and a function of a mean is told as one.

How it could be silently wrong: few samples lie in one block, whole and in parts.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import anybatch

Rows = Callable[[Any, Any, slice], torch.Tensor]


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)).double()


def batch_of() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(24, 6, generator=generator, dtype=torch.float64)
    return {"x": x, "y": torch.randint(12, (24,), generator=generator)}


def encode(model: Any, batch: Any) -> Any:
    return F.normalize(model(batch["x"])), batch["y"]


def of_each_row(model: Any, outputs: Any, rows: slice) -> tuple[torch.Tensor, torch.Tensor]:
    """What pulls samples of a class together, and which rows have another one of theirs."""
    z, y = outputs
    own = torch.eye(len(z), dtype=torch.bool)[rows]
    logits = (z[rows] @ z.T).masked_fill(own, -1e9).log_softmax(1)
    same = (y[rows][:, None] == y[None]) & ~own
    return -(logits * same).sum(1) / same.sum(1).clamp(min=1), same.any(1)


def dropped(model: Any, outputs: Any, rows: slice) -> torch.Tensor:
    losses, has_others = of_each_row(model, outputs, rows)
    return losses[has_others].sum() / has_others.sum().clamp(min=1)


def all_rows(model: Any, outputs: Any, rows: slice) -> torch.Tensor:
    return of_each_row(model, outputs, rows)[0].mean()


def with_a_term_of_all(model: Any, outputs: Any, rows: slice) -> torch.Tensor:
    term: torch.Tensor = outputs[0].var(0).sum()
    return all_rows(model, outputs, rows) + term


def test_a_mean_over_the_rows_of_a_block_that_count_is_stopped() -> None:
    with pytest.raises(anybatch.NotSplittable, match="rows at a time"):
        anybatch.backward(net(), anybatch.Coupled(encode, dropped, row_block=6), batch_of(), micro_batch_size=7)


@pytest.mark.parametrize("loss", [all_rows, with_a_term_of_all])
@pytest.mark.parametrize("block", [1, 5, 24])
def test_a_mean_over_all_rows_of_a_block_passes(loss: Rows, block: int) -> None:
    coupled = anybatch.Coupled(encode, loss, row_block=block)
    proof = anybatch.backward(net(), coupled, batch_of(), micro_batch_size=7).proof
    assert proof is not None
    assert proof.exact


@pytest.mark.parametrize("function", [torch.log, torch.sqrt])
def test_a_function_of_a_mean_is_no_sum_of_means(function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    def loss(model: Any, batch: Any) -> torch.Tensor:
        return function(F.mse_loss(model(batch["x"]), batch["x"][:, :4]))

    found = anybatch.check(net(), loss, batch_of()).reasons[0]
    assert found.code == "not-additive"
    assert "a function of a mean" in found.message
