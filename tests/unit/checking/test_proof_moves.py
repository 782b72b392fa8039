"""A state in Python that nobody can find or put back shows in that the same samples give something else again.

How this could be silently wrong: a warm-up ends within the comparison, whose last runs agree then; a cache that the
first run fills is taken for a state.
"""

import contextvars
import functools
import io
import itertools
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import anybatch

Next = Callable[[], float]


def batch() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {name: torch.randn(40, width, generator=generator).double() for name, width in (("x", 6), ("y", 2))}


def step(loss_fn: Callable[[Any, Any], Any], **options: Any) -> anybatch.TrainStep:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2)).double()
    return anybatch.TrainStep(model, loss_fn, torch.optim.SGD(model.parameters(), 0.05), **options)


def warmed(model: Any, batch: Any, count: float) -> torch.Tensor:
    output = model(batch["x"])
    return F.mse_loss(output, batch["y"]) + min(1.0, count / 20) * output.square().mean()  # type: ignore[no-any-return]


def of_count() -> Next:
    numbers = itertools.count()
    return lambda: next(numbers)


def of_generator() -> Next:
    def counting() -> Any:
        number = 0
        while True:
            number += 1
            yield number

    numbers = counting()
    return lambda: next(numbers)


def of_cycle() -> Next:
    numbers = itertools.cycle([0, 5, 10, 20])
    return lambda: next(numbers)


def of_context() -> Next:
    variable = contextvars.ContextVar("number", default=0)

    def following() -> float:
        variable.set(variable.get() + 1)
        return variable.get()

    return following


def of_cache() -> Next:
    @functools.lru_cache(None)
    def known(number: int) -> int:
        return number

    def following() -> float:
        known(known.cache_info().currsize)
        return known.cache_info().currsize

    return following


def of_module() -> Next:
    module: Any = types.ModuleType("state_of_mine")
    module.number = 0

    def following() -> float:
        module.number += 1
        return float(module.number)

    return following


def of_stream() -> Next:
    stream = io.StringIO()
    return lambda: stream.write("x") * stream.tell()


def of_bytes() -> Next:
    held = bytearray(1)

    def following() -> float:
        held[0] += 1
        return held[0]

    return following


@pytest.mark.parametrize(
    "make", [of_count, of_generator, of_cycle, of_context, of_cache, of_module, of_stream, of_bytes]
)
def test_a_state_that_nobody_can_put_back_is_stopped(make: Callable[[], Next]) -> None:
    following = make()
    tried = step(lambda model, batch: warmed(model, batch, following()), micro_batch_size=8)
    before = [one.detach().clone() for one in tried.model.parameters()]
    with pytest.raises(anybatch.NotSplittable, match="second run of the same samples") as caught:
        tried(batch())
    assert "the comparison also changed it" in str(caught.value)
    assert all(map(torch.equal, before, tried.model.parameters()))


def test_the_line_that_helps_was_followed() -> None:
    numbers = itertools.count()
    given: list[Any] = []
    for size in (8, None):
        tried = step(lambda model, batch: warmed(model, batch, batch["value"]), micro_batch_size=size)
        value = 3 if given else 3 + 0 * next(numbers)
        tried({**batch(), "value": value})
        given.append([one.grad for one in tried.model.parameters()])
    torch.testing.assert_close(*given)


def cached() -> Callable[[Any, Any], Any]:
    @functools.lru_cache(None)
    def weights(outputs: int) -> torch.Tensor:
        return torch.arange(1.0, outputs + 1).double()

    return lambda model, batch: ((model(batch["x"]) - batch["y"]).square() * weights(2)).mean()


def counted() -> Callable[[Any, Any], Any]:
    calls = itertools.count()  # such as to print now and then

    def loss_fn(model: Any, batch: Any) -> Any:
        next(calls)
        return F.mse_loss(model(batch["x"]), batch["y"])

    return loss_fn


def noisy() -> Callable[[Any, Any], Any]:
    return lambda model, batch: F.mse_loss(model(batch["x"] + torch.randn_like(batch["x"])), batch["y"])


@pytest.mark.parametrize("make", [cached, counted, noisy])
def test_what_moves_without_a_difference_passes(make: Callable[[], Callable[[Any, Any], Any]]) -> None:
    out = step(make(), micro_batch_size=8)(batch())
    assert out.proof is not None
    assert out.proof.exact


def test_what_couples_samples_has_its_own_cause() -> None:
    def loss_fn(model: Any, batch: Any) -> Any:
        return F.cross_entropy(model(batch["x"]) @ batch["y"].T, torch.arange(len(batch["x"])))

    with pytest.raises(anybatch.NotSplittable, match="does not add up over samples"):
        step(loss_fn, micro_batch_size=8)(batch())


class Stateful(nn.Module):
    """A recurrent layer that goes on from a state of as many samples as it is made for."""

    state: torch.Tensor

    def __init__(self, samples: int, *, is_read: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.head, self.is_read = nn.GRU(4, 8, batch_first=True), nn.Linear(8, 3), is_read
        self.register_buffer("state", torch.zeros(1, samples, 8))

    def forward(self, x: torch.Tensor, state: torch.Tensor | None = None) -> Any:
        given = self.state if state is None else state.transpose(0, 1).contiguous()
        out, new = self.layer(x, given if self.is_read else torch.zeros_like(given))
        self.state = new.detach() if state is None else self.state
        return self.head(out[:, -1]), new.detach().transpose(0, 1)


def sequences() -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    return {"x": torch.randn(24, 5, 4), "y": torch.randint(3, (24,))}


def of_stateful(model: Any, batch: Any) -> Any:
    return F.cross_entropy(model(batch["x"])[0], batch["y"])


def test_a_state_of_one_batch_size_that_goes_on_with_other_samples_is_stopped() -> None:
    model, batch = Stateful(8), sequences()
    with pytest.raises(
        anybatch.NotSplittable, match=r"than in another order(.|\n)*Only micro-batches of 8 samples run"
    ) as got:
        anybatch.backward(model, of_stateful, batch, micro_batch_size=8)
    assert 'batch["state"] = state' in str(got.value)
    assert "whole batch at once" not in str(got.value)  # which is of another size
    assert not model.state.any()

    def as_data(model: Any, batch: Any) -> Any:
        out, new = model(batch["x"], batch["state"])
        return F.cross_entropy(out, batch["y"]), {"state": new}

    batch["state"] = torch.randn(24, 1, 8)
    out = anybatch.backward(model, as_data, batch, micro_batch_size=8)
    assert out.proof is not None
    assert out.proof.exact
    whole = model(batch["x"], batch["state"])[1]
    torch.testing.assert_close(out.metrics["state"], whole)


def test_a_state_of_one_batch_size_that_nothing_reads_is_not_stopped() -> None:
    out = anybatch.backward(Stateful(8, is_read=False), of_stateful, sequences(), micro_batch_size=8)
    assert out.proof is not None
    assert out.proof.outcome == "undecided"
