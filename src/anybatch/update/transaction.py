"""A logical batch counts once: what is put back when an attempt fails, and the next smaller attempt."""

import contextlib
import gc
import logging
import math
import numbers
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Literal

import torch
from torch.nn.parameter import is_lazy

from anybatch.accelerators import release_cache
from anybatch.batch.batches import Part, Splittable
from anybatch.errors import DoesNotFit, NotSplittable, warn
from anybatch.loss.losses import as_over_time
from anybatch.loss.reducing import ALONE, Reducer, Shortage, ShortageElsewhere
from anybatch.records.results import Attempt
from anybatch.tensors.modules import devices_among, modules_of
from anybatch.tensors.randomness import RandomState

logger = logging.getLogger(__name__)

_OUT_OF_MEMORY_TEXTS = (
    "out of memory",
    "can't allocate memory",
    "not enough memory: you tried",  # of the CPU on Windows
    "std::bad_alloc",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_NOT_SUPPORTED",  # what cuDNN says where it found no room to work in
    "PT_DEVMEM Allocation failed",  # of HPU
)
# Of the driver, which raises one of its own since torch 2.9; not errors of others that were made from RuntimeError.
_KINDS = (RuntimeError, getattr(torch, "AcceleratorError", RuntimeError))


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory ran out, on a device or on the host.

    It is known by its class where it has one of its own, else by the texts of the CPU allocator, cuBLAS and cuDNN.
    """
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return type(error) in _KINDS and any(text in str(error) for text in _OUT_OF_MEMORY_TEXTS)


class Snapshot:
    """What a forward changes beside gradients: random state, buffers, and a state that a loss carries.

    Args:
        devices: whose random generators are kept; ``None`` for those where parameters of the models lie.
        loss_fn: may carry a state from batch to batch.
        generators: what reads and what sets the state of other random generators.
    """

    def __init__(
        self,
        models: Sequence[torch.nn.Module],
        devices: Iterable[torch.device] | None = (),
        loss_fn: Any = None,
        generators: Iterable[tuple[Callable[[], Any], Callable[[Any], object]]] = (),
    ) -> None:
        self._over_time = as_over_time(loss_fn)
        self._carried = None if self._over_time is None else self._over_time.carried
        self.models, self.modules = models, (modules := modules_of(*models))
        self._random = RandomState(devices_among(modules) if devices is None else devices)
        self._own = [(put_back, read()) for read, put_back in generators] if generators else []
        self._buffers: list[tuple[dict[str, torch.Tensor | None], str, torch.Tensor | None, torch.Tensor | None]] = []
        self._versions: list[tuple[torch.Tensor, int]] = []
        for module in modules:
            if buffers := module._buffers:
                for name, buffer in buffers.items():
                    is_there = not (buffer is None or is_lazy(buffer) or buffer.is_meta)
                    value = buffer.detach().clone() if is_there and buffer is not None else None
                    self._buffers.append((buffers, name, buffer, value))
            for weight in module._parameters.values():
                if weight is not None and not is_lazy(weight) and not weight.is_inference():
                    self._versions.append((weight, weight._version))
        self._was_told = False

    @contextlib.contextmanager
    def weights_put_back(self) -> Iterator[None]:
        """Counts no writes to weights of a block that puts these back itself."""
        try:
            yield
        finally:
            self._versions = [(weight, weight._version) for weight, _ in self._versions]

    def restore(self, *, warns: bool = True) -> None:
        """Puts everything back, bitwise; can be called again.

        If it warns, weights that were written to are reported, since nobody puts these back.
        """
        self._random.restore()
        for put_back, state in self._own:
            put_back(state)
        if self._over_time is not None:
            self._over_time.carried = self._carried
        with torch.no_grad():
            for home, name, buffer, value in self._buffers:
                home[name] = buffer
                if buffer is not None and value is not None:
                    if buffer.shape != value.shape:  # an observer makes room in its first forward
                        buffer.resize_(value.shape)
                    buffer.copy_(value)
        written = sum(weight._version != version for weight, version in self._versions)
        if written and warns and not self._was_told:
            self._was_told = True
            warn(
                f"the forward pass or the loss wrote to {written} {'weight' if written == 1 else 'weights'} in place, "
                "not rolled back; a retry on the same samples writes to them again. Update such weights once per step, "
                "after it"
            )


class SizeLimit:
    """The largest micro-batch that is tried: halved when memory runs out, doubled again after a quiet while.

    Args:
        ceiling: what the user asked for, in samples or in cost; ``None`` for the whole batch.
    """

    PATIENCE = 32
    MOST_PATIENCE = 1024

    def __init__(self, ceiling: float | None) -> None:
        if ceiling is not None:  # a number of NumPy's would be saved as one
            ceiling = int(ceiling) if isinstance(ceiling, numbers.Integral) else float(ceiling)
        self.ceiling = ceiling
        self.value = ceiling
        # a smaller size for the next logical batch alone, which someone wants to see in parts
        self.once: float | None = None
        self._patience = self.PATIENCE
        self._quiet = 0
        self._grew = False

    def shrink(self, tried: float) -> None:
        """Halves the size after it ran out of memory."""
        self.value = math.ceil(tried / 2)
        self._quiet = 0
        # It was the growth that ran out of memory: the next one waits twice as long.
        if self._grew:
            self._patience = min(2 * self._patience, self.MOST_PATIENCE)
            self._grew = False

    def shrink_with(self, agreed: float, own: float | None) -> None:
        """Becomes smaller together with the other processes that take the same gradient.

        Args:
            agreed: the smallest of the sizes that did not fit.
            own: what ran out of memory on this process; ``None`` if nothing did.
        """
        # Half of twice its own size is its own size: a process that is smaller already stays so, and does not grow.
        self.shrink(min(agreed, 2 * self.value) if self.value else agreed)

    def gather(self) -> None:
        """Hears that a model which lies in parts is gathered as a whole from now on."""

    def relieve(self) -> bool:
        """Makes micro-batches of one sample need less, where there is a way; says whether there was."""
        return False

    def look_again(self) -> None:
        """Hears that the step may run other operations from now on, which may need more."""

    def resolve(self, largest: float) -> None:
        """Notes a logical batch that went through, and grows if it was quiet for long enough."""
        if self.value is not None and self.value != self.ceiling:
            self._note_quiet(largest)

    def _note_quiet(self, largest: float) -> None:
        self._quiet += 1
        if self._quiet < self._patience:
            return
        if self._grew:  # the last growth has held
            self._patience = self.PATIENCE
        self._grow(largest)
        self._quiet, self._grew = 0, True

    def _grow(self, largest: float) -> None:
        grown = 2 * (self.value or largest)
        self.value = min(grown, self.ceiling) if self.ceiling is not None else grown if grown < largest else None
        logger.info(
            "no out-of-memory error for a while: the micro-batch size grows to %s", self.value or "the whole batch"
        )

    def state_dict(self) -> dict[str, Any]:
        """The size and how long it was quiet."""
        return {"value": self.value, "patience": self._patience, "quiet": self._quiet, "grew": self._grew}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Sets what ``state_dict`` gave."""
        found = state["value"]
        self.value = found if self.ceiling is None or found is None else min(found, self.ceiling)
        self.value = self.ceiling if self.value is None else self.value
        self._patience = state["patience"]
        self._quiet, self._grew = state["quiet"], state["grew"]


class OwnSizeLimit(SizeLimit):
    """A size that follows from what fits on this process, whatever fits on others that take the same gradient."""

    def shrink_with(self, agreed: float, own: float | None) -> None:
        """Becomes smaller if memory ran out here."""
        if own is not None:
            self.shrink(own)


class Unproved(Exception):  # no error of the user's: the attempt begins again, with a proof
    """A micro-batch has what none had when the split was proved."""


class Retries:
    """The attempts at a logical batch: another one, in smaller micro-batches, for as long as memory runs out.

    Whatever fails within an attempt, everything is rolled back before the next one or before the error goes on::

        while not retries.is_done:
            with retries as parts:
                outcome = attempt(parts)

    Attributes:
        is_done: whether an attempt went through.
        failed: the attempts that ran out of memory.

    Raises:
        DoesNotFit: even micro-batches of one sample ran out of memory.
        LossError: memory ran out, and the loss had written into its batch.
    """

    def __init__(
        self,
        splittable: Splittable,
        limit: SizeLimit,
        roll_back: Callable[[], None],
        where: Callable[[], str],
        reducer: Reducer = ALONE,
    ) -> None:
        self._splittable, self._limit, self._roll_back = splittable, limit, roll_back
        self._where, self._reducer = where, reducer
        self._writes = splittable.noted = splittable.writes()
        self._asked = limit.value
        self._once, limit.once = limit.once, None
        self._parts = splittable.plan(limit.value if self._once is None else self._once)
        self._failure: Failure | None = None
        self._shortage: Shortage | None = None  # of another process
        self.is_done = self._is_unproved = False
        self.failed: tuple[Attempt, ...] = ()

    def __enter__(self) -> list[Part]:
        """Begins an attempt; gives how the batch is split in it."""
        # Here and not where it was caught: no traceback holds the tensors of the failed attempt any more.
        failure, self._failure = self._failure, None
        if failure is not None:
            self._start_again(failure)
        if self._is_unproved:
            self._is_unproved, before = False, self._limit.value
            self._limit.look_again()
            if self._limit.value != before:
                self._parts = self._splittable.plan(self._limit.value)
        return self._parts

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        """Ends it: for good, with an error that goes on, or so that there is another one."""
        if error is None:
            self.is_done = True
            return False
        # Parts were only asked for to be looked at, as by NoiseScale; what may not be split runs whole, as ever.
        if self._once is not None and isinstance(error, NotSplittable):
            self._roll_back()
            self._once, self._parts = None, self._splittable.plan(self._limit.value)
            return True
        if isinstance(error, Unproved):
            self._roll_back()
            if self._writes.were_made:
                self._writes.refuse(self._splittable.batches, "since its split has to be proved first")
            self._is_unproved = True
            return True
        shortage = error.shortage if isinstance(error, ShortageElsewhere) else None
        if shortage is None and not (is_out_of_memory(error) and self._reducer.can_start_again):
            self._roll_back()
            if isinstance(error, NotSplittable) and self.failed:
                self._limit.value = self._asked  # the next batch may fit as a whole
            return False
        if self._writes.were_made:
            self._roll_back()
            self._writes.refuse(self._splittable.batches, "since memory ran out")
        # Swallowed here and dealt with in the next attempt, after the interpreter has let go of the exception.
        self._failure, self._shortage = Failure(error), shortage
        return True

    def _start_again(self, failure: "Failure") -> None:
        try:
            failure.release()
        finally:
            self._roll_back()
        limit, reducer, parts = self._limit, self._reducer, self._parts
        shortage, own, is_relieved = self._shortage, None, False
        tried = max((part.cost for part in parts), default=0)
        is_smallest = max((len(part.samples) for part in parts), default=1) == 1
        if shortage is None:
            # One sample can't be halved; a model that lies in parts may still be gathered in smaller ones.
            is_final = is_smallest and not limit.relieve()
            shortage, own = reducer.agree(tried, is_final=is_final, where=self._where(), text=failure.text), tried
            is_relieved = is_smallest and not is_final
        outcome: Literal["out of memory", "units differ"] = "out of memory" if shortage.is_memory else "units differ"
        self.failed = (*self.failed, Attempt(tried, len(parts), 0, outcome, shortage.where))
        if shortage.is_final:
            raise _does_not_fit(shortage, self._splittable)
        if not shortage.is_memory:
            limit.gather()
        elif not is_relieved:
            limit.shrink_with(shortage.tried, own) if reducer.is_shared else limit.shrink(shortage.tried)
        self._parts = self._splittable.plan(limit.value, oversized="alone")
        _log_restart(shortage, tried, limit, len(self._parts))


def _does_not_fit(shortage: Shortage, splittable: Splittable) -> DoesNotFit:
    if splittable.obstacle is not None:
        return DoesNotFit(
            f"the batch runs out of memory in {shortage.where}, and can't be split: {splittable.obstacle}; got: "
            f"{shortage.text}"
        )
    return DoesNotFit(
        f"one sample alone runs out of memory in {shortage.where}, so no smaller micro-batch is left to try; got: "
        f"{shortage.text}. Use a smaller model or shorter samples, lower precision, or activation checkpointing"
    )


def _log_restart(shortage: Shortage, tried: float, limit: SizeLimit, micro_batches: int) -> None:
    if not shortage.is_memory:
        logger.warning(
            "the ranks were about to run different units of a sharded model: %s; this batch starts again with "
            "everything gathered, and so do all later ones", shortage.where,
        )  # fmt: skip
        return
    logger.warning(
        "out of memory in %s with micro-batches of %g; this batch starts again with %g (%d micro-batches). %s",
        shortage.where, tried, limit.value or tried, micro_batches,
        shortage.text.splitlines()[0] if shortage.text else "",
    )  # fmt: skip


class Failure:
    """The text of an error and its tracebacks, to be emptied once nothing runs in them."""

    def __init__(self, error: BaseException) -> None:
        self.text = str(error)
        self._tracebacks: list[TracebackType] = []
        seen: set[int] = set()
        waiting: list[BaseException | None] = [error]
        while waiting:
            following = waiting.pop()
            if following is None or id(following) in seen:
                continue
            seen.add(id(following))
            if following.__traceback__ is not None:
                self._tracebacks.append(following.__traceback__)
            waiting += [following.__cause__, following.__context__]

    def release(self) -> None:
        """Lets go of everything that the frames of the failed attempt hold, also where user code kept the exception."""
        for tracebacks in self._tracebacks:
            traceback.clear_frames(tracebacks)
        self._tracebacks.clear()
        # What a backward had queued when it failed keeps its tensors until the next one in this thread.
        with torch.enable_grad():
            number = torch.zeros((), requires_grad=True, device="cpu")
            torch.autograd.grad(number.mul(1), number)
        gc.collect()
        release_cache()
