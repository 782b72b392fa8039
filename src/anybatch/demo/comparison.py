"""The gradient of one logical batch, whole and in pieces: how far apart, how much memory, how long; and what fits."""

import copy
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from anybatch.backpropagation import backward
from anybatch.batch.batches import Splittable
from anybatch.demo.facts import GradientComparison, Method
from anybatch.demo.training import TrainingSettings, make_optimizer, rate_factor
from anybatch.demo.transformer import ByteTransformer, next_byte_loss
from anybatch.loss.accumulate import Settings
from anybatch.memory.application import apply_optimizations
from anybatch.memory.meter import LiveBytes
from anybatch.planning.devices import target_of
from anybatch.planning.entrance import plan
from anybatch.planning.planner import Planner
from anybatch.planning.subjects import Subject
from anybatch.records.plans import Plan, PlanRow

Batch = dict[str, Tensor]
Pass = Callable[[nn.Module, Batch], None]

_FLOAT32_ROUNDING = 2.0**-24


@dataclass(frozen=True, slots=True)
class Ways:
    """The compared ways to fill ``.grad``."""

    planned: PlanRow  # the size of the micro-batches, and the memory optimizations

    @property
    def micro_batch_size(self) -> int:
        """The most samples in a micro-batch."""
        return int(self.planned.micro_batch_size)

    def whole(self, model: nn.Module, batch: Batch) -> None:
        """The whole batch at once."""
        next_byte_loss(model, batch).backward()

    def split(self, model: nn.Module, batch: Batch) -> None:
        """``anybatch.backward``, with the memory optimizations of the plan."""
        optimized = self.planned
        with apply_optimizations(
            model,
            recompute=optimized.recompute,
            offload=optimized.offload,
            head=optimized.head,
            loss_chunks=optimized.loss_chunks,
        ):
            # Each way is one pass here, beside which the proof of the first split would be seen.
            backward(model, next_byte_loss, batch, micro_batch_size=self.micro_batch_size, verify="off")

    def loop(self, model: nn.Module, batch: Batch) -> None:
        """The usual loop by hand: the mean of the micro-batches' means, which gives a short one too much weight."""
        xs, ys = (batch[name].split(self.micro_batch_size) for name in ("x", "y"))
        for x, y in zip(xs, ys, strict=True):
            (next_byte_loss(model, {"x": x, "y": y}) / len(xs)).backward()


def peak_bytes(run: Pass, model: nn.Module, batch: Batch) -> int:
    """Measures the peak memory of a pass in bytes: all live tensors, including weights and batch."""
    model.zero_grad()
    live = LiveBytes((*model.parameters(), *model.buffers(), *batch.values()))
    with live:
        run(model, batch)
    model.zero_grad()
    return live.peak


def gradient(run: Pass, model: nn.Module, batch: Batch) -> Tensor:
    """Computes the gradient of all parameters as one float64 vector."""
    model.zero_grad()
    run(model, batch)
    vector = torch.cat([p.grad.detach().double().flatten() for p in model.parameters() if p.grad is not None])
    model.zero_grad()
    return vector


def seconds_in_turn(runs: dict[str, Pass], model: nn.Module, batch: Batch, rounds: int) -> dict[str, float]:
    """Times passes in turn, round by round, so that a slow moment of the machine affects all of them.

    Gives the median wall-clock time of each, in seconds; of several rounds, the first only warms up.
    """
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            model.zero_grad()
            start = time.perf_counter()
            run(model, batch)
            times[name].append(time.perf_counter() - start)
    model.zero_grad()
    return {name: statistics.median(taken[1:] or taken) for name, taken in times.items()}


def compare_gradients(model: nn.Module, batch: Batch, *, plan: Plan, rounds: int = 5) -> GradientComparison:
    """Computes the gradient of one logical batch in three ways and measures each."""
    ways = Ways(plan.chosen)
    runs: dict[str, Pass] = {"whole": ways.whole, "split": ways.split, "loop": ways.loop}
    exact_model = copy.deepcopy(model).double()
    exact = gradient(ways.whole, exact_model, batch)
    float64_difference = _distance(gradient(ways.split, exact_model, batch), exact)
    times = seconds_in_turn(runs, model, batch, rounds)
    samples, context = batch["x"].shape
    micro_batches = math.ceil(samples / ways.micro_batch_size)
    labels = {"whole": "whole batch", "split": "anybatch", "loop": "loop, loss / N"}
    methods = {
        name: Method(
            name=labels[name],
            micro_batches=1 if name == "whole" else micro_batches,
            error=_distance(gradient(run, model, batch), exact),
            peak_bytes=peak_bytes(run, model, batch),
            seconds=times[name],
        )
        for name, run in runs.items()
    }
    return GradientComparison(
        samples=samples,
        context=context,
        parameters=exact.numel(),
        memory_bytes=plan.budget,
        micro_batch_size=ways.micro_batch_size,
        optimized=plan.chosen.optimizations,
        bound=2 * methods["whole"].error + _FLOAT32_ROUNDING * math.sqrt(micro_batches),
        float64_difference=float64_difference,
        **methods,
    )


def _distance(vector: Tensor, reference: Tensor) -> float:
    return float((vector - reference).norm() / reference.norm())


# AdamW keeps two numbers for each weight; an update needs them beside what forward and backward take.
_OPTIMIZER_NUMBERS = 2
_PART = 4


def whole_bytes(model: ByteTransformer, batch: dict[str, Tensor]) -> int:
    """Measures the peak memory of an update with the whole batch at once, AdamW's state included, in bytes."""
    samples = len(batch["x"])
    return peak_bytes(Ways(PlanRow(samples, 1)).whole, model, batch) + _OPTIMIZER_NUMBERS * sum(
        parameter.nbytes for parameter in model.parameters()
    )


def plan_update(
    model: ByteTransformer, batch: dict[str, Tensor], settings: TrainingSettings, memory_bytes: int | None = None
) -> Plan:
    """Plans the updates of a training, by default within a quarter of what the whole batch needs.

    Raises:
        DoesNotFit: nothing fits in ``memory_bytes``.
    """
    if memory_bytes is None:
        memory_bytes = whole_bytes(model, batch) // _PART
    optimizer = make_optimizer(model, settings)
    # The training's scheduler writes into the optimizer's groups, and a plan holds for groups such as it was made for.
    torch.optim.lr_scheduler.LambdaLR(optimizer, rate_factor)
    if settings.updates is None:
        return plan(model, next_byte_loss, batch, optimizer, memory=memory_bytes, clip_norm=settings.clip_norm)
    cpu = torch.device("cpu")
    subject = Subject(
        model, next_byte_loss, Settings(cpu), Splittable([batch]), [optimizer], clip_norm=settings.clip_norm
    )
    return Planner(subject, replace(target_of(cpu, cpu), is_present=False)).plan(memory_bytes)
