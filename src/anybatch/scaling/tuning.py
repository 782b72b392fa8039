"""Batch size and learning rate advice from a run: the batch size that pays, and a learning rate range test."""

import copy
import math
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

from anybatch.errors import BatchError
from anybatch.records.tunings import BatchAdvice
from anybatch.scaling.batchsize import rescale
from anybatch.scaling.noisescale import NoiseScale

_FACTORS = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0)


def rates_that_train(
    step: Callable[[Any], Any],
    model: torch.nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    batches: Sequence[Any],
) -> list[tuple[float, float]]:
    """A short learning rate range test: how far the loss falls in a few updates at several rates.

    Each rate starts from the current state of the run, with the same batches, and is rolled back afterwards.
    """
    saved = copy.deepcopy((model.state_dict(), [one.state_dict() for one in optimizers]))
    rates = [[float(group["lr"]) for group in one.param_groups] for one in optimizers]

    def trained(factor: float) -> float:
        losses = []
        for batch in batches:
            for one, own in zip(optimizers, rates, strict=True):
                for group, rate in zip(one.param_groups, own, strict=True):
                    group["lr"] = rate * factor
            losses.append(float(step(batch).loss))
        later = losses[len(losses) // 2 :]
        model.load_state_dict(saved[0])
        for one, state in zip(optimizers, saved[1], strict=True):
            one.load_state_dict(copy.deepcopy(state))
        return math.fsum(later) / len(later) if all(map(math.isfinite, later)) else math.inf

    before = trained(0.0)
    return [(factor, before - trained(factor)) for factor in _FACTORS]


def batch_that_pays(noise: float) -> int | None:
    """The power of two nearest to a noise scale, at least 1; ``None`` if the noise scale is infinite.

    Example:
        >>> batch_that_pays(700.0), batch_that_pays(0.2), batch_that_pays(math.inf)
        (512, 1, None)
    """
    return int(2 ** max(0, round(math.log2(noise)))) if 0 < noise < math.inf else None


def rate_for(optimizers: Sequence[torch.optim.Optimizer], batch: tuple[float, float]) -> tuple[float, float, str]:
    """The learning rate for another batch size, by the rule of the optimizer; changes nothing."""
    now = float(optimizers[0].param_groups[0]["lr"])
    if batch[0] == batch[1]:
        return now, now, "none is needed"
    try:
        done = rescale(optimizers, batch, scheduler=())
    except BatchError:
        done = rescale(optimizers, batch, "sqrt", scheduler=())
    new = float(optimizers[0].param_groups[0]["lr"])
    done.undo()
    return now, new, str(done.rule)


def advice_of(
    noise: NoiseScale,
    optimizers: Sequence[torch.optim.Optimizer],
    *,
    batch: int,
    micro_batches: int,
    steps: int,
    rated: Sequence[tuple[float, float]] = (),
) -> BatchAdvice:
    """The advice from a noise scale and the optimizers of a run."""
    low, high = noise.interval
    pays = batch_that_pays(noise.value or 0.0)
    now, rate, rule = rate_for(optimizers, (batch, pays or batch))
    way = (
        "as it is" if micro_batches == 1 else f"in {micro_batches} micro-batches of {math.ceil(batch / micro_batches)}"
    )
    falls = tuple((factor, fall if abs(fall) < sys.float_info.max else None) for factor, fall in rated)
    return BatchAdvice(
        batch, way, steps, noise.unit, now, rate, rule, noise.advice, pays, noise.value if pays else None, low,
        high if high < sys.float_info.max else None, falls,
    )  # fmt: skip


def advice_on(
    watcher: Any, optimizers: Sequence[torch.optim.Optimizer], batch: int, limit: float | None, steps: int
) -> BatchAdvice:
    """The advice for a running step, without a range test; refuses a step without a ``NoiseScale``.

    Args:
        watcher: of the step; a bound method of its ``NoiseScale``.
        limit: samples in a micro-batch, ``None`` for all.
    """
    noise = getattr(watcher, "__self__", None)
    if not isinstance(noise, NoiseScale):
        raise BatchError(
            "step.advice has nothing to go by; got a step that nothing measures. Expected noise = "
            "anybatch.NoiseScale(step, halves=True) before its first batches; or run anybatch tune train.py"
        )
    many = math.ceil(batch / limit) if limit else 1
    return advice_of(noise, optimizers, batch=batch, micro_batches=many, steps=steps)
