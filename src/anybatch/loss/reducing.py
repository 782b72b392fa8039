"""What a pass asks of the other processes that take the same gradient; on one process there is nothing to ask."""

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, TypeVar

import torch

from anybatch.loss.sums import Sums
from anybatch.loss.weights import Weights
from anybatch.tensors.graph import OutsideLeaves

T = TypeVar("T")


class Shortage(NamedTuple):
    """What all processes know after memory ran out on one of them.

    Args:
        tried: the smallest of the sizes that did not fit.
        is_final: whether a process has nothing smaller left to try.
        where: the process and what ran there.
        text: of its error.
        is_memory: whether it is; otherwise processes that have a part of each parameter were about to run other units,
            and all start again with everything gathered.
    """

    tried: float
    is_final: bool
    where: str
    text: str
    is_memory: bool = True


class ShortageElsewhere(Exception):  # no error of this process, and nobody but a retry sees it
    """Memory ran out on another process, so this one starts again with it.

    Args:
        shortage: what was agreed on.
    """

    def __init__(self, shortage: Shortage) -> None:
        super().__init__(shortage.text)
        self.shortage = shortage


class Joint(NamedTuple):
    """What an encoder gave for the samples of all processes.

    Args:
        outputs: in the containers of this process; its own value where it has no samples.
        leaves: the tensors in it that get a gradient, by position.
        rows: samples of all processes.
        start: of this one's among them.
        batches: of each process, if the loss looks at them.
    """

    outputs: Any
    leaves: list[torch.Tensor | None]
    rows: int
    start: int
    batches: list[Any]


class Reducer:
    """One process alone: what it has is what there is.

    Attributes:
        is_shared: whether other processes take the same gradient.
        is_sharded: whether parameters lie on several processes, so that the forward has others than the optimizer.
        counts_nothing: whether what is differentiated now is there only so that processes communicate equally often.
    """

    is_shared = False
    is_sharded = False
    counts_nothing = False

    @property
    def keeps_step(self) -> bool:
        """Whether processes communicate within forwards and backwards, so that each has to run as many."""
        return False

    def call(
        self, verb: str, parameters: Sequence[torch.Tensor], *, updates: int = 0, adds: bool = False,
        settings: Callable[[], Mapping[str, str]] | None = None,
    ) -> AbstractContextManager[None]:  # fmt: skip
        """A context for one logical batch; an error that leaves it reaches the others.

        Args:
            verb: what the user called.
            parameters: whose gradients are summed.
            updates: how many updates were applied before.
            adds: whether the gradients that are there stay in the sum.
            settings: gives what the update is made with, which has to be the same everywhere.
        """
        return contextlib.nullcontext()

    def listen(self) -> None:
        """Says that another gradient of the same logical batch begins."""

    def apart(self, modules: Iterable[torch.nn.Module], *, differentiate: bool = True) -> AbstractContextManager[None]:
        """A context in which no module communicates by itself.

        Args:
            modules: that the loss runs through.
            differentiate: whether gradients are taken in it.
        """
        return contextlib.nullcontext()

    def bytes_beside(self, modules: Sequence[torch.nn.Module], parameters: Sequence[torch.Tensor]) -> int:
        """The bytes that summing over processes takes beside the step.

        Args:
            modules: that the loss runs through.
            parameters: whose gradients are summed.
        """
        return 0

    def in_forward(self, parameters: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """The parameters that get the gradients of a pass; is called within ``apart``.

        Args:
            parameters: as the optimizer has them.
        """
        return parameters

    def known_leaves(self, parameters: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """What a forward may have in the place of parameters; is called within ``apart``.

        Args:
            parameters: as the optimizer has them.
        """
        return parameters

    def weights(self, local: Weights, rows: int, *, can_pad: bool = False) -> Weights:
        """Weighs the micro-batches by the counts of all processes.

        Args:
            local: the counts of this one.
            rows: its samples.
            can_pad: whether micro-batches that count nothing may be added.
        """
        return local

    def when_begun(self, function: Callable[[], None], *, is_wanted: bool) -> None:
        """Has something done by all processes together, once they have begun a logical batch, if one wants it.

        Args:
            function: what is done.
            is_wanted: whether this one does.
        """

    def hear(self, mine: Mapping[str, Any]) -> list[Mapping[str, Any]]:
        """What every process tells.

        Args:
            mine: what this one does: plain values.
        """
        return [mine]

    def stand_ins(self, own: Callable[[], Any]) -> list[Any]:
        """Micro-batches that count nothing, where each process has to run as many as any other.

        Args:
            own: gives a micro-batch of this process that is run in any case, ``None`` where there is none.
        """
        return []

    def forward_weights(self, local: Weights) -> Weights:
        """The same for counts that a forward gave.

        Args:
            local: the counts of this process.
        """
        return local

    def totals(self, local: Mapping[str, float]) -> dict[str, float]:
        """Adds up counts that were known only at the end.

        Args:
            local: by the name of the loss.
        """
        return dict(local)

    def gathered(self, outputs: Any, gets: Sequence[torch.Tensor | None], batch: Any) -> Joint:
        """The outputs of the samples of all processes.

        Args:
            outputs: of this one.
            gets: its leaves that get a gradient, by position; none where there are no samples.
            batch: of this process, if the loss looks at it, else ``None``.
        """
        rows = next((len(leaf) for leaf in gets if leaf is not None), 0)
        return Joint(outputs, list(gets), rows, 0, [] if batch is None else [batch])

    def shared_out(self, blocks: Sequence[T]) -> list[T]:
        """The blocks of a loss over all samples that this process computes.

        Args:
            blocks: all.
        """
        return list(blocks)

    def given_back(self, leaves: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """The gradients of gathered outputs, summed over what all processes computed.

        Args:
            leaves: whose ``.grad`` is of this process.
        """
        return [None if leaf is None else leaf.grad for leaf in leaves]

    def rows(self, local: int) -> int:
        """The samples of all processes together.

        Args:
            local: of this one.
        """
        return local

    def telling(self, facts: Callable[[Weights, Sums], Any]) -> AbstractContextManager[list[Any]]:
        """A context in which every process hears some facts of every other, together with the sums.

        Args:
            facts: gives plain values once all micro-batches have run, from the weights and what was added up.

        Returns:
            A context with what each process told, empty before that, or where there is one only.
        """
        return contextlib.nullcontext([])

    def reduce_(self, sums: Sums, parameters: Sequence[torch.Tensor], outside: OutsideLeaves | None = None) -> None:
        """Sums what was added up, and the gradients, over the processes.

        Args:
            sums: of this process.
            parameters: whose ``.grad`` is summed in place; none if there was no gradient to take.
            outside: knows leaves that are not among them.
        """

    @property
    def can_start_again(self) -> bool:
        """Whether an attempt that ran out of memory can still be taken back."""
        return True

    def agree(self, tried: float, *, is_final: bool, where: str, text: str) -> Shortage:
        """Tells the others that memory ran out here.

        Args:
            tried: the size of the micro-batches.
            is_final: whether nothing smaller is left to try.
            where: what was running.
            text: of the error.
        """
        return Shortage(tried, is_final, where, text)


ALONE = Reducer()
