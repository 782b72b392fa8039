"""Would a batch be learned at another learning rate? A step that was written down again and again, on copies.

Clips, decay and schedules are not in it: where the batch is learned at the rate of the run, the rate is not to blame.
"""

import math
import time
from collections.abc import Mapping
from statistics import median
from typing import Any

import torch

from anybatch.doctor.ask.keeping import Kept
from anybatch.doctor.ask.rows import replayed, rows_of
from anybatch.doctor.ask.tape import Loss, Slot, Tape
from anybatch.doctor.ask.trials import Unknown, told
from anybatch.records.events import Scaler, Stepped
from anybatch.records.lossfacts import Probed
from anybatch.records.runs import Run

_STEPS = 120
_SECONDS = 1.5  # for each rate
_FITTED = 0.5  # of the first loss
_LITTLE = 0.2  # of what is gained at the best rate
_MUCH = 0.3  # of the first loss
_MOST_POWERS = 4  # of ten


def other_rate(kept: Kept, tape: Tape, number: int, run: Run, until: float) -> Probed:
    """Whether a batch is learned at another rate and not at that of the run."""
    rows_of(tape)
    facts, rates = run.optimizers.get(number), [max(one.lrs) for one in run.of(Stepped) if one.lrs]
    kind = getattr(torch.optim, facts.cls, None) if facts is not None else None
    if facts is None or kind is None or len({one.optimizer for one in run.of(Stepped)}) > 1 or not rates:
        raise Unknown("the step is not of one optimizer of torch")
    if any(True for _ in run.of(Scaler)):
        raise Unknown("the loss is scaled for half precision")
    momentum = max((group.momentum for group in facts.groups), default=0.0)
    options = {"momentum": momentum} if kind is torch.optim.SGD and momentum else {}
    rate, gains, counts, first = max(rates), dict[float, float](), dict[float, int](), 0.0

    def gained(factor: float) -> float:
        nonlocal first
        start = kept.first_of(tape)
        first, last, counts[factor] = fitted(tape, start, kind([*start.values()], lr=rate * factor, **options), until)
        gains[factor] = first - last if math.isfinite(last) else -math.inf
        return gains[factor]

    if gained(1.0) < (1 - _FITTED) * first:
        toward = 10.0 if gained(10.0) > gained(0.1) else 0.1
        for power in range(2, _MOST_POWERS + 1):
            if gained(toward**power) < max(gains.values()):
                break
    best = max(gains, key=lambda one: gains[one])
    blames = gains[1.0] < _LITTLE * gains[best] and _MUCH * first < gains[best] <= first  # a loss that has a floor
    # Steps of other kinds are as long as the rate, so that fewer of them than the run made show nothing of its rate.
    blames = blames and (best < 1 or kind is torch.optim.SGD or counts[1.0] >= min(_STEPS, len(rates)))
    seen: dict[str, Any] = {"optimizer": number, "lr": rate, "other_lr": float(f"{rate * best:.3g}"), "loss": first,
            "after": first - gains[1.0], "other_after": first - gains[best],
            "steps": min(counts[1.0], counts[best])}  # fmt: skip
    return told("rate", answer="yes" if blames else "no", **seen)


def fitted(
    tape: Tape,
    start: Mapping[Slot, torch.Tensor],
    optimizer: torch.optim.Optimizer,
    until: float,
    loss: Loss | None = None,
) -> tuple[float, float, int]:
    """The loss, or a part of it, at first and at last, and in how many steps; fewer where time ends."""
    loss, values = loss or tape.losses[-1], list[float]()
    end = min(until, time.perf_counter() + _SECONDS)
    while len(values) < _STEPS and time.perf_counter() < end:
        value = replayed(tape, loss, lambda one: one, held=start).values[loss.slot].sum()
        values.append(float(value.detach()))
        if not math.isfinite(values[-1]) or not value.requires_grad:
            break
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
    if len(values) < _STEPS // 4 and (not values or math.isfinite(values[-1])):
        raise Unknown("there was no time left")
    return values[0], median(values[-8:]), len(values)
