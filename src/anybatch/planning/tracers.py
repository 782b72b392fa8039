"""Traces on fake tensors as long as that goes well, and for real from then on."""

import logging
import time
from collections.abc import Sequence

from anybatch.errors import AnyBatchError, LossError
from anybatch.planning.leftovers import clear_away
from anybatch.planning.recipe import Recipe
from anybatch.planning.running import run_for_real
from anybatch.planning.subjects import Subject
from anybatch.planning.tracing import Before, PassTrace, trace_pass
from anybatch.tensors.batches import Part
from anybatch.tensors.fakemode import Remembered
from anybatch.tensors.fakes import Fakes
from anybatch.tensors.meter import OverBudget, Recording
from anybatch.tensors.modules import is_scripted, modules_of
from anybatch.update.transaction import Failure, is_out_of_memory

logger = logging.getLogger(__name__)


_TRACES = 2  # what a first one fills, such as a cache, is there in all later steps
_JIT_RUNS = 2  # torch.jit looks at what runs before it optimizes, and may fail meanwhile if something looks at it


class NotFake(Exception):  # not an error of the user's: the caller does the same again, for real
    """The step can't run on fake tensors."""


class Tracer:
    """Traces micro-batches of a subject.

    Args:
        subject: what is planned.
        blocks: the names of its blocks.
        kind: what writes down.
        is_fake: whether fake tensors are tried.
        may_probe: whether micro-batches may run for real.

    Attributes:
        is_fake: whether fake tensors are used, or real probes since they can't be.
        limit: bytes that a real run stays within, or else is stopped.
    """

    def __init__(
        self, subject: Subject, blocks: Sequence[str], kind: type[Recording], *, is_fake: bool, may_probe: bool
    ) -> None:
        self.is_fake = is_fake
        self.limit: int | None = None
        self._subject = subject
        self._blocks = blocks
        self._kind = kind
        self._may_probe = may_probe
        self._is_warm = False
        self._left: list[str] = []
        self._remembered = Remembered()

    def trace(self, part: Part, levers: Recipe, before: Before) -> PassTrace:
        """Traces one micro-batch.

        Args:
            part: its samples.
            levers: what is traded for memory.
            before: what was before it.

        Raises:
            NotFake: it has to be traced for real, as everything has from now on.
            LossError: it can be traced in neither way.
        """
        if not self.is_fake:
            return self._traced_for_real(part, levers, before)
        failure: Failure | None = None
        try:
            for _ in range(_TRACES):
                trace = self._traced(part, levers, before, fakes := Fakes(self._remembered))
                kept, self._left = self._clear_away(fakes) if trace.leaves_fakes else (0, [])
                if not kept or self._left:
                    break
        except AnyBatchError:
            raise
        except Exception as error:
            if not self._may_probe or is_out_of_memory(error):
                raise
            failure, why = Failure(error), _first_line(error)
        if failure is not None:
            failure.release()  # outside of the except block, where no traceback holds tensors any more
            _, self._left = self._clear_away(fakes)
            self._give_up(why)
        if self._left and self._may_probe:
            self._give_up(f"it keeps tensors of the trace: {self._left[0]}")
        return trace

    def _clear_away(self, fakes: Fakes) -> tuple[int, list[str]]:
        return clear_away(fakes, self._subject.settings.device)

    def _traced(self, part: Part, levers: Recipe, before: Before, fakes: Fakes) -> PassTrace:
        return trace_pass(
            self._subject, part, levers, self._blocks, before=before, fake=True, kind=self._kind, fakes=fakes
        )

    def _give_up(self, why: str) -> None:
        logger.info("this step can't run on fake tensors (%s); few samples run for real instead", why)
        self.is_fake = False
        self._subject.habits.looks_at_numbers = True
        raise NotFake

    def _traced_for_real(self, part: Part, levers: Recipe, before: Before) -> PassTrace:
        if not self._is_warm and any(map(is_scripted, modules_of(*self._subject.roots))):
            for _ in range(_JIT_RUNS):
                run_for_real(self._subject, part, Recipe(), clock=time.perf_counter)
        self._is_warm = True
        try:
            return trace_pass(
                self._subject, part, levers, self._blocks, before=before, fake=False, kind=self._kind, limit=self.limit
            )  # fmt: skip
        except Exception as error:
            if not self._left or isinstance(error, (AnyBatchError, OverBudget)) or is_out_of_memory(error):
                raise
            raise LossError(
                "the step keeps tensors that it made while it was traced, and fails with them now "
                f"({_first_line(error)}); got {'; '.join(self._left[:3])}. Expected that what a step keeps "
                "for the next one is a plain attribute of a module, or is made of shapes and not of weights, samples "
                "or random numbers. Empty that place now, and run the step once before it is planned, so that it is "
                "filled already; or give micro_batch_size= instead of memory="
            ) from error


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
