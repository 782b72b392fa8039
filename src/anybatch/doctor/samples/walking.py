"""Goes through the graph of a loss before its backward: what it reaches, what its summands are, and what is old."""

import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from anybatch.doctor.graphs import Graph, leaf_of, outputs_first, reentrant, sort_of, summands
from anybatch.doctor.samples import lossgraphs
from anybatch.records.lossfacts import Walk

if TYPE_CHECKING:
    from anybatch.doctor.recording.numbering import Numbering

_LIMIT = 20_000
_MOST_KINDS = 12
_MOST_PREVIOUS = 3
# kinds whose gradient is zero everywhere, which are told however rare they are
_STEPWISE = ("Round", "Floor", "Ceil", "Trunc", "Sign", "Bernoulli", "Normal", "Heaviside")
_BELOW = 6  # operations between a loss and the outputs that it is computed from, and some more
_ALIVE, _MET = "anybatch.doctor.alive", "anybatch.doctor.met"


@dataclass(slots=True)
class _Seen:
    """What was met on the way."""

    nodes: list[Any]
    names: dict[Any, str] = field(default_factory=dict)  # of them, as far as they are torch's
    leaves: list[torch.Tensor] = field(default_factory=list)  # tensors that a gradient would be put on
    old: list[tuple[Any, int]] = field(default_factory=list)  # nodes of an earlier step, with that step
    again: int = 0  # how many nodes an earlier graph of this step had
    scored: dict[Any, tuple[int, ...]] = field(default_factory=dict)  # nodes of log-probabilities, see ``SCORES``


class Walker:
    """Goes through graphs of losses, and marks nodes with the steps in which it met them first and last."""

    def __init__(self, numbering: "Numbering", *, limit: int = _LIMIT) -> None:
        self._numbering, self._limit = numbering, limit
        self._strangers: dict[int, tuple[weakref.ref[torch.Tensor], int]] = {}

    def walk(self, loss: torch.Tensor, rows: int = -1, *, step: int = 0) -> Walk:
        """Goes through one graph; nothing is unpacked or run. Nodes that were met at an earlier step are old."""
        if loss.grad_fn is None:
            forced = loss.requires_grad and not isinstance(loss, torch.nn.Parameter)
            return Walk(forced=forced)
        seen = self._gone_through(loss.grad_fn, step)
        reached, outside = self._sorted(seen.leaves, step)
        kinds = Counter(seen.names[node] for node in seen.nodes if node in seen.names)
        of_softmax = (node for node in seen.nodes if seen.names.get(node) in lossgraphs.SOFTMAXES)
        softmaxes = [lossgraphs.softmax(node, rows) for node in of_softmax]
        parts = summands(loss.grad_fn) if loss.numel() == 1 else []
        advantages = lossgraphs.products(seen.nodes, seen.names)
        inner = lossgraphs.entrywise(parts)
        reach = self._reach(loss) if len(inner) > 1 or advantages else lambda node: ()
        return Walk(
            nodes=len(seen.nodes),
            cut_short=len(seen.nodes) > self._limit,
            reached=reached,
            outside=outside,
            constant_terms=sum(1 for part in parts if part is None or (len(parts) > 1 and not reach(part))),
            softmaxes=tuple(one for one in softmaxes if one is not None),
            doubled=tuple(dict.fromkeys(lossgraphs.fed(seen.nodes, seen.names, lossgraphs.TAKERS))),
            previous=tuple(_previous(seen.old, step)),
            again=seen.again,
            hidden=sum(1 for node in seen.nodes if node not in seen.names and reentrant(node)),
            kinds={
                kind: count
                for place, (kind, count) in enumerate(kinds.most_common())
                if place < _MOST_KINDS or kind.startswith(_STEPWISE)
            },
            terms=lossgraphs.terms(inner, reach),
            advantages=tuple(
                tuple(sorted({*own} - {*scored}))  # a trunk that both share is trained by the scores as well
                for one, other, logs in advantages
                if {*(own := reach(one))} - {*(scored := reach(other))} and {*scored} - {*own}
                if logs or not {*own} & {*scored}
            ),
            spread=lossgraphs.averaged(loss.grad_fn, seen.scored) or lossgraphs.spread(loss.grad_fn, rows, seen.scored),
            activated=tuple(lossgraphs.activated(seen.nodes, seen.names)),
        )

    def _reach(self, loss: torch.Tensor) -> Callable[[Any], tuple[int, ...]]:
        """Gives for nodes of the graph the numbers of the parameters that they lead to."""
        tracked = self._numbering.tracked()
        graph = Graph({id(tensor): 1 << position for position, (_, tensor) in enumerate(tracked)})
        graph.of(loss)

        def reach(node: Any) -> tuple[int, ...]:
            mask = graph.masks.get(node, 0)
            return tuple(number for position, (number, _) in enumerate(tracked) if mask >> position & 1)

        return reach

    def _gone_through(self, start: Any, step: int) -> _Seen:
        seen = _Seen(outputs_first([start], self._limit))
        for node in seen.nodes[: self._limit]:
            kind: Any = type(node)
            gathers, name = sort_of(kind)
            if gathers:
                seen.leaves.append(node.variable)
            elif name:
                seen.names[node] = name
                marks = node.metadata
                made, last = marks.get(_MET, (step, -1))
                marks[_MET] = made, step
                seen.again += last == step
                if lossgraphs.SCORES in marks:
                    seen.scored[node] = marks[lossgraphs.SCORES]
                if made < step:
                    seen.old.append((node, made))
        return seen

    def _sorted(self, leaves: list[torch.Tensor], step: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Numbers of the leaves: those that are known, and those that no root has."""
        numbering, reached, outside = self._numbering, list[int](), list[int]()
        tracked = {number for number, _ in numbering.tracked()} if leaves else set()
        for leaf in leaves:
            number = numbering.known(leaf)
            if number in tracked:
                reached.append(number)
            number = number if number is not None else self._stranger(leaf, step)
            if number is not None and not numbering.facts(number).registered:
                outside.append(number)
        return tuple(reached), tuple(outside)

    def _stranger(self, leaf: torch.Tensor, step: int) -> int | None:
        """The number of a leaf that nothing known has: one that lives over a step is no input made anew."""
        known = self._strangers.get(id(leaf))
        if isinstance(leaf, torch.nn.Parameter) or (known is not None and known[0]() is leaf and known[1] < step):
            # Beside optimized tensors that are no parameters it may be a weight, too; else it may be an input.
            tracked = (one for _, one in self._numbering.tracked())
            is_raw = any(one.numel() > 1 and not isinstance(one, torch.nn.Parameter) for one in tracked)
            return self._numbering.parameter(leaf, is_tracked=leaf.numel() == 1 or is_raw)
        if known is None or known[0]() is not leaf:
            self._strangers[id(leaf)] = weakref.ref(leaf), step
        return None


class LiveGraphs:
    """Counts graphs of earlier steps that are still alive: of their losses, or of what these were computed from."""

    def __init__(self) -> None:
        self._alive: list[tuple[int, bool, weakref.ref[_Token], int]] = []

    def add(self, loss: torch.Tensor, step: int, *, steps: int = 1) -> None:
        """Takes note of a loss that a backward is run for."""
        node: Any = loss.grad_fn
        if node is not None:
            self._mark(node, step, steps, is_loss=True)
            below = _below(node)
            if below is not node:
                self._mark(below, step, steps, is_loss=False)

    def _mark(self, node: Any, step: int, steps: int, *, is_loss: bool) -> None:
        token, metadata = _Token(), node.metadata
        alive = metadata.get(_ALIVE)
        metadata[_ALIVE] = token if alive is None else (alive, token)  # lives as long as the node does
        self._alive.append((step, is_loss, weakref.ref(token), steps))

    def count(self, step: int) -> tuple[int, int]:
        """How many of the steps before have a graph that is alive, and how many of them their loss."""
        self._alive = [entry for entry in self._alive if entry[2]() is not None]
        every = {earlier: steps for earlier, _, _, steps in self._alive if earlier < step}
        losses = {earlier: steps for earlier, is_loss, _, steps in self._alive if is_loss and earlier < step}
        return min(step, sum(every.values())), min(step, sum(losses.values()))


def _below(node: Any) -> Any:
    """A node a few operations below a loss, which what the loss was computed from keeps alive."""
    for _ in range(_BELOW):
        for following, _ in node.next_functions:
            if following is not None and leaf_of(following) is None:
                node = following
                break
        else:
            break
    return node


class _Token:
    """Dies with the node that holds it."""

    __slots__ = ("__weakref__",)


def _previous(old: list[tuple[Any, int]], step: int) -> Iterator[str]:
    for node, earlier in old[:_MOST_PREVIOUS]:
        ago = "1 step" if step - earlier == 1 else f"{step - earlier} steps"
        shape = lossgraphs.shape_of(node)
        yield f"the result of {node.name()}{'' if shape is None else f' of shape {list(shape)}'}, made {ago} before"
