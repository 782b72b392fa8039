"""Compares the loss of the whole first batch with its micro-batches', by what the model gave in these.

A few samples do not show a loss that takes the 64 hardest, or divides by what one micro-batch lacks. All of them do,
and the model need not run for it: what it gave in each micro-batch of the first split is kept, and stands in for it.
"""

import contextlib
import math
import sys
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, repeat
from types import GeneratorType
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode

from anybatch.batch.batches import Part, Splittable
from anybatch.batch.counting import count_samples
from anybatch.batch.layout import lay_out
from anybatch.batch.trees import flat, leaves, like
from anybatch.checking.candidates import Candidate
from anybatch.checking.causes import explained
from anybatch.checking.causes import reason as worded
from anybatch.checking.counts import OtherCounts
from anybatch.checking.cuts import Cut
from anybatch.checking.elsewhere import (
    Unseen,
    even,
    is_not_full,
    labels_counted,
    moved,
    thinned,
    uncounted,
    unseen,
    with_labels_moved,
)
from anybatch.checking.proof import Seen, prove_among_many
from anybatch.checking.proving import Split
from anybatch.checking.rig import in_place_of
from anybatch.checking.standins import argument
from anybatch.checking.trial import Difference, Found, Trial, surroundings, tolerated
from anybatch.interception import unobserved
from anybatch.loss.losses import InPieces, LossFunction, as_coupled
from anybatch.memory.meter import OverBudget, Recording
from anybatch.records.certificates import Proof, Reason
from anybatch.tensors.dispatch import Mode, without_modes
from anybatch.tensors.modules import is_scripted
from anybatch.tensors.precision import LOW_PRECISION
from anybatch.update.passes import Task
from anybatch.update.transaction import Failure

_MOST_BYTES = 16 << 20  # of what a model gives for all samples, and of inputs that are no views of the batch
_LOSS_BYTES = 8  # times as many may be alive in the loss of these,
_LOSS_ROOM = 64 << 20  # and this beside them, below which no operation is looked at beforehand
_FEW = (8, 6, 6)  # samples of micro-batches, for which the model gives other numbers
_APART = 0.001  # an error that is none of rounding, since both losses are given the very same numbers
_APART_IN_LOW = 0.01  # of a loss that is given in low precision
_IN_DOUBT = 0.1  # the same in low precision
_SAME_VALUE = 1e-5  # relative, below which two values of a loss are the same

_ELEMENTWISE = {  # beside what torch has a tag for
    "binary_cross_entropy", "binary_cross_entropy_with_logits", "huber_loss", "log_sigmoid_forward", "mse_loss",
    "smooth_l1_loss",
}  # fmt: skip
_LINEAR = {"_to_copy", "add", "alias", "clone", "detach", "div", "lift_fresh", "mul", "neg", "rsub", "sub"}
_ALONG = {
    "_log_softmax", "_softmax", "all", "amax", "amin", "any", "argmax", "argmin", "gather", "linalg_vector_norm",
    "logsumexp", "max", "mean", "min", "select", "slice", "std", "sum", "var",
}  # fmt: skip
_VIEWS = {"_unsafe_view", "expand", "permute", "reshape", "squeeze", "t", "transpose", "unsqueeze", "view"}
_OF_LABELS = {"nll_loss_forward", "nll_loss2d_forward"}
_LEAVING = {"numpy", "tolist", "__array__", "__dlpack__", "data_ptr", "untyped_storage", "storage"}


class _Leaving(TorchFunctionMode):
    """Notes where numbers leave torch, so that what is done with them is not seen."""

    def __init__(self) -> None:
        super().__init__()
        self.is_met = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.is_met = self.is_met or getattr(func, "__name__", "") in _LEAVING
        return func(*args, **(kwargs or {}))


class RowWise(Mode):
    """Sees the operations of a loss whose samples lie in dimension 0."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.is_so = True
        self.labels: list[tuple[torch.Tensor, int]] = []  # of means over those that are not ignored, with that number
        self._sums = 0  # or means over all entries

    @contextlib.contextmanager
    def seeing(self) -> Iterator[None]:
        """Sees what runs in the block."""
        with self, _Leaving() as leaving:
            yield
        self.is_so = self.is_so and not leaving.is_met

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Runs the operation."""
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        self.is_so = self.is_so and _keeps_rows_apart(func, args, kwargs, result)
        if func.overloadpacket.__name__ in _OF_LABELS and argument(func, args, kwargs, "reduction") == 1:
            self.labels.append((args[1], argument(func, args, kwargs, "ignore_index", -100)))
        elif isinstance(result, torch.Tensor) and result.dim() == 0:
            self._sums += any(isinstance(one, torch.Tensor) and one.dim() > 0 for one in args)
        return result

    def ways_to_count(self, batch: Any) -> list[Candidate | None]:
        """What such a loss is a mean over; ``None`` where that is not known."""
        found: list[Candidate | None] = [labels_counted(batch, *labels) for labels in self.labels]
        return [*found, Candidate("", "", count_samples)] if self._sums else found


def _keeps_rows_apart(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> bool:
    name, given = func.overloadpacket.__name__.rstrip("_"), [one for one in args if isinstance(one, torch.Tensor)]
    if not given:
        return False
    first, dims = given[0], {one.dim() for one in given}
    if name in _LINEAR and (len(given) == 1 or (dims == {0} and name not in ("mul", "div"))):
        return True
    if name in _LINEAR or name in _ELEMENTWISE or torch.Tag.pointwise in func.tags:
        # What all samples give together is a number, and not of a sample.
        return len(dims) == 1 and 0 not in dims and len({one.shape[0] for one in given}) == 1
    if name in _OF_LABELS or name == "multi_margin_loss":
        return True
    if name in _ALONG:
        along = argument(func, args, kwargs, "dim")
        if name in ("mean", "sum") and result.dim() == 0:
            return True
        along = [along] if isinstance(along, int) else along or [0]
        is_all = name == "slice" and result.shape == first.shape
        return is_all or (first.dim() > 1 and all(dim % first.dim() for dim in along))
    # The samples stay where they are: further apart than what each has.
    is_view = name in _VIEWS and first.dim() > 0 and result.dim() > 0
    return is_view and result.shape[0] >= first.shape[0] and result.stride(0) == max(result.stride())


class Replay:
    """What a model gives in the micro-batches of a step, to see the loss of all of them at once."""

    def __init__(self, split: Split, proof: Proof, seen: Seen, others: OtherCounts) -> None:
        self._others = others
        self._split, self._task, self._parts, self._proof, self._seen = split, split.task, split.parts, proof, seen
        self._given: list[list[Any]] = []  # by micro-batch and call
        self._bytes = 0
        self.unseen: list[Unseen] = []  # what makes a difference in other batches, which are then proved again

    @staticmethod
    def can_be(split: Split, proof: Proof) -> bool:
        """Whether the loss may be seen so."""
        task = split.task
        splittable, model, loss_fn = task.splittable, task.model, task.loss_fn
        is_plain = isinstance(model, torch.nn.Module) and (
            type(model).__call__ is torch.nn.Module.__call__ or type(model).__name__ == "OptimizedModule"
        )
        is_plain = is_plain and not any(map(is_scripted, task.every_module)) and task.devices is None
        is_whole = len(splittable.layouts) == 1 and splittable.obstacle is None
        is_of_pieces = isinstance(loss_fn, InPieces) or as_coupled(loss_fn) is not None
        if task.settings.scaler is not None:
            return False  # in low precision rounding hides what is looked for
        is_alone = not task.settings.reducer.is_shared and len(split.parts) > 1
        return is_plain and is_whole and is_alone and not is_of_pieces and proof.outcome != "not exact"

    @property
    def task(self) -> Task:
        """The same step, in which what the model gives is kept."""
        user = self._task.loss_fn

        def evaluate(model: Any, batch: Any) -> Any:
            given: list[Any] = []
            self._given.append(given)
            with self._kept(model, given):
                result = user(model, batch)
            return self._yielded(result, model, given) if isinstance(result, GeneratorType) else result

        return replace(self._task, loss_fn=in_place_of(user, evaluate))

    def _yielded(self, losses: Generator[Any, None, Any], model: Any, given: list[Any]) -> Generator[Any, None, Any]:
        with self._kept(model, given):
            return (yield from losses)

    @contextlib.contextmanager
    def _kept(self, model: Any, given: list[Any]) -> Iterator[None]:
        handle = model.register_forward_hook(
            lambda _, args, kwargs, output: self._keep(given, (args, kwargs), output), with_kwargs=True
        )
        try:
            yield
        finally:
            handle.remove()

    def _keep(self, given: list[Any], inputs: Any, output: Any) -> None:
        try:
            with unobserved(), without_modes():
                tensors = [one for one in flat((inputs, output)) if isinstance(one, torch.Tensor)]
                if {type(one) for one in tensors} - {torch.Tensor, torch.nn.Parameter}:
                    raise TypeError("a tensor subclass may be materialised only when it is read")
                self._bytes += sum(one.nbytes for one in tensors if one.requires_grad or not one._is_view())
                if self._bytes <= _MOST_BYTES:
                    given.append(tuple(like(one, map(_Kept.of, flat(one))) for one in (inputs, output)))
                    return
        except Exception:  # noqa: BLE001 - the forward goes on, whatever it gives that can't be kept
            self._bytes = _MOST_BYTES + 1
        self._given.clear()  # and nothing is looked at

    def found(self, losses: Mapping[str, float]) -> Found | None:
        """What the loss of all samples shows, once all micro-batches have run; ``None`` if nothing."""
        try:
            with surroundings():
                if calls := self._joined():
                    is_same = not self._seen.has_hooks and self._is_the_same(calls, losses)
                    found: Found | None = None if is_same else self._compared(calls) or self._elsewhere(calls)
                    if found is not None or not self._seen.ranks:  # else a model may, of which outputs show nothing
                        return found
                else:
                    self.unseen += even(self._task.splittable)
        except Exception as error:
            if self._task.is_planned and isinstance(error, OverBudget):
                raise
            Failure(error).release()  # what was given may be of no sample, or the loss may use more of a model
            self.unseen += even(self._task.splittable)
        if self._task.is_planned or self._bytes > _MOST_BYTES or self._proof.group > 1 or not self._proof.exact:
            return None
        for parts in (*self._uneven(), self._parts):
            found = prove_among_many(self._split._replace(parts=parts))
            if found is not None:
                return replace(found[0], update=self._proof.update), found[1]
        return None

    def _uneven(self) -> Iterator[list[Part]]:
        """Two micro-batches in which the model is called another number of times, as by a branch on their size."""
        calls = [len(given) for given in self._given]
        others = [number for number, called in enumerate(calls) if called != calls[0]]
        if others and len(calls) == len(self._parts):
            yield [self._parts[0], self._parts[others[0]]]

    def _joined(self) -> list["_Call"]:
        """What the model was given and gave in each call; empty where that is not known of all samples."""
        sizes = tuple(len(part.samples) for part in self._parts)
        if len(self._given) != len(sizes) or len({len(given) for given in self._given}) != 1:
            return []
        given, self._given = self._given, []
        return [_Call.of(calls, sizes) for calls in zip(*given, strict=True)]

    def _is_the_same(self, calls: list["_Call"], losses: Mapping[str, float]) -> bool:
        """Whether the loss of all samples has the value of the micro-batches, and is a sum over samples, or drawn."""
        operations = RowWise()
        with self._played(calls, operations=operations) as (trial, cut, _):
            ran = trial.run(cut, cut.whole, differentiate=False)
        error = max((abs(losses.get(name, 0.0) - one) / abs(one or 1.0) for name, one in ran.losses.items()), default=1)
        if ran.drew_torch or ran.drew_others:
            self.unseen += even(self._task.splittable)
            return True
        count = self._task.count
        counts = [one for one in (count.values() if isinstance(count, Mapping) else [count]) if callable(one)]
        with contextlib.suppress(Exception):  # of a count that takes no such labels
            for labels in operations.labels if self._proof.exact else ():
                self.unseen += uncounted(self._task.splittable, *labels, counts)
            if operations.is_so:
                self._others.tell_all(self._task, operations.ways_to_count(self._task.splittable.batches[0]))
        return operations.is_so and error <= _SAME_VALUE

    def _compared(self, calls: list["_Call"]) -> tuple[Proof, Reason] | None:
        difference = self._difference(calls)
        if difference is None:
            return None
        found = difference.proof("not exact", "losses", update=self._proof.update)
        error = difference.error
        return found, explained(error, lambda: worded("whole batch", "loss", {"error": error}, rows=found.samples))

    def _elsewhere(self, calls: list["_Call"]) -> tuple[Proof, Reason] | None:
        """What the loss shows where the model gives something else, and where masks that are full are not."""
        if not self._proof.exact or self._proof.group > 1:
            return None
        sizes = tuple(min(most, size) for most, size in zip(_FEW, calls[0].sizes, strict=False))
        starts = accumulate(calls[0].sizes, initial=0)
        rows = [start + row for start, size in zip(starts, sizes, strict=False) for row in range(size)]
        splittable, masks = self._task.splittable.chosen(rows), list[str]()
        calls = [call.first(sizes) for call in calls]
        labels, thin = thinned(splittable, sizes)
        if labels and self._difference(calls, thin) is not None:
            each = ((one, thinned(splittable, sizes, one)[1]) for one in labels)
            alone = (one for one, other in each if self._difference(calls, other) is not None)
            masks = [*alone] or labels
            (batch,) = splittable.batches
            found = (tuple(keys) for label, keys, _ in leaves(batch, "batch") if label in masks)
            self.unseen += [Unseen(keys, is_not_full, "not full") for keys in found]
        elif self._difference([c._replace(outputs=moved(c.outputs)) for c in calls], splittable) is None:
            self.unseen += [
                one for one, other in unseen(splittable, sizes) if other is None or self._differs(calls, other)
            ]
            self._differs(
                calls,
                Splittable(
                    [with_labels_moved(splittable.batches[0], splittable.broadcast)], broadcast=splittable.broadcast
                ),
            )
            return None
        told = worded("full mask", masks[0], labels=masks) if masks else worded("other outputs")
        note = f"as long as {masks[0]} is full" if masks else "as long as the loss treats all samples alike"
        return self._proof.with_note(note), told

    def _differs(self, calls: list["_Call"], splittable: Splittable) -> bool:
        with tolerated():  # the loss may take no such batch
            if self._difference(calls, splittable, is_finite=False) is not None:
                return True
            self._others.tell(self._task, Cut(splittable, calls[0].sizes))
        return False

    def _difference(
        self, calls: list["_Call"], splittable: Splittable | None = None, *, is_finite: bool = True
    ) -> Difference | None:
        """How far the loss of all samples is from that of the micro-batches; ``None`` for not, or not known.

        Args:
            splittable: another batch, for which the model gives the same.
            is_finite: whether losses that are no numbers tell nothing.
        """
        with self._played(calls, splittable) as (trial, cut, player):
            found = trial.difference(cut, in_single=False)
        least = (_APART_IN_LOW if player.is_low else _APART) if found.is_single else _IN_DOUBT
        if found.draws or (is_finite and not math.isfinite(found.error)) or found.error < least:
            return None
        return found

    @contextlib.contextmanager
    def _played(
        self, calls: list["_Call"], splittable: Splittable | None = None, operations: RowWise | None = None
    ) -> Iterator[tuple[Trial, Cut, "_Player"]]:
        """Lets outputs stand in for the model; gives what runs their loss, their samples, and what plays them."""
        task, is_planned = self._task, self._task.is_planned
        player = _Player(calls, task, splittable, operations)
        limit = self._seen.room if is_planned else _LOSS_BYTES * self._bytes + _LOSS_ROOM
        # Also where all numbers of all samples are compared with one another.
        is_small = not is_planned and self._bytes**2 < limit
        given = (one for call in calls for own in call.outputs for one in own if isinstance(one, torch.Tensor))
        leaves = [*self._split.parameters, *(one for one in given if one.requires_grad)]
        with player.playing(), contextlib.nullcontext() if is_small else Recording(limit=limit):
            own = replace(task, loss_fn=player.loss_fn(), splittable=player.splittable)
            trial = Trial(self._split._replace(task=own, parameters=leaves))
            yield trial, Cut(player.splittable, calls[0].sizes), player


def looked_at_apart(split: Split, proof: Proof, seen: Seen, others: OtherCounts) -> tuple[Found | None, list[Unseen]]:
    """What the loss of a few samples shows before the step, where the outputs of all of them can't be kept in it."""
    task, parts = split.task, split.parts
    if not task.is_planned:
        seen = seen._replace(room=sys.maxsize)  # more samples with their gradients were run just before
    # Together half of a micro-batch, since what they give is kept.
    few = len(parts[0].samples) // (2 * len(_FEW)) if task.is_planned else max(_FEW)
    # one sample tells nothing of what it is divided by
    wanted = [min(most, few) for most in _FEW] if few > 1 else (2, 2)
    sizes = tuple(min(most, len(part.samples)) for most, part in zip(wanted, parts, strict=False))
    rows = [row for part, size in zip(parts, sizes, strict=False) for row in part.samples[:size]]
    try:
        cut = Cut(task.splittable.chosen(rows), sizes)
        own = replace(task, splittable=cut.splittable, is_planned=True)
        replay = Replay(split._replace(task=own, parts=cut.parts), proof, seen, others)
        with surroundings(), Recording(limit=seen.room):
            losses = Trial(split._replace(task=replay.task)).run(cut, cut.parts).losses
        return replay.found(losses), replay.unseen
    except OverBudget as error:
        Failure(error).release()
        proof = proof.with_note("what the loss does with different outputs needs more, and was not seen")
    except Exception as error:  # noqa: BLE001 - the loss may run no micro-batches of these sizes
        Failure(error).release()
    return (proof, None), even(task.splittable)


class _Kept:
    """A leaf that must not be written to before it is used."""

    def __init__(self, value: torch.Tensor) -> None:
        self._value, self._version, self.has_graph = value.detach(), value._version, value.requires_grad

    @classmethod
    def of(cls, value: Any) -> Any:
        return cls(value) if isinstance(value, torch.Tensor) else value

    def read(self) -> torch.Tensor:
        if self._value._version != self._version:
            raise ValueError("it was written to")
        return self._value


class _Call(NamedTuple):
    """One call of the model in each micro-batch."""

    inputs: list[list[Any]]  # leaves, by micro-batch
    form: Any  # of an output
    outputs: list[list[Any]]  # leaves, by micro-batch, with a gradient of their own
    sizes: tuple[int, ...]  # samples of the micro-batches

    @classmethod
    def of(cls, calls: Sequence[tuple[Any, Any]], sizes: tuple[int, ...]) -> "_Call":
        outputs = [[_leaf(one, size) for one in flat(output)] for (_, output), size in zip(calls, sizes, strict=True)]
        return cls([flat(inputs) for inputs, _ in calls], calls[0][1], outputs, sizes)

    def first(self, sizes: tuple[int, ...]) -> "_Call":
        """The first samples of the first micro-batches."""

        def cut(one: Any, size: int) -> Any:
            is_tensor = isinstance(one, torch.Tensor)
            return one.detach()[:size].requires_grad_(one.requires_grad) if is_tensor else one

        outputs = [[cut(one, size) for one in own] for own, size in zip(self.outputs, sizes, strict=False)]
        return self._replace(outputs=outputs, sizes=sizes)

    def inside(self, rows: slice) -> Iterator[tuple[int, slice]]:
        """The micro-batches that lie in some rows, each with its place among these."""
        ends = accumulate(self.sizes)
        for number, (end, size) in enumerate(zip(ends, self.sizes, strict=True)):
            if rows.start <= end - size and end <= rows.stop:
                yield number, slice(end - size - rows.start, end - rows.start)

    def output(self, rows: slice) -> Any:
        """What the model gives for some rows, those of whole micro-batches."""
        chosen = [self.outputs[number] for number, _ in self.inside(rows)]
        return like(self.form, [_joined(own) for own in zip(*chosen, strict=True)])

    def is_of(self, inputs: list[Any], rows: slice) -> bool:
        """Whether the model is called with what it was given for some rows."""
        kept = ((self.inputs[number], own) for number, own in self.inside(rows))
        return all(len(one) == len(inputs) and all(map(_is_same, inputs, one, repeat(own))) for one, own in kept)


def _is_same(given: Any, kept: Any, rows: slice) -> bool:
    """Whether an input of some samples has what a micro-batch was given, in its rows or as a whole."""
    if not isinstance(kept, _Kept):
        return bool(given is kept or given == kept)
    value = kept.read()
    is_tensor = isinstance(given, torch.Tensor) and given.dim() > 0
    return is_tensor and (torch.equal(given[rows], value) or torch.equal(given, value))


def _leaf(own: Any, size: int) -> Any:
    if not isinstance(own, _Kept):
        return own
    value = own.read()
    if value.dim() == 0 or len(value) != size:
        raise ValueError("it is not per sample")
    return value.requires_grad_(own.has_graph)


def _joined(own: Sequence[Any]) -> Any:
    if isinstance(own[0], torch.Tensor):
        return torch.cat(list(own)) if len(own) > 1 else own[0].view_as(own[0])  # a loss may write to it
    if any(one is not own[0] and one != own[0] for one in own):
        raise ValueError("the model's outputs other than tensors differ")
    return own[0]


class _Player:
    """Gives what a model gave: of all samples, or of one micro-batch after the other."""

    def __init__(
        self, calls: list[_Call], task: Task, splittable: Splittable | None, operations: RowWise | None
    ) -> None:
        self._of_calls, self._task, self._is_same, self._operations = calls, task, splittable is None, operations
        self.splittable = task.splittable if splittable is None else splittable
        self.is_low = False  # whether losses came in low precision
        self._rows, self._calls, self._end = slice(0, 0), 0, 0

    def loss_fn(self) -> LossFunction:
        """The loss function of the task, with the rows of each batch that it is given."""

        def evaluate(model: Any, batch: Any) -> Any:
            return self._evaluate(model, batch)

        return in_place_of(self._task.loss_fn, evaluate)  # not kept, since it holds this

    def _evaluate(self, model: Any, batch: Any) -> Any:
        rows = lay_out(batch, self.splittable.broadcast).rows
        start = self._end % self.splittable.rows
        self._rows, self._calls, self._end = slice(start, start + rows), 0, start + rows
        with contextlib.nullcontext() if self._operations is None else self._operations.seeing():
            result = self._task.loss_fn(model, batch)
        is_generator = isinstance(result, GeneratorType)
        if self._operations is not None and is_generator:
            self._operations.is_so = False  # its operations come later
        leaves = [] if is_generator else flat(result)
        self.is_low |= any(isinstance(one, torch.Tensor) and one.dtype in LOW_PRECISION for one in leaves)
        return result

    def _play(self, *args: Any, **kwargs: Any) -> Any:
        call = self._of_calls[self._calls]
        self._calls += 1
        with without_modes() if self._operations is not None else contextlib.nullcontext():
            if self._is_same and not call.is_of(flat((args, kwargs)), self._rows):
                raise ValueError("the model is called with different inputs, or with the samples in a different order")
            return call.output(self._rows)

    @contextlib.contextmanager
    def playing(self) -> Iterator[None]:
        """Lets a call of the model give its outputs, without running it."""
        own = vars(self._task.model)
        before = own.get("forward")
        own["forward"] = self._play
        try:
            yield
        finally:
            del own["forward"]
            if before is not None:
                own["forward"] = before
