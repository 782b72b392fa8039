"""Small training runs in which steps that the doctor sees and steps that it does not see take turns."""

from __future__ import annotations

import gc
import os
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from types import FrameType
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

import anybatch
from anybatch.doctor.recording.patches import _ABOVE
from anybatch.records.events import Ended

COUNTED = range(40, 48)
"""Steps whose calls are counted; none is measured by the doctor."""
WARM = 12
"""Steps after each change of sides that are not timed: Python takes some calls to find its way through exchanged code
again, which a run that goes on and on does once. None of them is one that the doctor measures."""
FIRST_TURN, TURN = 26, 88
"""Timed steps before the other side's turn: few, so that what else the machine does meets both, and with ``WARM`` a
multiple of the steps between two samples, so that no sample falls into steps that are not timed."""


def turn_of(step: int) -> int:
    """The number of the turn that a timed step belongs to."""
    return (step - FIRST_TURN) // TURN + 1


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))


def chain() -> nn.Module:
    return nn.Sequential(*[nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(200)])


class Transformer(nn.Module):
    """Six blocks of width 256 over 2000 tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(2000, 256)
        layer = nn.TransformerEncoderLayer(256, 8, 1024, dropout=0.0, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, 6, enable_nested_tensor=False)
        self.head = nn.Linear(256, 2000)

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.head(self.blocks(self.tokens(ids))).transpose(1, 2)
        return logits


def convolutions() -> nn.Module:
    layers: list[nn.Module] = [nn.Conv2d(3, 32, 3, padding=1)]
    for _ in range(16):
        layers += [nn.Conv2d(32, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))


def rows(*shape: int, classes: int, width: int = 0) -> Callable[[], tuple[Tensor, Tensor]]:
    """Batches that are drawn once: tokens if ``width`` is given, else numbers."""

    def draw() -> tuple[Tensor, Tensor]:
        if width:
            return torch.randint(classes, (*shape, width)), torch.randint(classes, (*shape, width))
        return torch.randn(*shape), torch.randint(classes, (shape[0],))

    return draw


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], tuple[Tensor, Tensor]]]] = {
    "MLP": (perceptron, rows(64, 784, classes=10)),
    "MLP, clipped, with a schedule": (perceptron, rows(64, 784, classes=10)),
    "MLP, scaled, clipped": (perceptron, rows(64, 784, classes=10)),
    "200 layers": (chain, rows(32, 32, classes=10)),
    "transformer": (Transformer, rows(4, classes=2000, width=64)),
    "CNN": (convolutions, rows(16, 3, 32, 32, classes=10)),
}
CLIPPED = frozenset({"MLP, clipped, with a schedule", "MLP, scaled, clipped"})
"""Those whose loop clips gradients and steps a schedule."""
SCALED = frozenset({"MLP, scaled, clipped"})
"""Those whose loop has a ``GradScaler`` too."""


class Ending(NamedTuple):
    """The end of a run.

    Args:
        seconds: CPU time of taking the doctor off, and of what it then writes.
        own: the share of its run that the doctor says it took.
        sampled_less: samples that it left out to stay cheap.
        findings: what it said.
    """

    seconds: float
    own: float
    sampled_less: int
    findings: tuple[str, ...]


class Training:
    """An ordinary loop over one batch.

    Args:
        name: of the model.
    """

    def __init__(self, name: str) -> None:
        torch.set_num_threads(1)
        torch.set_flush_denormal(True)
        torch.manual_seed(0)
        build, draw = MODELS[name]
        self.model, self.batch = build(), draw()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.schedule = None
        if name in CLIPPED:
            self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 1 / (1 + 1e-4 * step))
        self.scaler = torch.amp.GradScaler("cpu") if name in SCALED else None
        self.doctor: anybatch.Doctor | None = None

    def attach(self, record: Path) -> None:
        """Puts a doctor in place that writes what it sees to a file, as the command does."""
        self.doctor = anybatch.Doctor(self.model, self.optimizer, path=record)
        self.doctor.attach()

    def step(self) -> None:
        """Trains on the batch once."""
        inputs, labels = self.batch
        loss = F.cross_entropy(self.model(inputs), labels)
        self.optimizer.zero_grad()
        if self.scaler is None:
            loss.backward()
        else:
            self.scaler.scale(loss).backward()
            self.scaler.unscale_(self.optimizer)
        if self.schedule is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        if self.schedule is not None:
            self.schedule.step()

    def end(self) -> Ending:
        """Takes the doctor off, if there is one."""
        start = time.process_time()
        if self.doctor is None:
            return Ending(0.0, 0.0, 0, ())
        self.doctor.detach(ask=False)  # what questions take, memory.py says
        seconds = time.process_time() - start
        self.doctor.close()
        (ended,) = self.doctor.run.of(Ended)
        findings = tuple(finding.name for finding in self.doctor.findings)
        return Ending(seconds, ended.own_seconds / ended.seconds, ended.thinned, findings)


class Aside:
    """Takes all that a doctor has put in place off for a while, and puts it back as it was."""

    def __init__(self) -> None:
        self._back: list[Callable[[], None]] = []

    def take(self) -> None:
        """From now on steps are what they are without a doctor, in the same process and on the same tensors."""
        for one in [one for above in _ABOVE.values() for one in reversed(above)]:
            one.function.__code__ = one.own
            self._back.append(partial(setattr, one.function, "__code__", one.code))
        for hooks in (_global_optimizer_pre_hooks, _global_optimizer_post_hooks):
            self._back.append(partial(hooks.update, dict(hooks)))
            hooks.clear()

    def give_back(self) -> None:
        """What was taken off is there again."""
        while self._back:
            self._back.pop()()


class Times(NamedTuple):
    """CPU seconds of steps that took turns in one process.

    Args:
        own: of each step that the doctor saw, the first with attaching.
        plain: of each step that it did not.
        ending: how the run ended.
    """

    own: list[float]
    plain: list[float]
    ending: Ending


def in_turn(name: str, steps: int, record: Path) -> Times:
    """Trains one model: some steps that the doctor sees, as many that it does not, and so on.

    Args:
        name: of the model.
        steps: of each kind.
        record: for the doctor to write to.
    """
    warm = Training(name)
    warm.attach(Path(f"{record}.warm"))  # what is loaded at first use
    for _ in range(12):
        warm.step()
    warm.end()
    del warm
    gc.collect()
    training = Training(name)
    aside, own, plain = None, list[float](), list[float]()
    while len(own) < steps:
        turn = min(TURN if aside else FIRST_TURN, steps - len(own))
        if aside is not None:
            _some_steps(training, [], WARM, 0.0)
        start = time.process_time()
        if aside is None:
            training.attach(record)
            aside = Aside()
        _some_steps(training, own, turn, start)
        since = time.perf_counter()
        aside.take()
        counter, backwards = training.doctor._journal.counter, training.doctor._backwards
        at, step = counter.at, counter.step
        _some_steps(training, [], WARM, 0.0)
        _some_steps(training, plain, turn, time.process_time())
        if (counter.at, counter.step, training.doctor._backwards) != (at, step, backwards):
            raise RuntimeError("got facts of steps that the doctor should not have seen; mend Aside")
        aside.give_back()
        training.doctor._started += time.perf_counter() - since  # else it takes these for time of its run
    return Times(own, plain, training.end())


def _some_steps(training: Training, times: list[float], steps: int, start: float) -> None:
    for _ in range(steps):
        training.step()
        now = time.process_time()
        times.append(now - start)
        start = now


def worker(pipe: Connection, name: str, steps: int, record: Path) -> None:
    """Sends the times of one run, on one core.

    Args:
        pipe: where they go.
        name: of the model.
        steps: of each kind.
        record: for the doctor to write to.
    """
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    pipe.send(in_turn(name, steps, record))


def calls(name: str, record: Path) -> float:
    """How many of the doctor's functions a step calls that it does not measure, in the median.

    The record is written in a step now and then, which the time that is measured tells.
    """
    training, counts = Training(name), list[int]()

    def see(frame: FrameType, event: str, argument: object) -> None:
        file = frame.f_code.co_filename
        counts[-1] += event == "call" and ("anybatch/doctor" in file or file.startswith("<anybatch doctor"))

    training.attach(record)
    for step in range(COUNTED.stop):
        if step == COUNTED.start:
            sys.setprofile(see)
        counts.append(0)
        training.step()
    sys.setprofile(None)
    training.end()
    return statistics.median(counts[COUNTED.start :])
