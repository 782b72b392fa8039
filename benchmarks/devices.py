"""Several devices in one process, beside what nn.DataParallel and PyTorch-Encoding's DataParallelCriterion do.

    python benchmarks/devices.py -o benchmarks/results/devices_cpu.md

Where there are two CUDA devices, torch's own nn.DataParallel runs, and bytes are the allocator's. Elsewhere it is
rebuilt here on threads of the CPU, as DataParallelCriterion is: the weights are sent in each forward, the batch is cut
in equal chunks, and then

- DataParallel gathers all outputs on the first device, where the loss is computed;
- DataParallelCriterion computes the loss of each chunk where it is, and takes the mean of the means.

On the CPU each tensor belongs to the device whose tensors it was computed of, and bytes are counted by device.
"""

from __future__ import annotations

import copy
import math
import statistics
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import click
import torch
from common import IGNORED, Batch, LanguageModel, cut_rows, facts, language_loss, markdown, write_json, write_text
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._python_dispatch import TorchDispatchMode

import anybatch
from anybatch.update import overdevices

SIZES = {"few classes": (64, 64), "many classes": (4000, 64)}
ROWS, TIME = 32, 32
SHELLS: weakref.WeakKeyDictionary[nn.Module, list[nn.Module]] = weakref.WeakKeyDictionary()


class Places(TorchDispatchMode):
    """Counts the bytes of live tensors on each of several pretended devices.

    A result belongs to the last device that one of its arguments belongs to, unless it is sent.

    Args:
        known: what belongs to which device to begin with.
    """

    def __init__(self, known: Sequence[tuple[int, Sequence[Tensor]]]) -> None:
        super().__init__()
        self.live: dict[int, int] = {}
        self.peak: dict[int, int] = {}
        self._places: dict[int, int] = {}
        self.sending: int | None = None
        for place, tensors in known:
            for tensor in tensors:
                self._add(tensor, place)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        place = self.sending
        if place is None:
            found = [self._places.get(t.untyped_storage()._cdata, 0) for t in _tensors((args, kwargs))]
            place = max(found, default=0)
        for tensor in _tensors(result):
            self._add(tensor, place)
        return result

    def _add(self, tensor: Tensor, place: int) -> None:
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key in self._places:
            return
        self._places[key] = place
        self.live[place] = self.live.get(place, 0) + size
        self.peak[place] = max(self.peak.get(place, 0), self.live[place])
        weakref.finalize(storage, self._forget, key, place, size)

    def _forget(self, key: int, place: int, size: int) -> None:
        self._places.pop(key, None)
        self.live[place] -= size


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from _tensors(one)
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))


class Send(torch.autograd.Function):
    """Copies a tensor to a pretended device, and its gradient back."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, source: int, target: int, places: Places | None) -> Tensor:
        ctx.back = source, places
        return _cloned(tensor, target, places)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return _cloned(gradients[0], *ctx.back), None, None, None


def _cloned(tensor: Tensor, target: int, places: Places | None) -> Tensor:
    if places is None:
        return tensor.clone()
    places.sending = target
    try:
        return tensor.clone()
    finally:
        places.sending = None


def forwards(model: nn.Module, chunks: Sequence[Batch], loss: Callable[..., Any], places: Places | None) -> list[Any]:
    """One forward a chunk, each with weights that were sent for it, on a thread each where nothing is counted."""
    found: list[Any] = [None] * len(chunks)
    if model not in SHELLS:  # each thread puts weights into its own
        SHELLS[model] = [copy.deepcopy(model).to("meta") for _ in range(len(chunks) - 1)]
    shells = [model, *SHELLS[model]]
    parameters = dict(model.named_parameters())
    with_weights = [
        parameters if n == 0 else {k: Send.apply(p, 0, n, places) for k, p in parameters.items()}
        for n in range(len(chunks))
    ]

    def run(number: int) -> None:
        def call(tokens: Tensor) -> Tensor:
            return functional_call(shells[number], with_weights[number], (tokens,))

        found[number] = loss(call, chunks[number])

    if places is not None:
        for number in range(len(chunks)):
            run(number)
        return found
    threads = [threading.Thread(target=run, args=(number,)) for number in range(1, len(chunks))]
    for thread in threads:
        thread.start()
    run(0)
    for thread in threads:
        thread.join()
    return found


def chunks_of(batch: Batch, devices: int, places: Places | None) -> list[Batch]:
    """As torch's scatter cuts it: equal chunks, the last of which may be shorter."""
    rows = len(batch["tokens"])
    parts = cut_rows(batch, -(-rows // devices))
    return [
        {key: value if n == 0 else _cloned(value, n, places) for key, value in part.items()}
        for n, part in enumerate(parts)
    ]


def whole(model: nn.Module, batch: Batch, devices: int, places: Places | None = None) -> None:
    """One process, one device, the whole batch."""
    language_loss(model, batch).backward()


def data_parallel(model: nn.Module, batch: Batch, devices: int, places: Places | None = None) -> None:
    """Outputs are gathered on the first device."""
    outputs = forwards(model, chunks_of(batch, devices, places), lambda call, part: call(part["tokens"]), places)
    gathered = [one if n == 0 else Send.apply(one, n, 0, places) for n, one in enumerate(outputs)]
    logits = torch.cat(gathered)
    language_loss(lambda _: logits, batch).backward()


def data_parallel_criterion(model: nn.Module, batch: Batch, devices: int, places: Places | None = None) -> None:
    """The loss of each chunk is computed where it is; their mean is taken, however many tokens each has."""
    losses = forwards(model, chunks_of(batch, devices, places), language_loss, places)
    home = [one if n == 0 else Send.apply(one, n, 0, places) for n, one in enumerate(losses)]
    (torch.stack(home).sum() / len(home)).backward()


class Update:
    """An update of one side.

    Args:
        side: its name.
        model: its own copy.
        devices: as ``TrainStep`` takes them.
        size: of micro-batches, for anybatch.
    """

    def __init__(self, side: str, model: nn.Module, devices: Sequence[Any], size: int | None = None) -> None:
        self.side, self.model, self.devices = side, model, devices
        self.optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        self.step: anybatch.TrainStep | None = None
        self.by_hand = {
            "one device": whole,
            "DataParallel": data_parallel,
            "DataParallelCriterion": data_parallel_criterion,
        }
        if side.startswith("anybatch"):
            self.step = anybatch.TrainStep(
                model, language_loss, self.optimizer, devices=devices, micro_batch_size=size,
                count=anybatch.count_tokens("labels", shift=1),
            )  # fmt: skip
        elif side == "DataParallel" and torch.device(devices[0]).type == "cuda":
            parallel = nn.DataParallel(model, [torch.device(one).index for one in devices])
            self.by_hand[side] = lambda _, batch, *__: language_loss(parallel, batch).backward()

    def __call__(self, batch: Batch, places: Places | None = None) -> None:
        """Zeroes, differentiates and steps."""
        if self.step is not None:
            self.step(batch)
            return
        self.optimizer.zero_grad()
        self.by_hand[self.side](self.model, batch, len(self.devices), places)
        self.optimizer.step()

    def peaks(self, batch: Batch) -> dict[int, int]:
        """The most bytes on each device in one update, weights and gradients included."""
        if torch.device(self.devices[0]).type == "cuda":
            for one in self.devices:
                torch.cuda.reset_peak_memory_stats(one)
            self(batch)
            return {n: torch.cuda.max_memory_allocated(one) for n, one in enumerate(self.devices)}
        if self.step is not None and self.step._placements is not None:
            return self._peaks_of_lanes(batch)
        self.optimizer.zero_grad()
        with Places([(0, [*self.model.parameters(), *batch.values()])]) as places:
            self(batch, places)
        return places.peak

    def _peaks_of_lanes(self, batch: Batch) -> dict[int, int]:
        found: dict[int, Places] = {}
        work = overdevices._Worker.work

        def counted(worker: Any, begin: Any) -> None:
            if worker.placement.copy is None:
                work(worker, begin)
                return
            number = worker._run.devices.placements.index(worker.placement)
            with Places([(0, [one for _, one in worker.placement.copy.pairs])]) as found[number]:
                work(worker, begin)

        copies = [placement.copy for placement in self.step._placements.placements if placement.copy is not None]
        elsewhere = [one for each in copies for _, one in each.pairs]
        known = [(0, [*self.model.parameters(), *batch.values()]), (1, elsewhere)]
        with _replaced(overdevices._Worker, "work", counted), Places(known) as found[0]:
            self(batch)
        return {number: places.peak[0] for number, places in sorted(found.items())}


@contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    with ExitStack() as stack:
        stack.callback(setattr, owner, name, getattr(owner, name))
        setattr(owner, name, value)
        yield


def batch_of(vocabulary: int, rows: int, *, uneven: bool, device: Any = "cpu") -> Batch:
    """Texts; uneven ones get longer from the first to the last, and the rest of each is ignored."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, vocabulary, (rows, TIME), generator=generator)
    labels = tokens.clone()
    if uneven:
        lengths = torch.linspace(3, TIME, rows).long()
        labels[torch.arange(TIME)[None] >= lengths[:, None]] = IGNORED
    return {"tokens": tokens.to(device), "labels": labels.to(device)}


def error_of(side: str, model: nn.Module, devices: Sequence[Any], rows: int) -> float:
    """How far the gradient of an uneven batch is from that of the whole batch in float64."""
    batch = batch_of(model.head.out_features, rows, uneven=True, device=devices[0])
    truth = copy.deepcopy(model).double()
    language_loss(truth, batch).backward()
    mine = copy.deepcopy(model)
    Update(side, mine, devices)(batch)
    found = [parameter.grad for parameter in mine.parameters()]
    if any(gradient is None for gradient in found):
        raise RuntimeError(f"{side} gave no gradient to a parameter")
    pairs: Any = list(zip(found, [parameter.grad for parameter in truth.parameters()], strict=True))
    off = sum(float((a.double() - b).square().sum()) for a, b in pairs)
    return math.sqrt(off / sum(float(b.square().sum()) for _, b in pairs))


def measured(name: str, devices: Sequence[Any], rounds: int) -> list[dict[str, Any]]:
    """All sides on one model, in turn."""
    vocabulary, width = SIZES[name]
    torch.manual_seed(0)
    model = LanguageModel(vocabulary, width, heads=4, layers=2, length=TIME).to(devices[0])
    batch = batch_of(vocabulary, ROWS, uneven=False, device=devices[0])
    sides = [
        Update("one device", copy.deepcopy(model), devices[:1]),
        Update("DataParallel", copy.deepcopy(model), devices),
        Update("DataParallelCriterion", copy.deepcopy(model), devices),
        Update("anybatch", copy.deepcopy(model), devices),
        Update("anybatch, one device, micro-batches of 4", copy.deepcopy(model), devices[:1], 4),
        Update("anybatch, micro-batches of 4", copy.deepcopy(model), devices, 4),
    ]
    peaks = {}
    for side in sides:
        side(batch)
        peaks[side.side] = side.peaks(batch)
    times: dict[str, list[float]] = {side.side: [] for side in sides}
    for number in range(rounds):
        for side in sides[number % len(sides) :] + sides[: number % len(sides)]:
            _synchronize(devices)
            start = time.perf_counter()
            side(batch)
            _synchronize(devices)
            times[side.side].append(time.perf_counter() - start)
    base = times["one device"]
    return [
        {
            "model": name, "side": side.side,
            "time": statistics.median(a / b for a, b in zip(times[side.side], base, strict=True)),
            "ms": 1000 * statistics.median(times[side.side]),
            "first": peaks[side.side][0], "others": max((v for k, v in peaks[side.side].items() if k), default=0),
            "error": error_of(side.side.split(",")[0], model, devices[: len(side.devices)], 22),
        }
        for side in sides
    ]  # fmt: skip


def _synchronize(devices: Sequence[Any]) -> None:
    for one in devices:
        if torch.device(one).type == "cuda":
            torch.cuda.synchronize(one)


def shown(row: dict[str, Any]) -> dict[str, str]:
    """A row as the table has it."""
    others = row["others"]
    return {
        "model": row["model"],
        "side": row["side"],
        "time beside one device": f"{row['time']:.2f}",
        "ms an update": f"{row['ms']:.1f}",
        "first device, MiB": f"{row['first'] / 2**20:.2f}",
        "another device, MiB": f"{others / 2**20:.2f}" if others else "-",
        "first over another": f"{row['first'] / others:.2f}" if others else "-",
        "error of the gradient": f"{row['error']:.1e}",
    }


@click.command(help="Measures time, bytes on each device, and the gradient's error on an uneven batch.")
@click.option("--devices", default="cpu,cpu", show_default=True, help="Separated by commas, such as cuda:0,cuda:1.")
@click.option("--rounds", type=click.IntRange(min=1), default=15, show_default=True, help="Updates of each side.")
@click.option("--model", "models", type=click.Choice(list(SIZES)), multiple=True, help="All, if left out.")
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Also write the table here, as Markdown.")
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Write the unrounded figures here.")
def main(devices: str, rounds: int, models: tuple[str, ...], output: Path | None, json_path: Path | None) -> None:
    """Parses the options, measures, prints the table and writes the files."""
    torch.set_num_threads(1)
    used = devices.split(",")
    rows = [row for name in models or SIZES for row in measured(name, used, rounds)]
    known = facts(torch.device(used[0]))
    known["device"] = f"{known['device'].split(',')[0]}, {len(used)} devices ({devices}), one thread each, wall time"
    notes = [
        f"A causal language model of two blocks, {ROWS} texts of {TIME} tokens an update, 64 or 4000 classes. Time:",
        "the median over rounds of the time beside that of one device with the whole batch, in the same round. Bytes:",
        "the most that is alive on a device in one update, weights, gradients and the batch included. The error is",
        "that of the gradient of 22 texts of 3 to 32 tokens, beside float64. On the CPU the devices are threads of one",
        "machine that share its cores, and the schemes of the others are rebuilt; bytes are counted for each pretended",
        "device. One device in micro-batches of 4 shows what the smaller pieces cost by themselves.",
    ]
    page = markdown("Several devices in one process", known, notes, [shown(row) for row in rows])
    click.echo(page)
    if output is not None:
        write_text(output, page)
    if json_path is not None:
        write_json(json_path, known, rows)


if __name__ == "__main__":
    main()
