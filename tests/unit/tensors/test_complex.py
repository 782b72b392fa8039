"""Complex parameters: trained exactly in any split, clipped by torch's own norm, and certified."""

from typing import Any

import pytest
import torch
from torch import nn

import anybatch
from reference import assert_float64, gradients_of, whole_gradients

ROWS = 11


def parts(dtype: torch.dtype, *, is_complex_batch: bool) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4, dtype=dtype), nn.Linear(4, 2, dtype=dtype))
    real = dtype.to_real()
    return model, torch.randn(ROWS, 3, dtype=dtype if is_complex_batch else real)


def mean_power(model: Any, batch: torch.Tensor) -> Any:
    return model(batch.to(model[0].weight.dtype)).abs().square().mean()


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
@pytest.mark.parametrize("is_complex_batch", [False, True])
def test_the_certificate(dtype: torch.dtype, is_complex_batch: bool) -> None:
    model, batch = parts(dtype, is_complex_batch=is_complex_batch)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    found = anybatch.check(model, mean_power, batch)
    assert found.exact
    assert found.dtype == "float64"
    assert all(torch.equal(one, other) for one, other in zip(model.parameters(), before, strict=True))
    assert not anybatch.check(model, lambda model, batch: mean_power(model, batch) * ROWS * len(batch), batch).exact


@pytest.mark.parametrize("options", [{"micro_batch_size": 4}, {"memory": "1MiB"}, {"memory": 4000}])
def test_gradient_and_norm(options: dict[str, Any]) -> None:
    model, batch = parts(torch.complex128, is_complex_batch=True)
    want, _ = whole_gradients(model, mean_power, batch)
    step = anybatch.TrainStep(
        model, mean_power, torch.optim.SGD(model.parameters(), lr=0.0), clip_norm=float("inf"), **options
    )
    out = step(batch)
    assert_float64(
        [None if one is None else torch.view_as_real(one) for one in gradients_of(model)],
        [None if one is None else torch.view_as_real(one.resolve_conj()) for one in want],
    )
    assert out.grad_norm == pytest.approx(float(nn.utils.clip_grad_norm_(model.parameters(), 1e9)), rel=1e-10)
