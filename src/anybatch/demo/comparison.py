"""The gradient of one logical batch, whole and in pieces: how far apart, how much memory, how long."""

import copy
import math
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from anybatch.backpropagation import backward
from anybatch.demo.facts import GradientComparison, Method
from anybatch.demo.memory import LiveBytes
from anybatch.demo.transformer import next_byte_loss
from anybatch.errors import DoesNotFit
from anybatch.units import format_bytes

Batch = dict[str, Tensor]
Pass = Callable[[nn.Module, Batch], None]

# AdamW keeps two numbers for each weight; an update needs them beside what forward and backward take.
_OPTIMIZER_NUMBERS = 2
_FLOAT32_ROUNDING = 2.0**-24


@dataclass(frozen=True, slots=True)
class Ways:
    """The ways to fill ``.grad`` that are compared.

    Args:
        micro_batch_size: samples in a micro-batch at most.
    """

    micro_batch_size: int

    def whole(self, model: nn.Module, batch: Batch) -> None:
        """The whole batch at once."""
        next_byte_loss(model, batch).backward()

    def split(self, model: nn.Module, batch: Batch) -> None:
        """``anybatch.backward``."""
        backward(model, next_byte_loss, batch, micro_batch_size=self.micro_batch_size)

    def loop(self, model: nn.Module, batch: Batch) -> None:
        """What is often written: the mean of the micro-batches' means, which weighs a short one too much."""
        xs, ys = (batch[name].split(self.micro_batch_size) for name in ("x", "y"))
        for x, y in zip(xs, ys, strict=True):
            (next_byte_loss(model, {"x": x, "y": y}) / len(xs)).backward()


def largest_micro_batch(model: nn.Module, batch: Batch, memory_bytes: int) -> int:
    """Finds the largest power of two of samples with which an AdamW update fits, by trying.

    Args:
        model: its gradients are cleared.
        batch: a logical batch of at least two samples.
        memory_bytes: for weights, gradients, AdamW's state, the logical batch and the activations.

    Returns:
        The size; at most the whole batch.

    Raises:
        DoesNotFit: not even one sample does.
    """
    samples = len(batch["x"])
    optimizer_bytes = _OPTIMIZER_NUMBERS * sum(p.nbytes for p in model.parameters())
    batch_bytes = sum(tensor.nbytes for tensor in batch.values())
    fitting, size = 0, 1
    while size <= samples:
        # Two micro-batches: the second one meets the gradients of the first.
        part = {name: tensor[: 2 * size].clone() for name, tensor in batch.items()}
        part_bytes = sum(tensor.nbytes for tensor in part.values())
        needed: int = peak_bytes(Ways(size).split, model, part) - part_bytes + batch_bytes + optimizer_bytes
        if needed > memory_bytes:
            break
        fitting, size = size, 2 * size
    if not fitting:
        raise DoesNotFit(
            f"got {format_bytes(memory_bytes)}, expected {format_bytes(needed)} or more for an update with one sample "
            f"at a time: allow more memory or make the model smaller",
            needed=needed,
            budget=memory_bytes,
        )
    return fitting


def peak_bytes(run: Pass, model: nn.Module, batch: Batch) -> int:
    """Measures the bytes of all live tensors at the worst moment of a pass, weights and batch included.

    Args:
        run: fills ``.grad``.
        model: its gradients are cleared before and after.
        batch: what ``run`` is given.

    Returns:
        Bytes.
    """
    model.zero_grad()
    live = LiveBytes((*model.parameters(), *model.buffers(), *batch.values()))
    with live:
        run(model, batch)
    model.zero_grad()
    return live.peak


def gradient(run: Pass, model: nn.Module, batch: Batch) -> Tensor:
    """Computes the gradient of all parameters as one vector.

    Args:
        run: fills ``.grad``.
        model: its gradients are cleared before and after.
        batch: what ``run`` is given.

    Returns:
        A float64 tensor of shape ``[parameters]``.
    """
    model.zero_grad()
    run(model, batch)
    vector = torch.cat([p.grad.detach().double().flatten() for p in model.parameters() if p.grad is not None])
    model.zero_grad()
    return vector


def seconds_in_turn(runs: dict[str, Pass], model: nn.Module, batch: Batch, rounds: int) -> dict[str, float]:
    """Times passes one after the other, round by round, so that a slow moment of the machine hits all of them.

    Args:
        runs: by name.
        model: its gradients are cleared.
        batch: what each is given.
        rounds: how often; the first round warms up and does not count if there are more.

    Returns:
        The median wall-clock time of each, in seconds.
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


def compare_gradients(
    model: nn.Module,
    batch: Batch,
    *,
    memory_bytes: int,
    rounds: int = 5,
    process_bytes: Callable[[int, int], Mapping[str, int | None]] = lambda micro_batch_size, samples: {},
) -> GradientComparison:
    """Computes the gradient of one logical batch in three ways and measures each.

    Args:
        model: in float32; weights stay as they are, gradients are cleared.
        batch: ``"x"`` and ``"y"`` of shape ``[samples, context]``.
        memory_bytes: what the micro-batches are chosen for.
        rounds: how often each way is timed.
        process_bytes: gives for a micro-batch size and a number of samples what a pass adds to the memory of a process,
            by the name of the way; see ``anybatch.demo.footprint``.

    Returns:
        The distances to the float64 gradient, peaks and times.

    Raises:
        DoesNotFit: not even one sample fits in ``memory_bytes``.
    """
    size = largest_micro_batch(model, batch, memory_bytes)
    ways = Ways(size)
    runs: dict[str, Pass] = {"whole": ways.whole, "split": ways.split, "loop": ways.loop}
    exact_model = copy.deepcopy(model).double()
    exact = gradient(ways.whole, exact_model, batch)
    float64_difference = _distance(gradient(ways.split, exact_model, batch), exact)
    times = seconds_in_turn(runs, model, batch, rounds)
    samples, context = batch["x"].shape
    micro_batches = math.ceil(samples / size)
    added = process_bytes(size, samples)
    labels = {"whole": "whole batch", "split": "anybatch", "loop": "loop, loss / N"}
    methods = {
        name: Method(
            name=labels[name],
            micro_batches=1 if name == "whole" else micro_batches,
            error=_distance(gradient(run, model, batch), exact),
            peak_bytes=peak_bytes(run, model, batch),
            process_bytes=added.get(name),
            seconds=times[name],
        )
        for name, run in runs.items()
    }
    return GradientComparison(
        samples=samples,
        context=context,
        parameters=exact.numel(),
        memory_bytes=memory_bytes,
        micro_batch_size=size,
        bound=2 * methods["whole"].error + _FLOAT32_ROUNDING * math.sqrt(micro_batches),
        float64_difference=float64_difference,
        **methods,
    )


def _distance(vector: Tensor, reference: Tensor) -> float:
    return float((vector - reference).norm() / reference.norm())
