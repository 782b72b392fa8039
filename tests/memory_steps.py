"""Small models, losses and batches for the tests of TrainStep under a budget."""

import functools
import itertools
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

import anybatch
from anybatch.planning import timing
from anybatch.records.plans import Plan
from planning_referee import alive_in, peak_of

Fake = torch._subclasses.FakeTensor
WIDTH = 32
SEED = 3


class Net(nn.Module):
    """Blocks that keep four times what they are given."""

    def __init__(self, blocks: int = 3, dropout: float = 0.0) -> None:
        super().__init__()
        middle: list[nn.Module] = [nn.Dropout(dropout)] if dropout else []
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.Tanh(), *middle, nn.Linear(4 * WIDTH, WIDTH))
            for _ in range(blocks)
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


class Tokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.net = nn.Embedding(20, WIDTH), Net(2)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.net(self.embed(x))
        return y


def square(model: Any, batch: Any) -> Any:
    return model(batch["x"]).square().mean()


def points(rows: int, length: int = 6) -> dict[str, Tensor]:
    return {"x": torch.randn(rows, length, WIDTH)}


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01)


def smallest_of(model: nn.Module, loss_fn: Any, batch: Any, **options: Any) -> int:
    return anybatch.plan(model, loss_fn, batch, sgd(model), memory=2**40, **options).smallest_bytes


def plan_of(step: anybatch.TrainStep) -> Plan:
    follower = step._follower
    assert follower is not None
    assert follower.plan is not None
    return follower.plan


def peak_of_call(step: anybatch.TrainStep, batch: Any) -> int:
    """The most bytes of live tensors during a call."""
    return peak_of(functools.partial(step, batch), alive_in(step.model, step._optimizers, batch))


def optimizations_are_off(model: nn.Module) -> bool:
    return all("forward" not in module.__dict__ for module in model.modules())


class RunsOut:
    """A loss that runs out of memory on real tensors of some samples on, as often as it is told.

    Each call takes a while, so that the fastest plan is one of few micro-batches however busy the machine is.
    """

    def __init__(self, times: int = 0, rows: int = 1) -> None:
        self.times, self.rows = times, rows

    def __call__(self, model: Any, batch: Any) -> Any:
        x = batch["x"]
        time.sleep(0.002)
        out = model(x)
        if self.times and not isinstance(x, Fake) and len(x) >= self.rows:
            self.times -= 1
            raise torch.OutOfMemoryError("CUDA out of memory (made up)")
        return out.square().mean()


def varied(generator: torch.Generator, rows: int, longest: int) -> list[Tensor]:
    lengths = torch.randint(2, longest, (rows,), generator=generator).tolist()
    return [torch.randint(20, (length,), generator=generator) for length in lengths]


def padded(samples: list[Tensor]) -> dict[str, Tensor]:
    return {"x": pad_sequence(samples, batch_first=True)}


def like(plan: Plan, size: int, micro_batches: int, peak: int, recompute: tuple[str, ...] = ()) -> Plan:
    values = plan.to_dict()
    values["chosen"] |= {
        "micro_batch_size": size, "micro_batches": micro_batches, "peak_bytes": peak, "recompute": list(recompute)
    }  # fmt: skip
    return Plan.from_dict(values)


@contextmanager
def constant_times() -> Iterator[None]:
    """Measures each micro-batch as long as any other: the fewest are the fastest, however busy the machine is."""
    with mock.patch.object(timing, "_clock", side_effect=map(float, itertools.count())):
        yield
