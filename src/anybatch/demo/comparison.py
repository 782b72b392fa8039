"""The gradient of one logical batch, whole and in pieces: how far apart, how much memory, how long; and what fits."""

import copy
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn

from anybatch.backpropagation import backward
from anybatch.batch.batches import Splittable
from anybatch.demo.facts import GradientComparison, Method
from anybatch.demo.training import CLIP_NORM, TrainingSettings, make_optimizer, rate_factor
from anybatch.demo.transformer import ByteTransformer, next_byte_loss
from anybatch.loss.accumulate import Settings
from anybatch.memory.application import apply_optimizations
from anybatch.memory.meter import Recording
from anybatch.planning.devices import target_of
from anybatch.planning.entrance import plan
from anybatch.planning.planner import Planner
from anybatch.planning.subjects import Subject
from anybatch.records.memory import OTHER
from anybatch.records.plans import Plan, PlanRow

Batch = dict[str, Tensor]
Pass = Callable[[nn.Module, Batch], None]

_FLOAT32_ROUNDING = 2.0**-24
# AdamW keeps two numbers for each weight; an update needs them beside what forward and backward take.
_OPTIMIZER_NUMBERS = 2
_PART = 4


def whole(model: nn.Module, batch: Batch) -> None:
    """Takes the gradient of the whole batch at once."""
    next_byte_loss(model, batch).backward()


def passes(planned: PlanRow) -> dict[str, tuple[str, Pass]]:
    """The compared ways to fill ``.grad``: the name of each in tables, and what takes the gradient."""
    size = int(planned.micro_batch_size)

    def split(model: nn.Module, batch: Batch) -> None:
        names = ("recompute", "offload", "head", "loss_chunks")
        with apply_optimizations(model, **{name: getattr(planned, name) for name in names}):
            # Each way is one pass here, beside which the proof of the first split would be seen.
            backward(model, next_byte_loss, batch, micro_batch_size=size, verify="off")

    def loop(model: nn.Module, batch: Batch) -> None:
        """The usual loop by hand: the mean of the micro-batches' means, which gives a short one too much weight."""
        xs, ys = (batch[name].split(size) for name in ("x", "y"))
        for x, y in zip(xs, ys, strict=True):
            (next_byte_loss(model, {"x": x, "y": y}) / len(xs)).backward()

    return {"whole": ("whole batch", whole), "split": ("anybatch", split), "loop": ("loop, loss / N", loop)}


def peak_bytes(run: Pass, model: nn.Module, batch: Batch) -> int:
    """Measures the peak memory of a pass in bytes: all live tensors, including weights and batch."""
    model.zero_grad()
    recording = Recording()
    recording.register((*model.parameters(), *model.buffers(), *batch.values()), OTHER)
    with recording:
        run(model, batch)
    model.zero_grad()
    return recording.most


def gradient(run: Pass, model: nn.Module, batch: Batch) -> Tensor:
    """Computes the gradient of all parameters as one float64 vector."""
    model.zero_grad()
    run(model, batch)
    vector = torch.cat([p.grad.detach().double().flatten() for p in model.parameters() if p.grad is not None])
    model.zero_grad()
    return vector


def compare_gradients(model: nn.Module, batch: Batch, *, plan: Plan, rounds: int = 5) -> GradientComparison:
    """Computes the gradient of one logical batch in three ways and measures each.

    The ways are timed in turn, round by round, so that a slow moment of the machine affects all of them; of several
    rounds the first only warms up.
    """
    ways, times = passes(plan.chosen), dict[str, list[float]]()
    exact_model = copy.deepcopy(model).double()
    exact = gradient(whole, exact_model, batch)
    float64_difference = _distance(gradient(ways["split"][1], exact_model, batch), exact)
    for _ in range(rounds):
        for name, (_, run) in ways.items():
            model.zero_grad()
            start = time.perf_counter()
            run(model, batch)
            times.setdefault(name, []).append(time.perf_counter() - start)
    samples, context = batch["x"].shape
    size = int(plan.chosen.micro_batch_size)
    micro_batches = math.ceil(samples / size)
    methods = {
        name: Method(
            label, 1 if name == "whole" else micro_batches, _distance(gradient(run, model, batch), exact),
            peak_bytes(run, model, batch), statistics.median(times[name][1:] or times[name]),
        )
        for name, (label, run) in ways.items()
    }  # fmt: skip
    return GradientComparison(
        samples=samples, context=context, parameters=exact.numel(), memory_bytes=plan.budget, micro_batch_size=size,
        optimized=plan.chosen.optimizations, float64_difference=float64_difference,
        bound=2 * methods["whole"].error + _FLOAT32_ROUNDING * math.sqrt(micro_batches), **methods,
    )  # fmt: skip


def _distance(vector: Tensor, reference: Tensor) -> float:
    return float((vector - reference).norm() / reference.norm())


def plan_update(
    model: ByteTransformer, batch: Batch, settings: TrainingSettings, memory_bytes: int | None = None
) -> Plan:
    """Plans the updates of a training, by default within a quarter of what the whole batch needs.

    Raises:
        DoesNotFit: nothing fits in ``memory_bytes``.
    """
    if memory_bytes is None:
        state_bytes = _OPTIMIZER_NUMBERS * sum(parameter.nbytes for parameter in model.parameters())
        memory_bytes = (peak_bytes(whole, model, batch) + state_bytes) // _PART
    optimizer = make_optimizer(model)
    # The training's scheduler writes into the optimizer's groups, and a plan holds for groups such as it was made for.
    torch.optim.lr_scheduler.LambdaLR(optimizer, rate_factor)
    if settings.updates is None:
        return plan(model, next_byte_loss, batch, optimizer, memory=memory_bytes, clip_norm=CLIP_NORM)
    cpu = torch.device("cpu")
    subject = Subject(model, next_byte_loss, Settings(cpu), Splittable([batch]), [optimizer], clip_norm=CLIP_NORM)
    return Planner(subject, replace(target_of(cpu, cpu), is_present=False)).plan(memory_bytes)
