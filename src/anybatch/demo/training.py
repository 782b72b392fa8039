"""Trains the demonstration's model with ``anybatch.TrainStep``."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from anybatch.demo.facts import CurvePoint, TrainingCurve
from anybatch.demo.transformer import ByteTransformer, next_byte_loss
from anybatch.memory.meter import Recording, resident_bytes
from anybatch.records.memory import OTHER
from anybatch.records.plans import Plan
from anybatch.step import TrainStep

BITS_PER_NAT = 1 / math.log(2)

CLIP_NORM = 1.0
"""The norm of the gradient at most."""
_RATE = 1e-2  # at its highest
_WEIGHT_DECAY = 0.1
_WARM_UP = 0.05
_LOWEST_RATE = 0.02


@dataclass(frozen=True, slots=True)
class TrainingSettings:
    """How to train."""

    plan: Plan | None = None  # how a logical batch is run; ``None`` for ``micro_batch_size``
    micro_batch_size: int | None = None  # samples in a micro-batch at most
    seconds: float = 120.0  # how long; counts only where ``updates`` is ``None``
    updates: int | None = None  # how many updates; the run is then repeatable, for it does not look at the clock
    samples: int = 34  # sequences in a logical batch
    validations: int = 10  # how often to validate after the first time, evenly spread
    validation_samples: int = 256  # sequences of held-out text
    seed: int = 0  # decides the batches


def rate_factor(fraction: float) -> float:
    """The factor of the learning rate: a linear warm-up, then half a cosine.

    Source of the cosine: Loshchilov and Hutter, "SGDR" (2017), equation 5.

    Example:
        >>> rate_factor(0.05), round(rate_factor(0.525), 2), rate_factor(1.0)
        (1.0, 0.51, 0.02)
    """
    if fraction < _WARM_UP:
        return max(_LOWEST_RATE, fraction / _WARM_UP)
    cosine = (1 + math.cos(math.pi * min(1.0, (fraction - _WARM_UP) / (1 - _WARM_UP)))) / 2
    return _LOWEST_RATE + (1 - _LOWEST_RATE) * cosine


def cut_out(text: Tensor, starts: Tensor, context: int) -> dict[str, Tensor]:
    """Cuts sequences of bytes out of a text, and the same one byte ahead as ``"y"``.

    Example:
        >>> batch = cut_out(torch.arange(9), torch.tensor([0, 4]), 3)
        >>> batch["x"].tolist(), batch["y"].tolist()
        ([[0, 1, 2], [4, 5, 6]], [[1, 2, 3], [5, 6, 7]])
    """
    windows = text[starts[:, None] + torch.arange(context + 1)].long()
    return {"x": windows[:, :-1].contiguous(), "y": windows[:, 1:].contiguous()}


def as_tensor(text: bytes) -> Tensor:
    """Copies bytes into a uint8 tensor of shape ``[length]``."""
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def random_batch(text: Tensor, samples: int, context: int, generator: torch.Generator) -> dict[str, Tensor]:
    """Draws a logical batch: sequences from random places of a text."""
    return cut_out(text, torch.randint(len(text) - context, (samples,), generator=generator), context)


def first_batch(text: Tensor, samples: int, context: int, seed: int) -> dict[str, Tensor]:
    """Draws the logical batch that training begins with."""
    return random_batch(text, samples, context, torch.Generator().manual_seed(seed))


class TrainingRun:
    """One training from beginning to end, of a model in place, on bytes, validated on bytes held out."""

    def __init__(self, model: ByteTransformer, train: Tensor, validation: Tensor, settings: TrainingSettings) -> None:
        self._settings, self._model, self._train = settings, model, train
        starts = torch.linspace(0, len(validation) - model.context - 1, settings.validation_samples).long()
        self._validation = cut_out(validation, starts, model.context)
        self._generator = torch.Generator().manual_seed(settings.seed)
        self._began: float | None = None  # the scheduler asks for it as soon as it is made
        self.points: list[CurvePoint] = []
        self.losses: list[float] = []  # of the logical batches, in bits per byte
        self.is_stopped = False
        self._peak_bytes: int | None = None
        self._micro_batches = 0
        self._training_seconds = 0.0
        self._optimizer = make_optimizer(model)
        self._step = TrainStep(
            model, next_byte_loss, self._optimizer, micro_batch_size=settings.micro_batch_size, plan=settings.plan,
            clip_norm=CLIP_NORM,
            scheduler=torch.optim.lr_scheduler.LambdaLR(self._optimizer, lambda n: rate_factor(self._fraction(n))),
        )  # fmt: skip

    def run(self, on_validation: Callable[[CurvePoint], None] = lambda point: None) -> TrainingCurve:
        """Trains until the time or the updates are used up, or ``is_stopped`` is set."""
        self._began = time.perf_counter()
        on_validation(self._validate())
        due = 1
        while (fraction := self._fraction(len(self.losses))) < 1 and not self.is_stopped:
            if fraction * self._settings.validations >= due:
                due = math.floor(fraction * self._settings.validations) + 1
                on_validation(self._validate())
            self._update()
        if self.points[-1].updates < len(self.losses):
            on_validation(self._validate())
        is_early = self.is_stopped and fraction < 1
        return TrainingCurve(tuple(self.losses), tuple(self.points), self._peak_bytes, self._micro_batches, is_early)

    def _update(self) -> None:
        start = time.perf_counter()
        batch = random_batch(self._train, self._settings.samples, self._model.context, self._generator)
        # Counting slows an update down, so only one is counted: the second, when AdamW's state is there.
        if len(self.losses) == 1:
            recording = Recording()
            recording.register((*self._tensors(), *batch.values()), OTHER)
            with recording:
                result = self._step(batch)
            self._peak_bytes = recording.most
        else:
            result = self._step(batch)
        self.losses.append(result.loss * BITS_PER_NAT)
        self._micro_batches = result.micro_batches
        self._training_seconds += time.perf_counter() - start

    def _tensors(self) -> list[Tensor]:
        held = [value for state in self._optimizer.state.values() for value in state.values()]
        held += [*self._model.parameters(), *self._model.buffers(), *(p.grad for p in self._model.parameters())]
        return [one for one in held if isinstance(one, Tensor)]

    def _validate(self) -> CurvePoint:
        loss = self._step.evaluate(self._validation).loss * BITS_PER_NAT
        fresh = self.losses[self.points[-1].updates :] if self.points else []
        mean = sum(fresh) / len(fresh) if fresh else None
        elapsed, updates = self._elapsed(), len(self.losses)
        self.points.append(CurvePoint(elapsed, updates, mean, loss, self.tokens_per_second, resident_bytes()))
        return self.points[-1]

    def _fraction(self, updates: int) -> float:
        if self._settings.updates is not None:
            return updates / self._settings.updates
        return self._elapsed() / self._settings.seconds

    def _elapsed(self) -> float:
        return 0.0 if self._began is None else time.perf_counter() - self._began

    @property
    def tokens_per_second(self) -> float:
        """The speed of training alone, since it began."""
        tokens = len(self.losses) * self._settings.samples * self._model.context
        return tokens / self._training_seconds if tokens else 0.0


def make_optimizer(model: ByteTransformer) -> torch.optim.AdamW:
    """Makes the optimizer; its weight decay applies to matrices only, not to embeddings, norms and biases."""
    tables = {id(module.weight) for module in model.modules() if isinstance(module, torch.nn.Embedding)}
    decayed = [p for p in model.parameters() if p.dim() > 1 and id(p) not in tables]
    others = [p for p in model.parameters() if p.dim() < 2 or id(p) in tables]
    groups = [{"params": decayed, "weight_decay": _WEIGHT_DECAY}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=_RATE, betas=(0.9, 0.95))
