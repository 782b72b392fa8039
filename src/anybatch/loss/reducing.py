"""What a pass asks of the other processes that take the same gradient; on one process there is nothing to ask."""

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NamedTuple

import torch

from anybatch.loss.sums import Sums, added
from anybatch.loss.weights import Weights
from anybatch.tensors.graph import OutsideLeaves

Leaves = Sequence[torch.Tensor | None]
"""Tensors that get a gradient, by position; ``None`` for anything else."""


class Stage(IntEnum):
    """What processes tell each other, in the order of a logical batch; each may leave out what it has nothing for."""

    BEGIN, NAMES, FORWARD, INSIDE, GATHERED, READY, TOTALS, RETURNED, END, PROOF = range(10)


class Shortage(NamedTuple):
    """What all processes know after memory ran out on one of them."""

    tried: float  # the smallest of the sizes that did not fit
    is_final: bool  # whether a process has nothing smaller left to try
    where: str  # the process and what ran there
    text: str  # of its error
    # whether it is; otherwise processes that have a part of each parameter were about to run other units, and all start
    # again with everything gathered
    is_memory: bool = True


class ShortageElsewhere(Exception):  # no error of this process, and nobody but a retry sees it
    """Memory ran out on another process, so this one starts again with it."""

    def __init__(self, shortage: Shortage) -> None:
        super().__init__(shortage.text)
        self.shortage = shortage


@dataclass
class Joint:
    """What an encoder gave for the samples of all processes."""

    outputs: Any  # in the containers of this process; its own value where it has no samples
    leaves: Leaves  # the tensors in it that get a gradient, by position
    rows: int  # samples of all processes
    start: int = 0  # of this one's among them
    batches: Sequence[Any] = ()  # of each process, if the loss looks at them
    place: int = 0  # of this process among those that have samples; they share out the blocks of the loss
    of: int = 1  # how many these are
    sum_: Callable[[], None] = lambda: None  # sums the gradients of the leaves over what all processes computed


class Reducer:
    """One process alone: what it has is what there is."""

    is_shared = False  # whether other processes take the same gradient
    is_sharded = False  # whether parameters lie on several processes, so that the forward has others than the optimizer
    # whether what is differentiated now is there only so that processes communicate equally often
    counts_nothing = False
    # whether processes communicate within forwards and backwards, so that each has to run as many
    keeps_step = False

    def call(
        self, verb: str, parameters: Sequence[torch.Tensor], *, updates: int = 0, adds: bool = False,
        settings: Callable[[], Mapping[str, str]] | None = None,
    ) -> AbstractContextManager[None]:  # fmt: skip
        """A context for one logical batch; an error that leaves it reaches the others.

        Args:
            adds: whether the gradients that are there stay in the sum.
            settings: gives what the update is made with, which has to be the same everywhere.
        """
        return contextlib.nullcontext()

    def listen(self) -> None:
        """Says that another gradient of the same logical batch begins."""

    def apart(self, modules: Iterable[torch.nn.Module]) -> AbstractContextManager[None]:
        """A context in which no module communicates by itself."""
        return contextlib.nullcontext()

    def bytes_beside(self, modules: Sequence[torch.nn.Module], parameters: Sequence[torch.Tensor]) -> int:
        """The bytes that summing over processes takes beside the step."""
        return 0

    def known_leaves(self, parameters: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """What a forward may have in the place of parameters; is called within ``apart``."""
        return parameters

    def weights(self, local: Weights, rows: int, *, can_pad: bool = False) -> Weights:
        """Weighs the micro-batches by the counts of all processes."""
        return local

    def when_begun(self, function: Callable[[], None], *, is_wanted: bool) -> None:
        """Has something done by all processes together, once they have begun a logical batch, if one wants it."""

    def hear(self, mine: Mapping[str, Any], stage: Stage = Stage.PROOF) -> Sequence[Mapping[str, Any]]:
        """What every process tells that comes to a stage."""
        return [mine]

    def stand_ins(self, own: Callable[[], Any]) -> list[Any]:
        """Micro-batches that count nothing, where each process has to run as many as any other."""
        return []

    def totals(self, local: Mapping[str, float], stage: Stage) -> dict[str, float]:
        """Adds up counts over the processes."""
        return added(one["counts"] for one in self.hear({"counts": dict(local)}, stage))

    def gathered(self, outputs: Any, gets: Leaves, batch: Any) -> Joint:
        """The outputs of the samples of all processes.

        Args:
            gets: its leaves that get a gradient, by position; none where there are no samples.
            batch: of this process, if the loss looks at it, else ``None``.
        """
        rows = next((len(leaf) for leaf in gets if leaf is not None), 0)
        return Joint(outputs, gets, rows)

    def rows(self, local: int) -> int:
        """The samples of all processes together."""
        return local

    def reduce_(self, sums: Sums, parameters: Sequence[torch.Tensor], outside: OutsideLeaves | None = None) -> None:
        """Sums what was added up, and the gradients, over the processes.

        Args:
            parameters: whose ``.grad`` is summed in place; none if there was no gradient to take.
        """

    @property
    def can_start_again(self) -> bool:
        """Whether an attempt that ran out of memory can still be taken back."""
        return True

    def agree(self, tried: float, *, is_final: bool, where: str, text: str) -> Shortage:
        """Tells the others that memory ran out here."""
        return Shortage(tried, is_final, where, text)


ALONE = Reducer()
