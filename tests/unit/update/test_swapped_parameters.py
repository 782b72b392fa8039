"""What a step is given may be exchanged between two batches, or is refused before the first."""

from typing import Any

import pytest
import torch
from torch import nn

import anybatch


@pytest.mark.parametrize("options", [{"micro_batch_size": 3}, {"memory": "1GiB"}])
def test_parameters_that_an_optimizer_has_instead_of_others_are_zeroed_and_clipped(options: dict[str, Any]) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    batch = {"x": torch.randn(7, 3, dtype=torch.float64)}

    def loss_fn(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        loss: torch.Tensor = model(batch["x"]).pow(2).mean()
        return loss

    step = anybatch.TrainStep(model, loss_fn, optimizer, clip_norm=1e-3, **options)
    step(batch)
    model[1] = nn.Linear(4, 2).double()
    optimizer.param_groups[0]["params"] = list(model.parameters())
    gradients = torch.autograd.grad(loss_fn(model, batch), list(model.parameters()))
    norm = torch.linalg.vector_norm(torch.cat([one.flatten() for one in gradients]))
    for _ in range(3):
        assert step(batch).grad_norm == pytest.approx(float(norm), rel=1e-10)
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            torch.testing.assert_close(parameter.grad, gradient * (1e-3 / (norm + 1e-6)), rtol=1e-10, atol=0)


def test_a_class_is_no_scheduler() -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(anybatch.BatchError, match="the class StepLR; expected an object"):
        anybatch.TrainStep(
            model, lambda model, batch: model(batch).sum(), optimizer, scheduler=torch.optim.lr_scheduler.StepLR
        )
