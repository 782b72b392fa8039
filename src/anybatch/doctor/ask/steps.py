"""A step that was written down, as questions see it, and how such a question is declared."""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from anybatch.doctor.ask.keeping import Kept
from anybatch.doctor.ask.tape import LEAST_ROWS, Loss, Operation, Replay, Slot, Tape, Values, as_it_is, replay
from anybatch.doctor.ask.trials import FAILURES, Unknown, told
from anybatch.records.lossfacts import Probed
from anybatch.records.runs import Run
from anybatch.tensors.randomness import seed

MOVING = frozenset({"view", "reshape", "flatten", "unflatten", "view_as", "reshape_as", "ravel", "_unsafe_view"})
PRODUCTS = frozenset({"matmul", "bmm", "mm"})
DISTANCES = frozenset({"mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss"})
OF_CLASSES = frozenset({"cross_entropy", "nll_loss"})
_MOST_NUMBERS = 1 << 26
_SHORT, _FEWEST_ROWS = 0.0125, 8  # seconds of a run with its gradient


@dataclass(slots=True)
class Question:
    """What is asked of each step that was written down."""

    name: str
    ask: "Callable[[Step], Iterator[Probed]]"
    of_rows: bool

    def answers(self, step: "Step") -> Iterator[Probed]:
        """What it finds first; no where it finds nothing."""
        if self.of_rows:
            step.require_rows()
        found = next(iter(self.ask(step)), None)
        yield told(self.name, answer="no") if found is None else replace(found, probe=found.probe or self.name)


def asks(name: str, *, of_rows: bool = True) -> "Callable[[Callable[[Step], Iterator[Probed]]], Question]":
    """Declares a question, which yields what it finds; ``of_rows`` where it needs some rows, and all to run again."""
    return lambda ask: Question(name, ask, of_rows)


def said(place: Any = None, /, **seen: Any) -> Probed:
    """What a question has found: see ``told``."""
    return told("", place, **seen)


class Step:
    """A step that was written down; answers should be there at ``until``, by ``time.perf_counter``."""

    def __init__(
        self, tape: Tape, optimizer: int, kept: Kept, run: Run, modules: Mapping[int, Any], until: float
    ) -> None:
        self.tape, self.optimizer, self.kept, self.run, self.modules = tape, optimizer, kept, run, modules
        self.until, self.rows, self.loss = until, tape.rows, tape.losses[-1]
        self.operations = tape.operations[: self.loss.before]
        self.leaves, self.parameters = tape.leaves, tape.parameters
        given = [self.leaves[one] for one in self.needed & self.inputs] if tape.acted > 0 else []
        if any(one.dim() and len(one) == tape.acted for one in given):
            self.rows = tape.acted  # what acted is a part of what is trained

    def require_rows(self) -> None:
        """Raises where the batch has too few rows, or not all of the step can be run again."""
        if self.rows < LEAST_ROWS:
            raise Unknown("the batch has fewer than four rows")
        if any(self.leaves[one].shape[:1] != (self.rows,) for one in self.tape.opaque & self.needed):
            raise Unknown("a part of the step was computed by what can't be run again")
        if sum(one.numel() for one in self.parameters.values()) > _MOST_NUMBERS:
            raise Unknown("the model is too large to run again")

    @cached_property
    def replay(self) -> Replay:
        """What it gives when it is run again as it was; with the first weights where those of then give no number."""
        run = replayed(self.tape, self.loss)
        is_number = bool(run.values[self.loss.slot].isfinite().all())
        return run if is_number else replayed(self.tape, self.loss, held=self.kept.first_of(self.tape))

    @cached_property
    def fewer(self) -> tuple[Any, Any]:
        """How leaves and numbers become those of fewer rows; ``None`` for both where a run of all is short.

        A mean of fewer rows is about that of all, and what is trained with it learns or does not for the same reasons.
        """
        start, run = time.perf_counter(), replayed(self.tape, self.loss)
        self.slopes(*[one for one in self.needed & self.parameters.keys() if run.values[one].requires_grad], run=run)
        rows = max(_FEWEST_ROWS, int(self.rows * _SHORT / max(time.perf_counter() - start, 1e-9)))
        stride, own = self.rows // rows, self.own

        def some(one: torch.Tensor) -> torch.Tensor:
            return one[: stride * rows : stride] if one.shape[:1] == (self.rows,) else one

        def scaled(number: Any) -> Any:
            is_of_rows = isinstance(number, int) and number >= self.rows and number % self.rows == 0
            return number // self.rows * rows if is_of_rows else number

        for number in (None, scaled) if stride > 1 else ():
            try:
                less = total(replayed(self.tape, self.loss, some, number), self.loss)
            except Unknown:
                continue
            if own > 0 and own / 2 < less < 2 * own:
                return some, number
        return None, None

    @property
    def values(self) -> Values:
        """Of all slots when it is run again, as they were last."""
        return self.replay.values

    @cached_property
    def needed(self) -> set[Slot]:
        """The slots that the loss is made of."""
        return slots_of(self.tape, self.loss)

    @property
    def own(self) -> float:
        """The loss as it was."""
        return total(self.replay, self.loss)

    @property
    def root(self) -> int:
        """The number of a model that has a parameter of the step; -1 where none has."""
        own = set(map(id, self.parameters.values()))
        roots = (root for root, one in self.modules.items() if own & set(map(id, one.parameters())))
        return next(roots, -1)

    @property
    def inputs(self) -> set[Slot]:
        """What came from outside and is no parameter."""
        return self.leaves.keys() - self.parameters.keys()

    def made_of(self, slot: Slot, before: int | None = None) -> set[Slot]:
        """The slots that a tensor is made of, by the operations before the loss, or by so many of them."""
        return slots_of(self.tape, Loss(slot, self.loss.before if before is None else before, "", 0))

    def made_with(self, slot: Slot) -> set[Slot]:
        """The slots that depend on a tensor, by the operations before the loss."""
        found = {slot}
        for operation in self.operations:
            if not found.isdisjoint(operation.given):
                found.update(operation.outs, operation.written)
        return found

    def made_at(self, slot: Slot, before: int | None = None) -> int:
        """The place of the operation that made a tensor, the last one of so many; -1 where none did."""
        places = range(len(self.operations) if before is None else before)
        return next((at for at in reversed(places) if slot in self.operations[at].outs), -1)

    def used(self, *kinds: str) -> Iterator[Operation]:
        """The operations that the loss is made of, those of some kinds only where these are given."""
        every = (one for one in self.operations if not kinds or one.kind in kinds)
        return (one for one in every if self.needed & set(one.outs))

    def path(self, slot: Slot) -> Iterator[Operation]:
        """The operations before the loss that a tensor comes from, the last first, by what each was given first."""
        for operation in reversed(self.operations):
            if slot in operation.outs:
                yield operation
                slot = next(iter(operation.given), slot)

    def slopes(self, *made: Slot, run: Replay | None = None) -> tuple[torch.Tensor | None, ...]:
        """How the loss rises with some tensors, here or in another run; ``None`` where it does not depend on one."""
        values = (run or self.replay).values
        by = [values[one] for one in made]
        if not by:
            return ()
        return torch.autograd.grad(values[self.loss.slot].sum(), by, retain_graph=True, allow_unused=True)

    def loss_with(self, change: Any = None, held: Mapping[Slot, torch.Tensor] | None = None) -> float:
        """The loss where leaves are changed, or parameters have other values."""
        return total(replayed(self.tape, self.loss, change, held=held), self.loss)

    def with_other(self, operation: Operation, func: Callable[..., Any]) -> Replay:
        """The step again with another function in the place of that of an operation."""
        other = replace(operation, name="other", func=func, drawn=None)
        operations = [other if one is operation else one for one in self.tape.operations]
        return replayed(self.tape.changed(operations), self.loss)


def total(run: Replay, loss: Loss) -> float:
    """What a loss is in a run of a step; the sum of one that is no number."""
    return float(run.values[loss.slot].detach().double().sum())


def following(
    operations: Iterable[Operation], some: Iterable[Slot], draws: Callable[[Operation], bool] = lambda _: False
) -> set[Slot]:
    """Some tensors, and what operations make of them, or draw."""
    found = set(some)
    for operation in operations:
        if draws(operation) or not found.isdisjoint(operation.given):
            found.update(operation.outs)
    return found


def slots_of(tape: Tape, loss: Loss, *, without: str = "", but: Iterable[Operation] = ()) -> set[Slot]:
    """The slots that a loss is made of; what it is made of by way of some operations, or of a name, may be left out."""
    left_out = {id(one) for one in but}
    needed = {loss.slot}
    for operation in reversed(tape.operations[: loss.before]):
        if operation.name == without or id(operation) in left_out:
            continue
        if needed & {*operation.outs, *operation.written}:
            needed |= set(operation.given)
    return needed


def replayed(
    tape: Tape, loss: Loss, change: Any = None, number: Any = None, held: Mapping[Slot, torch.Tensor] | None = None
) -> Replay:
    """Runs a step again as far as a loss, without random numbers of its own."""
    seed(0)
    try:
        return replay(tape, loss.before, change or as_it_is, number or as_it_is, held or {})
    except FAILURES as error:
        raise Unknown(f"the step did not run again: {type(error).__name__}: {error}"[:200]) from None


_SAME = frozenset({"log_softmax", "softmax", "log", "float", "to", "div", "mul", "view", "reshape", "squeeze", "clone"})


def scores_behind(step: Step, slot: Slot) -> Slot:
    """What a tensor is made of by a softmax, a factor or another shape alone."""
    for one in reversed(step.operations):  # from the last on: an operation may hand its own input on
        if slot not in one.outs:
            continue
        learned = [given for given in one.given if step.values[given].requires_grad]
        if one.kind not in _SAME or len(learned) != 1:
            break
        slot = learned[0]
    return slot
