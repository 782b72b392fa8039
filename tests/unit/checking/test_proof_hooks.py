"""What changes gradients on their way shows where it is not reached in the first batch, too.

How it could be silently wrong: a bound of the norm of all samples' gradients lies above that of the first batch. And a
proof that is refused leaves weights as the forward has set them.
"""

from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import anybatch

BOUND = 10.0


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)).double()


def batch_of() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(24, 6, generator=generator, dtype=torch.float64)
    return {"x": x, "y": torch.randint(4, (24,), generator=generator)}


def bounded(gradient: torch.Tensor) -> torch.Tensor:
    factor: torch.Tensor = (BOUND / gradient.norm()).clamp(max=1)
    return gradient * factor


class Bounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return bounded(gradients[0])


class Reversed(Bounded):
    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return -gradients[0]


def hooked(hook: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    def change(hidden: torch.Tensor) -> torch.Tensor:
        hidden.register_hook(hook)
        return hidden

    return change


def loss_with(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., torch.Tensor]:
    return lambda model, batch: F.cross_entropy(model[1:](change(model[0](batch["x"]))), batch["y"])


LEGAL = {
    "a bound of each number": hooked(lambda gradient: gradient.clamp(-BOUND, BOUND)),
    "a bound of each sample": hooked(lambda one: one * (BOUND / one.norm(dim=1, keepdim=True)).clamp(max=1)),
    "numbers that are none": hooked(torch.nan_to_num),
    "a reversal": Reversed.apply,
}


def recomputed(hidden: torch.Tensor) -> torch.Tensor:
    return cast(torch.Tensor, checkpoint(Bounded.apply, hidden, use_reentrant=True))


@torch.library.custom_op("anybatch_tests::bounded", mutates_args=())
def operator(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


operator.register_autograd(lambda ctx, gradient: bounded(gradient))


@pytest.mark.parametrize("change", [hooked(bounded), Bounded.apply, recomputed, operator])
def test_a_bound_of_all_samples_is_stopped_before_it_is_reached(change: Any) -> None:
    with pytest.raises(anybatch.NotSplittable, match="The backward pass is not linear"):
        anybatch.backward(net(), loss_with(change), batch_of(), micro_batch_size=5)


@pytest.mark.parametrize("name", list(LEGAL))
def test_what_is_done_to_each_sample_passes(name: str) -> None:
    proof = anybatch.backward(net(), loss_with(LEGAL[name]), batch_of(), micro_batch_size=5).proof
    assert proof is not None
    assert proof.exact


def test_nothing_of_torch_is_replaced_while_a_step_is_proved() -> None:
    def in_place() -> tuple[Any, Any]:
        return torch.Tensor.register_hook, torch.autograd.function.BackwardCFunction.apply

    before = in_place()

    def loss_fn(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        assert in_place() == before
        return loss_with(hooked(bounded))(model, batch)

    with pytest.raises(anybatch.NotSplittable):
        anybatch.backward(net(), loss_fn, batch_of(), micro_batch_size=5)


class SetByData(nn.Module):
    """Sets its weights by the first batch that it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.shift = net(), nn.Parameter(torch.zeros(6, dtype=torch.float64))
        self.is_set = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.is_set:
            with torch.no_grad():
                self.shift.copy_(-x.mean(0))
            self.is_set = True
        found: torch.Tensor = self.net(x + self.shift)
        return found


def test_weights_that_the_forward_sets_are_as_before_once_it_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    model = SetByData()
    step = anybatch.TrainStep(
        model, lambda model, batch: F.cross_entropy(model(batch["x"]), batch["y"]),
        torch.optim.SGD(model.parameters(), 0.1), micro_batch_size=5,
    )  # fmt: skip
    with pytest.raises(anybatch.NotSplittable, match="Nothing was changed"):
        step(batch_of())
    assert not model.shift.any()
    assert not model.is_set
    with pytest.raises(anybatch.NotSplittable, match="Nothing was changed"):
        anybatch.backward(model, step.loss_fn, batch_of(), micro_batch_size=5)
    assert "not put back" not in caplog.text
