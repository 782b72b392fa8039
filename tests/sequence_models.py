"""Models and losses over time for the tests of their plans; every factory gives the same numbers each time."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import anybatch

WIDTH = 12
CLASSES = 5


class Unrolled(nn.Module):
    """A cell that is unrolled in Python, and an output layer."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.GRUCell(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)


class Recurrent(nn.Module):
    """A recurrent layer and an output layer."""

    def __init__(self, kind: type[nn.LSTM] | type[nn.GRU]) -> None:
        super().__init__()
        self.rnn, self.head = kind(WIDTH, 16, batch_first=True), nn.Linear(16, CLASSES)


class Plain(nn.Module):
    """A state that is mixed with each step by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.again = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)
        self.head = nn.Linear(WIDTH, CLASSES)


@dataclass(frozen=True, eq=False)
class SequenceSubject:
    """One thing to plan for.

    Args:
        model: a fresh one, in training mode.
        loss_fn: over time.
        batch: makes a logical batch of so many sequences of so many steps.
        tolerance: how far a predicted peak may be from the measured one, relative.
        options: further arguments of ``TrainStep``.
    """

    model: nn.Module
    loss_fn: anybatch.OverTime
    batch: Callable[[int, int], Any]
    tolerance: float = 0.005
    options: dict[str, Any] = field(default_factory=dict)

    def optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.model.parameters(), lr=1e-3)

    def step(self, **options: Any) -> anybatch.TrainStep:
        return anybatch.TrainStep(self.model, self.loss_fn, self.optimizer(), **{**self.options, **options})


def labelled(n: int, steps: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {
        "x": torch.randn(n, steps, WIDTH, generator=generator),
        "y": torch.randint(CLASSES, (n, steps), generator=generator),
    }


def zeros(model: Any, batch: Any) -> Tensor:
    return torch.zeros(len(batch["x"]), WIDTH, dtype=batch["x"].dtype)


def each(model: Any, outputs: Tensor, chunk: Any) -> Tensor:
    return F.cross_entropy(model.head(outputs).flatten(0, 1), chunk["y"].flatten())


def by_cell(model: Any, chunk: Any, state: Tensor) -> Any:
    outputs = []
    for step in chunk["x"].unbind(1):
        state = model.cell(step, state)
        outputs.append(state)
    return lambda: each(model, torch.stack(outputs, 1), chunk), state


def by_hand(model: Any, chunk: Any, state: Tensor) -> Any:
    total = torch.zeros((), dtype=state.dtype)
    for step, label in zip(chunk["x"].unbind(1), chunk["y"].unbind(1), strict=True):
        state = torch.tanh(model.into(step) + model.again(state))
        total = total + F.cross_entropy(model.head(state), label, reduction="sum")
    return anybatch.Mean(total, chunk["y"].numel()), state


def by_layer(model: Any, chunk: Any, state: Any) -> Any:
    outputs, state = model.rnn(chunk["x"], state)
    return lambda: each(model, outputs, chunk), state


def zeros_of_lstm(model: Any, batch: Any) -> tuple[Tensor, Tensor]:
    made = torch.zeros(1, len(batch["x"]), 16, dtype=batch["x"].dtype)
    return made, made.clone()


def zeros_of_gru(model: Any, batch: Any) -> Tensor:
    return torch.zeros(1, len(batch["x"]), 16, dtype=batch["x"].dtype)


def last_class(model: Any, state: Tensor, batch: Any) -> Tensor:
    return F.cross_entropy(model.head(state), batch["y"][:, -1])


def no_loss(model: Any, chunk: Any, state: Tensor) -> Any:
    return None, by_cell(model, chunk, state)[1]


def cell() -> SequenceSubject:
    return SequenceSubject(Unrolled(), anybatch.OverTime(by_cell, zeros), labelled)


def hand() -> SequenceSubject:
    return SequenceSubject(Plain(), anybatch.OverTime(by_hand, zeros), labelled)


def last() -> SequenceSubject:
    return SequenceSubject(Unrolled(), anybatch.OverTime(no_loss, zeros, last=last_class), labelled)


def carried() -> SequenceSubject:
    return SequenceSubject(Unrolled(), anybatch.OverTime(by_cell, zeros, carry=True, state_dim=0), labelled)


def lstm() -> SequenceSubject:
    model = Recurrent(nn.LSTM)
    return SequenceSubject(model, anybatch.OverTime(by_layer, zeros_of_lstm, state_dim=1), labelled, tolerance=0.02)


def gru() -> SequenceSubject:
    model = Recurrent(nn.GRU)
    return SequenceSubject(model, anybatch.OverTime(by_layer, zeros_of_gru, state_dim=1), labelled, tolerance=0.02)


def truncated() -> SequenceSubject:
    return SequenceSubject(Unrolled(), anybatch.OverTime(by_cell, zeros, chunk=20, mode="truncated"), labelled)


FACTORIES: dict[str, Callable[[], SequenceSubject]] = {
    factory.__name__: factory for factory in (cell, hand, last, carried, lstm, gru, truncated)
}


def subject_of(name: str) -> SequenceSubject:
    """A fresh one; torch's random state stays as it is."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return FACTORIES[name]()
