"""Models that torch.jit compiled, as a whole or in part: trained exactly under a budget, or refused."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import anybatch
from memory_steps import peak_of_call, plan_of
from reference import assert_float64, gradients_of, whole_gradients

pytestmark = [
    pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning"),
]
ROWS = 40


def layers(*, norm: bool = False) -> nn.Module:
    torch.manual_seed(0)
    middle: list[nn.Module] = [nn.BatchNorm1d(8)] if norm else [nn.Tanh()]
    return nn.Sequential(nn.Linear(6, 8), *middle, nn.Linear(8, 6)).double()


def data() -> Tensor:
    torch.manual_seed(1)
    return torch.randn(ROWS, 6, dtype=torch.float64)


def scripted(model: nn.Module) -> Any:
    return torch.jit.script(model)


def traced(model: nn.Module) -> Any:
    return torch.jit.trace(model, data(), check_trace=False)


class Stack(nn.Module):
    """Compiled layers among others."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([scripted(layers()), layers(), traced(layers())])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


MODELS: dict[str, Callable[[], Any]] = {
    "scripted": lambda: scripted(layers()),
    "traced": lambda: traced(layers()),
    "in part": Stack,
}


def square(model: Any, batch: Any) -> Any:
    return model(batch).square().mean()


def sgd(model: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.0)


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("share", [1.1, 1.6, 20.0])
def test_it_trains_under_a_budget_and_still_runs_afterwards(kind: str, share: float) -> None:
    model, batch = MODELS[kind](), data()
    for _ in range(3):  # what torch.jit optimizes when it has seen some runs
        square(model, batch).backward()
    model.zero_grad()
    want, _ = whole_gradients(model, square, batch)
    smallest = anybatch.plan(model, square, batch, sgd(model), memory=2**40).smallest_bytes
    step = anybatch.TrainStep(model, square, sgd(model), memory=int(smallest * share))
    for _ in range(3):
        peak = peak_of_call(step, batch)
        assert_float64(gradients_of(model), want)
        assert peak <= smallest * share
    assert not any("layers.0" in name or "layers.2" in name for name in plan_of(step).chosen.recompute)
    square(model, batch).backward()


@pytest.mark.parametrize("how", [scripted, traced])
@pytest.mark.parametrize("policy", ["refuse", "ghost", "frozen"])
def test_compiled_batch_norm_is_not_split(how: Any, policy: Any) -> None:
    model, batch = how(layers(norm=True)), data()
    with pytest.raises(anybatch.NotSplittable, match=r"1 is BatchNorm .* torch\.jit compiled") as error:
        anybatch.backward(model, square, batch, micro_batch_size=7, batch_norm=policy)
    assert list(error.value.modules) == ["1"]
    step = anybatch.TrainStep(model, square, sgd(model), memory="1MiB", batch_norm="ghost")
    assert step(batch).micro_batches == 1
    with pytest.raises(anybatch.DoesNotFit):
        anybatch.TrainStep(model, square, sgd(model), memory=6000)(batch)


@pytest.mark.parametrize("how", [scripted, traced])
def test_in_evaluation_mode_it_is(how: Any) -> None:
    model, batch = how(layers(norm=True).eval()), data()
    want, _ = whole_gradients(model, square, batch)
    anybatch.backward(model, square, batch, micro_batch_size=7)
    assert_float64(gradients_of(model), want)


def test_a_trace_keeps_the_mode_in_which_it_was_made() -> None:
    model = traced(layers(norm=True)).eval()
    with pytest.raises(anybatch.NotSplittable, match=r"torch\.jit compiled"):
        anybatch.backward(model, square, data(), micro_batch_size=7)


def test_buffers_are_put_back_when_memory_runs_out() -> None:
    model = scripted(layers(norm=True))
    before = model[1].running_mean.clone()

    def runs_out(model: Any, batch: Any) -> Any:
        model(batch)
        raise torch.OutOfMemoryError("simulated")

    with pytest.raises(anybatch.NotSplittable):
        anybatch.backward(model, runs_out, data())
    assert torch.equal(model[1].running_mean, before)


def test_the_certificate_names_it() -> None:
    certificate = anybatch.check(scripted(layers(norm=True)), square, data())
    assert not certificate.exact
    assert {reason.code for reason in certificate.reasons} >= {"batch-norm"}
