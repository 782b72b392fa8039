"""Goes through the graph of a loss before its backward: what it reaches, its summands and activations, what is old."""

import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from anybatch.doctor.graphs import (
    ADDITIONS,
    MOVING,
    SCALING,
    SUMMING,
    Graph,
    following,
    leaf_of,
    nodes_of,
    outputs_first,
    raw_saved,
    reentrant,
    sort_of,
    summands,
)
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
        of_softmax = (node for node in seen.nodes if seen.names.get(node) in SOFTMAXES)
        softmaxes = [softmax(node, rows) for node in of_softmax]
        parts = summands(loss.grad_fn) if loss.numel() == 1 else []
        advantages = products(seen.nodes, seen.names)
        inner = entrywise(parts)
        reach = self._reach(loss) if len(inner) > 1 or advantages else lambda node: ()
        return Walk(
            nodes=len(seen.nodes),
            cut_short=len(seen.nodes) > self._limit,
            reached=reached,
            outside=outside,
            constant_terms=sum(1 for part in parts if part is None or (len(parts) > 1 and not reach(part))),
            softmaxes=tuple(one for one in softmaxes if one is not None),
            doubled=tuple(dict.fromkeys(fed(seen.nodes, seen.names, TAKERS))),
            previous=tuple(_previous(seen.old, step)),
            again=seen.again,
            hidden=sum(1 for node in seen.nodes if node not in seen.names and reentrant(node)),
            kinds={
                kind: count
                for place, (kind, count) in enumerate(kinds.most_common())
                if place < _MOST_KINDS or kind.startswith(_STEPWISE)
            },
            terms=terms(inner, reach),
            advantages=tuple(
                tuple(sorted({*own} - {*scored}))  # a trunk that both share is trained by the scores as well
                for one, other, logs in advantages
                if {*(own := reach(one))} - {*(scored := reach(other))} and {*scored} - {*own}
                if logs or not {*own} & {*scored}
            ),
            spread=averaged(loss.grad_fn, seen.scored) or spread(loss.grad_fn, rows, seen.scored),
            activated=tuple(activated(seen.nodes, seen.names)),
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
                if SCORES in marks:
                    seen.scored[node] = marks[SCORES]
                if made < step:
                    seen.old.append((node, made))
        crossed = [node for node, shape in seen.scored.items() if shape]
        if len(crossed) < len(seen.scored):  # a mixture asks its parts for theirs
            within = set(outputs_first((one for node in crossed for one in following(node)), self._limit))
            seen.scored = {node: shape for node, shape in seen.scored.items() if node not in within}
        return seen

    def _sorted(self, leaves: list[torch.Tensor], step: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Numbers of the leaves: those that are known, and those that no root has."""
        numbering, reached, outside = self._numbering, list[int](), list[int]()
        is_bare = numbering.is_empty  # no model and no optimizer: weights are plain tensors that are updated by hand
        tracked = {number for number, _ in numbering.tracked()} if leaves else set()
        for leaf in leaves:
            number = numbering.parameter(leaf, is_tracked=True) if is_bare else numbering.known(leaf)
            if number in tracked:
                reached.append(number)
            number = number if number is not None else self._stranger(leaf, step)
            if not is_bare and number is not None and not numbering.facts(number).registered:
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
        after = next((one for one in following(node) if one is not None and leaf_of(one) is None), None)
        if after is None:
            break
        node = after
    return node


class _Token:
    """Dies with the node that holds it."""

    __slots__ = ("__weakref__",)


def _previous(old: list[tuple[Any, int]], step: int) -> Iterator[str]:
    for node, earlier in old[:_MOST_PREVIOUS]:
        ago = "1 step" if step - earlier == 1 else f"{step - earlier} steps"
        shape = shape_of(node)
        yield f"the result of {node.name()}{'' if shape is None else f' of shape {list(shape)}'}, made {ago} before"


_MOST_TERMS = 8
_MOST_PRODUCTS = 60  # nodes from the loss on among which products of an advantage are looked for
_MOST_TOP = 6
_LONGEST_CHAIN = 12
SCORES = "anybatch.doctor.scores"
"""Marks what ``log_prob`` gave: the shape of the distributions where each scores all of as many values, else empty."""

SOFTMAXES = frozenset({"SoftmaxBackward0", "LogSoftmaxBackward0"})
_PAIRING = frozenset({"SubBackward0", "RsubBackward1", "MulBackward0"})
_LOGARITHMIC = (
    "Log", "Sub", "Rsub", "Add", "Gather", "Index", "Select", "NllLoss", "BinaryCrossEntropy", "Stack", "Cat", "Min",
)  # fmt: skip
"""What log-probabilities come from: a density ends with differences, and one of classes picks an entry."""

_PICKING = ("Gather", "Index", "Select", "Sum", "Mean", "Clamp", "LogBackward")
_BY_ENTRY = ADDITIONS | SCALING | nodes_of(
    *("Pow", "Abs", "Maximum", "Minimum", "Clamp", "ClampMin", "ClampMax", "Relu", "Sqrt", "Square", "Where"),
    *("Mean", "Sum", "Exp", "Log", "Stack", "Cat", "MaskedFill"),
)  # fmt: skip
_LINEAR = nodes_of("Addmm", "Mm")
_ACTIVATIONS = {
    "SoftmaxBackward0": "softmax", "LogSoftmaxBackward0": "log_softmax", "SigmoidBackward0": "sigmoid",
    "ReluBackward0": "relu", "TanhBackward0": "tanh", "LogSigmoidBackward0": "logsigmoid",
}  # fmt: skip
TAKERS = {
    "LogSoftmaxBackward0": "log_softmax", "BinaryCrossEntropyWithLogitsBackward0": "binary_cross_entropy_with_logits",
    "NllLossBackward0": "nll_loss", "NllLoss2DBackward0": "nll_loss", "SigmoidBackward0": "sigmoid",
    "SoftmaxBackward0": "softmax",
}  # fmt: skip
DISTANCES = {
    "MseLossBackward0": "mse_loss", "SmoothL1LossBackward0": "smooth_l1_loss", "HuberLossBackward0": "huber_loss",
}  # fmt: skip
_USUAL = frozenset(
    {("log_softmax", "nll_loss"), ("relu", "softmax"), ("relu", "sigmoid"), ("tanh", "sigmoid"), ("tanh", "softmax")}
    | {("relu", "log_softmax"), ("tanh", "log_softmax"), ("sigmoid", "softmax"), ("softmax", "sigmoid")}
)
_NLLS = frozenset({"NllLossBackward0", "NllLoss2DBackward0"})


def shape_of(node: Any) -> tuple[int, ...] | None:
    """The shape of what a node of the graph had made in the forward, ``None`` where this torch does not tell."""
    made = getattr(node, "_input_metadata", None)
    if not made:
        return None
    return tuple(int(size) for size in made[0].shape)


def entrywise(parts: Sequence[Any]) -> list[Any]:
    """Summands, with those of the entries in the place of a mean or sum over them; numbers in these are left out."""
    found: list[Any] = []
    for part in parts:
        before = following(part) if part is not None and part.name() in SUMMING else []
        is_sum = len(before) == 1 and before[0] is not None and before[0].name() in ADDITIONS
        found += [inner for inner in summands(before[0]) if inner is not None] if is_sum else [part]
    return found


def terms(parts: Sequence[Any], reach: Callable[[Any], tuple[int, ...]]) -> tuple[tuple[int, ...], ...]:
    """What each summand reaches, where there are several but not many."""
    if not 2 <= len(parts) <= _MOST_TERMS:
        return ()
    return tuple(() if part is None else reach(part) for part in parts)


def products(nodes: Sequence[Any], names: Mapping[Any, str]) -> list[tuple[Any, Any, bool]]:
    """Products one side of which is an advantage, maybe normalised: a difference with a constant or a target.

    For each the node of the advantage, that of the other side, and whether the other is a logarithm for certain.
    """
    found = []
    for node in nodes[:_MOST_PRODUCTS]:
        if names.get(node) != "MulBackward0" or (shape_of(node) or (1,)) == (1,):
            continue
        sides = following(node)
        if len(sides) == 2 and None not in sides:
            pairs = ((one, other) for one, other in (sides, sides[::-1]) if _is_score(other, names))
            found += [(one, other, _is_log(other, names)) for one, other in pairs if _is_advantage(one, names)]
    return found


def _chain(node: Any, names: Mapping[Any, str], also: tuple[str, ...] = ()) -> Iterator[tuple[str, list[Any]]]:
    """A node and those that it is made of by scaling, moving, and what begins like ``also``: names, and all inputs."""
    for _ in range(_LONGEST_CHAIN):
        name, before = names.get(node, ""), following(node)
        yield name, before
        real = [after for after in before if after is not None]
        if not real or not (name in SCALING or name in MOVING or name.startswith(also)):
            return
        node = real[0]


def _is_log(node: Any, names: Mapping[Any, str]) -> bool:
    """Whether a tensor holds logarithms: of a softmax, or scores less their logsumexp, of which some are picked."""
    return any(
        name.startswith(("LogSoftmax", "Logsumexp", "NllLoss", "Softmax"))  # the logarithm of any number is none
        or any(names.get(one) == "LogsumexpBackward0" for one in before)
        for name, before in _chain(node, names, _PICKING)
    )


def _is_score(node: Any, names: Mapping[Any, str], *, inner: bool = False) -> bool:
    """Whether a tensor may hold log-probabilities, or ratios of probabilities; a learned scale does not."""
    for name, before in _chain(node, names, ("Sum", "Mean", "Clamp")):
        if name.startswith(_LOGARITHMIC):
            return True
        if name == "ExpBackward0" and before[0] is not None and not inner:
            return _is_score(before[0], names, inner=True)
    return False


def _is_advantage(node: Any, names: Mapping[Any, str]) -> bool:
    for name, before in _chain(node, names, ("SubBackward0", "RsubBackward1")):
        real = [after for after in before if after is not None]
        if name in ("SubBackward0", "RsubBackward1"):
            if len(real) < 2 or any(_is_bootstrapped(one, names) for one in real):
                return len(before) == 2
            if names.get(real[1]) not in ("MeanBackward0", "MeanBackward1"):
                return False
    return False


def _is_bootstrapped(node: Any, names: Mapping[Any, str]) -> bool:
    """Whether a tensor is a constant and a product, as ``reward + gamma * value`` is."""
    before = following(node)
    real = [after for after in before if after is not None]
    return names.get(node) == "AddBackward0" and len(before) == 2 and len(real) == 1 and names.get(real[0]) in SCALING


def spread(start: Any, rows: int, scored: Mapping[Any, tuple[int, ...]]) -> tuple[int, ...]:
    """The shape, ``(N, 1)`` or ``(N,)``, of what a constant is spread over below a loss to ``(N, N)``; else empty.

    Only operations that take entry by entry, and means and sums, lie between it and the loss, so that each row of the
    batch is compared with each other one. What ``averaged`` looks at is left to it.
    """
    nodes = dict.fromkeys([start])
    for node in (waiting := list(nodes)):
        if scored.get(node):
            continue
        name, before = node.name(), following(node)
        real = [after for after in before if after is not None]
        count = (shape_of(node) or (0,))[0] if name in _PAIRING and len(before) == 2 and len(real) == 1 else 0
        if count > 1 and shape_of(node) == (count, count) and (count == rows or _is_column(real[0], count)):
            side = shape_of(real[0]) or ()
            kernel = any(after.name() == "ExpBackward0" for after in waiting)  # of all pairs, as of a density
            if side in ((count, 1), (count,)) and (count == rows or not (kernel or _has_pairs(start))):
                return side
        if len(waiting) < _MOST_PRODUCTS and (name in _BY_ENTRY or name in MOVING):
            waiting.extend(after for after in real if after not in nodes)
            nodes.update(dict.fromkeys(real))
    return ()


def _has_pairs(start: Any) -> bool:
    """Whether entries are compared with each other below a loss, as in a kernel, each with the shape of all pairs."""
    for node in outputs_first([start], _MOST_PRODUCTS):
        real, shape = [after for after in following(node) if after is not None], shape_of(node) or ()
        if node.name() in _PAIRING and len(real) == 2 and len(shape) == 2 and shape[0] == shape[1]:
            sides = [shape_of(one) for one in real]
            if any(one in ((shape[0], 1), (shape[0],)) for one in sides) and len({*sides, shape}) > 1:
                return True
    return False


def _is_leaf(kind: Any) -> bool:
    return bool(sort_of(kind)[0])


def _is_column(node: Any, rows: int) -> bool:
    """Whether it is what a linear layer gives, one number for each row; the model may have been called again since."""
    for _ in range(_MOST_PRODUCTS):
        real = [after for after in following(node) if after is not None]
        real = [after for after in real if len(real) == 1 or not _is_leaf(type(after))]  # a bias is added to a product
        if node.name() in _LINEAR or len(real) != 1 or node.name() not in (*_BY_ENTRY, *MOVING):
            break
        node = real[0]
    return node.name() in _LINEAR and shape_of(node) == (rows, 1)


def averaged(start: Any, scored: Mapping[Any, tuple[int, ...]]) -> tuple[int, ...]:
    """The shape of distributions that score each of as many values, of which a summand is the mean or sum; else empty.

    A mixture, a kernel density and a bound of mutual information take rows of such scores, weigh each pair, or have
    the scores of pairs that belong together beside them: that is meant.
    """
    for part in summands(start) if scored and all(scored.values()) else ():
        node = following(part)[0] if part is not None and part.name() in SUMMING else None
        while node is not None and node not in scored:
            real = [after for after in following(node) if after is not None]
            fits = node.name() in SCALING and len(real) == 1 and not _weighs_pairs(node)
            node = real[0] if fits else None
        if node is not None:
            return scored[node]
    return ()


def _weighs_pairs(node: Any) -> bool:
    """Whether a product or quotient has a constant for each entry, or one that hooks have packed."""
    for _, entry in raw_saved(node):
        if getattr(entry, "unpack_hook", node) is not None:
            return True
        if entry.data is not None and tuple(entry.data.shape) == shape_of(node):
            return True
    return False


def top(start: Any) -> tuple[str, ...]:
    """The kinds of the first nodes of a graph, each the first below the one before that is in the graph."""
    found: list[str] = []
    node = start
    while node is not None and len(found) < _MOST_TOP:
        found.append(node.name())
        node = next((after for after in following(node) if after is not None), None)
    return tuple(found)


def softmax(node: Any, rows: int) -> tuple[int, int, int, bool] | None:
    """The dim of a softmax, how many dims there are, the size of that one, and whether dim 0 is the batch."""
    shape = shape_of(node)
    if not shape:
        return None
    dim = int(node._saved_dim)
    dim = (dim - 2**64 if dim >= 2**63 else dim) % len(shape)
    return dim, len(shape), shape[dim], shape[0] == rows


def fed(nodes: Sequence[Any], names: Mapping[Any, str], takers: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Pairs of an activation and what it feeds directly, of ``TAKERS`` or ``DISTANCES``."""
    losses = {_fed(node, names) for node in nodes if names.get(node) in _NLLS}
    for node in nodes:
        taker = takers.get(names.get(node, ""))
        first = None if taker is None else _ACTIVATIONS.get(names.get(_fed(node, names), ""))
        if taker == "log_softmax" and node in losses:
            taker = "cross_entropy"
        if taker is not None and first is not None and (first, taker) not in _USUAL:
            yield first, taker


def activated(nodes: Sequence[Any], names: Mapping[Any, str]) -> Iterator[tuple[str, str]]:
    """The pairs of ``fed`` for ``DISTANCES``, without those of a distance that is taken of something else, too.

    The graph does not tell the lines of two calls apart, so that what holds for one is not said of the other.
    """
    pairs = list(dict.fromkeys(fed(nodes, names, DISTANCES)))
    for first, taker in pairs:
        calls = [node for node in nodes if DISTANCES.get(names.get(node, "")) == taker]
        if all(_ACTIVATIONS.get(names.get(_fed(node, names), "")) == first for node in calls):
            yield first, taker


def _fed(node: Any, names: Mapping[Any, str]) -> Any:
    """What feeds a node, behind all that only moves entries."""
    while True:
        before = following(node)
        node = before[0] if before else None
        if node is None or names.get(node) not in MOVING:
            return node
