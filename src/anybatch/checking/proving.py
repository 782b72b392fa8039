"""What was proved so far, so that it is proved once; what proves it is imported when it is first needed."""

import contextlib
import copy
import functools
import inspect
import logging
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.nn.parameter import is_lazy

from anybatch.batch.batches import Part, Splittable
from anybatch.batch.layout import Constant, Rows
from anybatch.batch.trees import flat, leaves
from anybatch.batch.writes import Writes
from anybatch.errors import warn
from anybatch.interception import trial
from anybatch.loss.sums import Sums, values_of
from anybatch.options import Verify
from anybatch.records.means import Mean
from anybatch.tensors.dispatch import has_numbers
from anybatch.tensors.modules import modules_of
from anybatch.update.passes import Task
from anybatch.update.transaction import Snapshot, Unproved

if TYPE_CHECKING:
    from anybatch.checking.counts import OtherCounts
    from anybatch.checking.elsewhere import Unseen
    from anybatch.checking.replaying import Replay
    from anybatch.checking.switches import Switches
    from anybatch.records.certificates import Proof, Reason

logger = logging.getLogger(__name__)

_DEPTH = 3
_AGAIN = 8  # batches, after which a split is proved again; then after so many times as many
_LONG = 1.0  # second, from which on the time of a proof is logged
_LAST = 32  # operations of a loss that are compared with earlier ones
_EACH = 64  # batches whose loss is looked at; then each 8th
_KINDS = 64  # of losses that are told apart
_SOME = 16  # items of a list, or raw samples, that are looked at in each step


class Split(NamedTuple):
    """A split that a step is about to make."""

    task: Task
    parts: Sequence[Part]
    parameters: Sequence[torch.Tensor]
    optimizations: Callable[[], AbstractContextManager[Any]]  # puts those of a plan on the model
    update: int | None = None  # the number of updates applied before; ``None`` if they are not counted


@dataclass(slots=True)
class _Layout:
    """What is known of the batches of one layout."""

    known: "Proof | None" = None  # what was proved; ``None`` where it has to be proved, or proved again
    exact: "Proof | None" = None  # what was shown last
    unseen: "Sequence[Unseen]" = ()  # for which a batch is proved again, the first that has it
    met: set[Any] = field(default_factory=set)  # of these
    batches: int = 0  # after the first
    due: int = _AGAIN  # the number of them at which it is proved again
    parted: int = 0  # batches whose micro-batches end in other operations
    others: "OtherCounts | None" = None  # which the batches so far do not tell from the step's own


class Proofs:
    """Proves once for each layout of batches that a step may split them."""

    def __init__(self, verify: Verify) -> None:
        self.verify = verify
        self.is_of_part = False  # whether a batch is one part of a logical one, and split even as it is
        # what was proved of the layout of the last batch; ``None`` as long as nothing was split
        self.latest: Proof | None = None
        self._layouts = defaultdict[Hashable, _Layout](_Layout)
        self._last = _Layout()  # of the batch that was proved last
        self._whole = _Layout()  # of all that are not split
        self._switches: Switches | None = None  # as long as nothing was proved
        self._operations: set[int] = set()  # of the losses so far
        self._apart = 0  # the micro-batch that is to be compared with the first one; 0 for none
        self._told: set[str] = set()  # so that a proof made again does not repeat it
        self._is_open = False  # whether to say of the last proof that it shows nothing

    def look(
        self,
        task: Task,
        parts: Sequence[Part],
        parameters: Sequence[torch.Tensor],
        optimizations: Callable[[], AbstractContextManager[Any]],
        before: Snapshot,
        *,
        clear: Callable[[], None] = lambda: None,
        update: int | None = None,
    ) -> "tuple[Task, Replay | None]":
        """Proves a split before it is made, if that was not done.

        Returns:
            The task to run; and what keeps there what the model gives, at which ``conclude`` looks, in a first batch.

        Raises:
            NotSplittable: in micro-batches the gradient is not the whole batch's; everything is as before.
            Unproved: under a plan, before the proof of a batch that may take more than was planned for.
        """
        reducer, task.on_loss = task.settings.reducer, None
        cuts_time = task.over_time is not None and not reducer.is_sharded and task.cut_of_time is not None
        is_of_ranks = reducer.is_shared and task.splittable.rows > 1 and task.splittable.obstacle is None
        splits = self.verify != "off" and (len(parts) > 1 or cuts_time or self.is_of_part or is_of_ranks)
        if trial.get() or not (splits or reducer.is_sharded):
            if task.is_planned and self.verify != "off" and not trial.get():
                self._see_whole(task)  # under a plan that may not be enough for other operations
            return task, None
        key = layout_key(task.splittable, nodes := task.splittable.nodes(0))
        own = self._layouts[(key, len(parts) > 1, cuts_time) if cuts_time else key]
        if own.known is not None and self._is_new(own, task, nodes, parts):
            own.known = None  # at once, since the proof may raise, and the batch be tried again
            if task.is_planned and not reducer.is_shared:
                raise Unproved  # so that a plan for other operations comes before their proof
        known = own.known
        holds = known is not None and (known.group == known.unit == 1 or known.holds_for(p.samples for p in parts))
        if splits and (own.batches < _EACH or not own.batches % _AGAIN):
            is_known = not holds or not self._operations
            task.on_loss = functools.partial(self._saw, own, (is_known, reducer.is_shared, task.splittable.noted))
        if task.splittable.collate is not None:
            # A planner collates samples of its batch, too, outside of an attempt: there nobody looks on.
            task = replace(task, splittable=copy.copy(task.splittable))
            if holds:
                self._watch(own, task)
        if holds and not reducer.is_sharded:
            self.latest = known
            return task, None
        split = Split(task, parts, parameters, optimizations, update)
        if reducer.is_sharded:  # all ranks prove it together, once they have begun, if one of them wants it
            self.latest = known if holds else None
            prove_with_others = functools.partial(self._proved_with_others, own, before, clear, split, splits=splits)
            reducer.when_begun(prove_with_others, is_wanted=splits and self.latest is None)
            return task, None
        if _are_unmade(task.model, parameters):
            return task, None  # a first batch makes lazy parameters, and the next one is proved
        clear()
        with before.weights_put_back():
            return self._proved(own, split)

    def _proved_with_others(
        self, own: _Layout, before: Snapshot, clear: Callable[[], None], split: Split, *, splits: bool
    ) -> None:
        from anybatch.checking import elsewhere, together

        clear()
        with before.weights_put_back():
            proof, reason = together.prove_together(split)
        if self.verify != "off":
            self._conclude(proof, reason, split.task)
            self.latest = self._kept(own, proof) if splits else proof
            own.unseen = elsewhere.even(split.task.splittable)
            self._watch(own, split.task, begins=True)

    def _see_whole(self, task: Task) -> None:
        """Has the plan of a batch that is not split looked at again where its loss is of other operations."""
        own, is_shared = self._whole, task.settings.reducer.is_shared
        own.batches += 1
        if self._switches is None:
            from anybatch.checking.switches import Switches

            self._switches = Switches()
            self._switches.note(task.model, task.loss_fn, task.splittable.nodes(0))
        elif self._switches.are_turned(task.model, task.loss_fn, task.splittable.nodes(0)) and not is_shared:
            raise Unproved
        if own.batches < _EACH or not own.batches % _AGAIN:
            known_as = (not self._operations, is_shared, task.splittable.noted)
            task.on_loss = functools.partial(self._saw, own, known_as)

    def forget_operations(self) -> None:
        """Looks once more at each phase of a loss, since a plan was made in one of them."""
        self._operations.clear()
        if self._switches is not None:
            self._switches.forget()

    def _saw(
        self, own: _Layout, known_as: tuple[bool, bool, Writes | None], name: str, loss: Any, index: int = 0
    ) -> None:
        """Has a batch proved whose loss is of other last operations than before, or the next one where it is too late.

        That is on several ranks, which would begin again alone, and where the batch was written to.

        Raises:
            Unproved: the last operations are others than in any batch so far; or two micro-batches of one batch end in
                other operations, at the 1st, 2nd, 4th … time, and are compared, together and apart.
        """
        is_proved, is_shared, writes = known_as
        if index:
            own.parted += 1
            if is_shared or own.parted.bit_count() > 1:
                return
            own.due, self._apart = 0, index
            if writes is None or not writes.were_made:
                raise Unproved
            return
        nodes, found = [getattr(loss.total if type(loss) is Mean else loss, "grad_fn", None)], list[Hashable]([name])
        for node in nodes:  # to which those before it are added
            if node is not None and len(found) <= _LAST:
                found.append((type(node), node.name()))  # a compiled graph has a type of its own
                for before, _ in node.next_functions:
                    nodes.append(before)
        known, operations = len(self._operations), hash(tuple(found))
        if known < _KINDS and operations not in self._operations:
            self._operations.add(operations)
            if known and not is_proved and (known < _AGAIN or known.bit_count() == 1):
                own.due = 0
                if not is_shared and (writes is None or not writes.were_made):
                    raise Unproved

    def _is_new(
        self, own: _Layout, task: Task, nodes: Sequence[Rows | Constant], parts: Sequence[Part]
    ) -> bool:  # fmt: skip
        """Whether what a loss goes by is not what it was, or a batch has what the one that was proved had not.

        What no sign tells is seen now and then: the 8th, 64th, 512th … batch of a layout is proved like the first.
        """
        own.batches += 1
        if self._switches is not None and self._switches.are_turned(task.model, task.loss_fn, nodes):
            return True
        unseen = own.unseen if task.splittable.collate is None else ()  # which is looked at as it is made
        known = len(own.met)
        for one in unseen:  # in each step, so without a generator's calls; all at once, for which one proof is enough
            if (one.keys, one.what) not in own.met and one.is_in(task.splittable.batches):
                own.met.add((one.keys, one.what))
        if own.others is not None and own.others.known and task.splittable.collate is None:
            return own.others.are_apart(task, parts) or len(own.met) > known or own.batches >= own.due
        return len(own.met) > known or own.batches >= own.due

    def _watch(self, own: _Layout, task: Task, *, begins: bool = False) -> None:
        """Looks at what ``collate`` makes as it is made, since raw samples may not show what they become.

        For what is new the batch is proved again; on several ranks, and where samples were written to, the next one.

        Args:
            begins: whether the batch was just proved, so that what it does not have is noted.

        Raises:
            Unproved: within ``collate``, for what none that was proved had; the step begins again.
        """
        splittable, collate, is_first = task.splittable, task.splittable.collate, True
        is_shared, writes, factors = task.settings.reducer.is_shared, splittable.noted, dict[Any, float]()

        def collated(samples: list[Any]) -> Any:
            nonlocal is_first
            batch, others = collate(samples), own.others  # type: ignore[misc]
            is_apart = others is not None and not begins and others.are_apart_in(task, batch, len(samples), factors)
            if begins:
                from anybatch.checking.elsewhere import even_in

                with contextlib.suppress(Exception):  # of what can't be looked into
                    own.unseen = even_in([batch]) if is_first else [one for one in own.unseen if not one.is_in([batch])]
                is_first = False
            elif (new := {(one.keys, one.what) for one in own.unseen if one.is_in([batch])} - own.met) or is_apart:
                own.met |= new
                own.due = 0
                if not is_shared and (writes is None or not writes.were_made):
                    raise Unproved
            return batch

        if collate is not None:
            splittable.collate = collated

    def _kept(self, own: _Layout, proof: "Proof") -> "Proof":
        """Keeps what was proved, and has one that shows nothing tell what an earlier batch has shown."""
        if own.exact is not None and proof.outcome == "undecided":
            now, at = (f" at update {one.update}" if one.update is not None else "" for one in (proof, own.exact))
            proof = replace(proof, note=f"{proof.note} (seen last{now}; before{at}: {own.exact})")
        else:
            own.exact = proof if proof.exact else None
        own.known, own.due = proof, max(_AGAIN, _AGAIN * own.batches)
        if own.others is not None:
            own.others.conclude()
        return proof

    def _proved(self, own: _Layout, split: Split) -> "tuple[Task, Replay | None]":
        from anybatch.checking.counts import OtherCounts
        from anybatch.checking.elsewhere import even
        from anybatch.checking.proof import prove, prove_among_many
        from anybatch.checking.replaying import Replay, looked_at_apart
        from anybatch.checking.switches import Switches

        task, parts = split.task, split.parts
        self._switches = self._switches or Switches()
        self._switches.note(task.model, task.loss_fn, task.splittable.nodes(0))
        own.others, began = own.others or OtherCounts(), time.perf_counter()
        found = prove(split, own.known, own.others)
        if (seconds := time.perf_counter() - began) > _LONG:
            which = f"batch {own.batches + 1} of its layout" if own.batches else "the first batch of its layout"
            logger.info("a split was proved in %.1f s, at %s", seconds, which)
        if found is None:
            return task, None
        proof, reason, seen = found
        self._conclude(proof, reason, task)
        other, self._apart = self._apart, 0
        if 0 < other < len(parts) and proof.exact:
            two = prove_among_many(split._replace(parts=[parts[0], parts[other]]))
            if two is not None:
                self._conclude(*two, task)
        self.latest = self._kept(own, proof)
        self._is_open = proof.outcome == "undecided" and self._is_news(proof.note)
        if not Replay.can_be(split, proof):
            own.unseen = even(task.splittable)
            self._watch(own, task, begins=True)
        elif task.is_planned or not seen.takes_hooks:
            if proof.exact and proof.group == 1 and reason is None:
                apart, own.unseen = looked_at_apart(split, proof, seen, own.others)
                if apart is not None:
                    self._conclude(*apart, task)
                    own.known = self.latest = apart[0]
        else:
            self._last, replay = own, Replay(split, proof, seen, own.others)
            return replay.task, replay
        return task, None

    def conclude(self, task: Task, replay: "Replay | None", sums: Sums) -> None:
        """Looks at the loss of all micro-batches that have run, and says what is not proved.

        Raises:
            NotSplittable: the loss of the whole batch has another gradient.
        """
        if self._is_open:  # not before they ran: an error of the loss in them says why some samples can't be run
            self._is_open = False
            logger.warning(
                "the split of this batch is %s. The step goes on; anybatch.check(model, loss_fn, batch) runs samples "
                "without a budget, and says whether the gradient is the whole batch's", str(self.latest).rstrip("."),
            )  # fmt: skip
        if replay is None:
            return
        own, found = self._last, replay.found(values_of(sums))
        own.unseen = replay.unseen
        if found is not None:
            own.known = None  # it is proved again if it is tried again
            self._conclude(*found, task)
            own.known = self.latest = found[0]

    def _conclude(self, proof: "Proof", reason: "Reason | None", task: Task) -> None:
        from anybatch.checking.proof import refusal, remedies_of

        is_of_ranks = task.settings.reducer.is_shared
        if reason is not None and proof.exact:
            if self._is_news(reason.message):
                warn(reason.message + remedies_of(reason, task.verb, is_of_ranks=is_of_ranks))
        elif reason is not None:
            name = type(task.model).__name__
            error = refusal(proof, reason, name, task.verb, is_of_ranks=is_of_ranks)
            if self.verify == "first":
                raise error
            warn(str(error))

    def _is_news(self, text: str) -> bool:
        known = len(self._told)
        self._told.add(text)
        return len(self._told) > known


def _are_unmade(model: Any, parameters: Sequence[torch.Tensor]) -> bool:
    own = (one for module in modules_of(model) for one in module._parameters.values() if one is not None)
    return any(map(is_lazy, own)) or not all(has_numbers(parameter) for parameter in parameters)


def layout_key(splittable: Splittable, nodes: Sequence[Rows | Constant] | None = None) -> Hashable:
    """What a batch looks like, whatever its size: where its leaves are, of which kind and with how many dimensions.

    Example:
        >>> one, other = (Splittable([{"x": torch.zeros(rows, 3)}]) for rows in (4, 9))
        >>> layout_key(one) == layout_key(other)
        True
    """
    if splittable.is_collated:
        if not splittable.rows:
            return ()
        kinds = tuple((label, *_kind(leaf)) for label, _, leaf in leaves(splittable.sample(0)))
        columns = zip(*(flat(splittable.sample(i)) for i in range(min(_SOME, splittable.rows))), strict=False)
        return kinds, *map(_alike, columns)
    return tuple([
        (node.label, value.dtype, value.dim()) if type(value := node.value) is torch.Tensor
        else (node.label, type(node), *_kind(value))
        for node in (splittable.nodes(0) if nodes is None else nodes)
    ])  # fmt: skip


def _kind(value: Any) -> tuple[Any, ...]:
    if isinstance(value, torch.Tensor):
        return torch.Tensor, value.dtype, value.dim()
    if isinstance(value, list):
        return list, _alike(value[:_SOME])
    return (type(value),)


def _alike(items: Sequence[Any]) -> tuple[frozenset[type], bool]:
    """The types of some items, and whether all have one shape, one length or one value."""
    sizes = {one.shape if isinstance(one, torch.Tensor) else one if isinstance(one, int) else None for one in items}
    return frozenset(map(type, items)), len(sizes) < 2


class _OfModel:
    """What was proved of one model, by loss and options; and the last of these by identity, which is quick."""

    def __init__(self) -> None:
        self.known: dict[Hashable, Proofs] = {}
        self.last: tuple[tuple[Any, ...], Proofs] | None = None


_of_models: "weakref.WeakKeyDictionary[torch.nn.Module, _OfModel]" = weakref.WeakKeyDictionary()


def proofs_of(verify: Verify, model: torch.nn.Module, *others: Any) -> Proofs:
    """What was proved of a model and a loss in the calls before this one.

    ``anybatch.backward`` is a function and is called in a loop, often with a loss that is written there as a lambda. So
    what it has proved hangs on the model, by weak reference: it goes with it, and nothing else is kept alive.
    """
    mine = _of_models.get(model)
    given = (verify, *others)
    if mine is not None and mine.last is not None and all(map(_is_referent, mine.last[0], given)):
        return mine.last[1]
    fresh = Proofs(verify)
    mine = _of_models.setdefault(model, mine or _OfModel())
    key = tuple(_key(one, _DEPTH) for one in given)
    for old in [one for one in mine.known if _is_dead(one)]:
        del mine.known[old]
    found = mine.known.setdefault(key, fresh)
    mine.last = tuple(map(_weak, given)), found
    return found


def _weak(value: Any) -> Any:
    """A weak reference to a function, which may hold the model; other values as they are."""
    try:
        return value if value is None or isinstance(value, str) else weakref.ref(value)
    except TypeError:  # a mapping of functions is found by what is in it
        return value if isinstance(value, torch.dtype) else type(value)


def _is_referent(kept: Any, value: Any) -> bool:
    return (kept() if isinstance(kept, weakref.ref) else kept) is value


def _key(value: Any, depth: int) -> Any:
    """What a function is known by that is made anew in each call: its code, and what it closes over."""
    if value is None or isinstance(value, (str, bool, type)):
        return value
    if depth == 0 or isinstance(value, (int, float, torch.Tensor)):
        return type(value)
    if (held := _held(value)) is not None:
        own, inner = held
        return type(value), own, *(_key(one, depth - 1) for one in inner)
    try:
        hash(reference := weakref.ref(value))
    except TypeError:
        return type(value)
    return reference


def _held(value: Any) -> tuple[Any, Sequence[Any]] | None:
    """What is a function's own, and what it holds; ``None`` for what holds nothing that is looked into."""
    if isinstance(value, functools.partial):
        return tuple(value.keywords), (value.func, *value.args, *value.keywords.values())
    if inspect.ismethod(value):
        return None, (value.__func__, value.__self__)
    if inspect.isfunction(value):
        from anybatch.checking.reach import is_empty

        inside = [cell.cell_contents for cell in value.__closure__ or () if not is_empty(cell)]
        is_ours = str(value.__module__).partition(".")[0] == "anybatch"  # its numbers are options, as in count_tokens
        return (value.__code__, *(one for one in inside if is_ours and isinstance(one, int))), inside
    if functions := getattr(value, "user_functions", ()):
        return None, functions
    if isinstance(value, dict):
        return None, (*value, *value.values())
    return (None, value[:16]) if isinstance(value, (list, tuple)) else None


def _is_dead(key: Hashable) -> bool:
    if isinstance(key, tuple):
        return any(map(_is_dead, key))
    return isinstance(key, weakref.ref) and key() is None
