"""The gradient of one logical batch after another, for trainers that own the update."""

from typing import Any

import torch

from anybatch.backpropagation import RepeatedBackward


def squares(model: Any, batch: Any) -> torch.Tensor:
    found: torch.Tensor = model(batch["x"]).square().mean()
    return found


def test_what_was_learnt_of_sizes_stays_and_is_saved() -> None:
    class Small(torch.nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            if len(input) > 4:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return super().forward(input)

    model, batch = Small(2, 1), {"x": torch.randn(8, 2)}
    gradient = RepeatedBackward(model, squares)
    assert [len(gradient(batch).attempts) for _ in range(2)] == [2, 1]
    other = RepeatedBackward(model, squares)
    other.load_state_dict(gradient.state_dict())
    assert len(other(batch).attempts) == 1


def test_gradients_add_up() -> None:
    model, batch = torch.nn.Linear(2, 1), {"x": torch.randn(8, 2)}
    gradient = RepeatedBackward(model, squares, micro_batch_size=3)
    gradient(batch)
    assert model.weight.grad is not None
    once = model.weight.grad.clone()
    gradient(batch)
    assert torch.equal(model.weight.grad, 2 * once)


def test_a_scaler_can_step_after_a_batch_over_nothing() -> None:
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu")
    gradient = RepeatedBackward(model, squares, [optimizer], scaler=scaler, count=lambda batch: 0)
    before = model.weight.detach().clone()
    assert gradient({"x": torch.randn(8, 2)}).skipped
    scaler.step(optimizer)
    scaler.update()
    assert torch.equal(model.weight, before)


def test_without_a_scaler_there_is_no_gradient_then() -> None:
    model = torch.nn.Linear(2, 1)
    RepeatedBackward(model, squares, count=lambda batch: 0)({"x": torch.randn(8, 2)})
    assert model.weight.grad is None
