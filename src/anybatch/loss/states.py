"""Batches cut along time, calls of ``chunk_loss``, and the states that it hands on from chunk to chunk.

A gradient that would be wrong is refused here: of a state that is written to, is lost, or has hidden parts.
"""

import contextlib
import enum
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import GeneratorType
from typing import Any, NamedTuple

import torch
from torch.nn.utils.rnn import PackedSequence

from anybatch.batch.counting import count_samples
from anybatch.batch.trees import flat, leaves, like, map_leaves
from anybatch.batch.writes import Writes
from anybatch.errors import BatchError, CountError, LossError, NotSplittable
from anybatch.loss.cutting import in_place_explained
from anybatch.loss.weights import FORWARD, Count, counted, fetched
from anybatch.memory.checkpointing import Checkpoint, hidden_dropout, why_hidden
from anybatch.memory.meter import storages_of
from anybatch.records.means import Mean
from anybatch.tensors.modules import devices_among
from anybatch.tensors.randomness import RandomState

Dims = Sequence[int | None]
"""Along which dimension the sequences lie, for each leaf of a state; ``None`` for what has no rows."""

_FINE = (torch.Tensor, type(None), bool, int, float, complex, str, bytes, enum.Enum)
_FINE_OF_TORCH = (torch.dtype, torch.device, torch.Size)


class Steps:
    """A batch of sequences that can be cut along time.

    Args:
        broadcast: dotted paths of leaves that are no sequences and go to every chunk as they are.
    """

    def __init__(self, batch: Any, dim: int, broadcast: Sequence[str] = ()) -> None:
        self._batch = batch
        self._dim = dim
        self._sequences: set[int] = set()
        self._sizes: list[int] | None = None
        # where the rows of packed sequences come from; ``None`` if they are in their own order
        self.order: torch.Tensor | None = None
        self._first: tuple[str, int] | None = None  # the leaf that says how many steps there are
        unknown = set(broadcast)
        for label, path, leaf in leaves(batch, "batch"):
            prefixes = {".".join(path[:n]) for n in range(1, len(path) + 1)}
            if prefixes.isdisjoint(broadcast):
                self._look_at(label, leaf)
            unknown -= prefixes
        if unknown:
            raise BatchError(f"OverTime(broadcast=...) names {sorted(unknown)[0]!r}, which is not in the batch")
        if self._first is None:
            raise BatchError(
                f"the batch has no tensor with a dimension {dim} of time; expected tensors of shape [rows, time, ...] "
                "or PackedSequences"
            )
        label = self._first[0]
        self.total: int = self._first[1]
        if not self.total:
            raise BatchError(f"{label} has no steps along dimension {dim}; expected at least one")

    def _look_at(self, label: str, leaf: Any) -> None:
        if isinstance(leaf, PackedSequence):
            sizes = leaf.batch_sizes.tolist()
            if self._sizes not in (None, sizes) or (self._first is not None and self._sizes is None):
                raise BatchError(
                    f"{label} is packed with different lengths than the sequences before it; expected the same "
                    "lengths for all",
                    path=label,
                )
            self._sizes, self.order = sizes, leaf.sorted_indices
            self._note(label, leaf, len(sizes))
        elif isinstance(leaf, torch.Tensor) and leaf.dim() > self._dim:
            self._note(label, leaf, leaf.shape[self._dim])
            if self._sizes is not None:
                raise BatchError(
                    f"{label} is a tensor of shape {tuple(leaf.shape)} beside PackedSequences; expected it to be "
                    "packed, too, or named in OverTime(broadcast=...)",
                    path=label,
                )

    def _note(self, label: str, leaf: Any, steps: int) -> None:
        other, total = self._first = self._first or (label, steps)
        if total != steps:
            raise BatchError(
                f"{label} has {steps} steps along dimension {self._dim}, {other} has {total}; expected the same "
                "for all sequences. Name anything that is not a sequence in OverTime(broadcast=...)",
                path=label,
            )
        self._sequences.add(id(leaf))

    @property
    def is_packed(self) -> bool:
        """Whether sequences end at different steps."""
        return self._sizes is not None

    def rows_at(self, step: int) -> int | None:
        """How many sequences reach a step; ``None`` if all do."""
        if self._sizes is None:
            return None
        return self._sizes[step] if step < self.total else 0

    def cut(self, length: int) -> "Chunks":
        """Cuts the batch along time."""
        bounds = [(start, min(start + length, self.total)) for start in range(0, self.total, length)]
        offsets = [0, *itertools.accumulate(self._sizes or [1] * self.total)]
        items = [offsets[stop] - offsets[start] for start, stop in bounds]
        columns: dict[int, Sequence[Any]] = {}
        for _, _, leaf in leaves(self._batch):
            if isinstance(leaf, PackedSequence) and id(leaf) in self._sequences:
                pairs = zip(_split(leaf.data, 0, items), bounds, strict=True)
                columns[id(leaf)] = [PackedSequence(data, leaf.batch_sizes[a:b]) for data, (a, b) in pairs]
            elif id(leaf) in self._sequences:
                columns[id(leaf)] = _split(leaf, self._dim, [stop - start for start, stop in bounds])
        batches = [self._chunk(columns, index) for index in range(len(bounds))]
        return Chunks(bounds, batches, items, self._batch, self.is_packed)

    def _chunk(self, columns: Mapping[int, Sequence[Any]], index: int) -> Any:
        return map_leaves(lambda leaf: columns[id(leaf)][index] if id(leaf) in columns else leaf, self._batch)


def _split(tensor: torch.Tensor, dim: int, sizes: Sequence[int]) -> Sequence[torch.Tensor]:
    """Views of consecutive parts; their gradients are joined once where there is a graph."""
    if tensor.requires_grad:
        return torch.split(tensor, list(sizes), dim)
    starts = itertools.accumulate(sizes, initial=0)
    return [tensor.narrow(dim, start, size) for start, size in zip(starts, sizes, strict=False)]


@dataclass
class Chunks:
    """A batch cut along time."""

    bounds: Sequence[tuple[int, int]]  # the first step of each chunk and the one after its last
    batches: Sequence[Any]  # the chunks
    items: Sequence[int]  # how many steps of sequences each has
    whole: Any  # the batch
    is_packed: bool  # whether sequences end at different steps
    _shares: dict[Any, list[float]] = field(default_factory=dict)

    def share(self, index: int, count: Count, *, is_weighed: bool) -> Callable[[str], float]:
        """Which share of the batch's items a chunk has, by the name of a loss that is a plain mean over them."""

        def share(name: str) -> float:
            counts: Any = count
            if isinstance(count, Mapping):
                if name not in count:
                    raise CountError(f"count has no entry for the loss {name!r}; it has {sorted(count)}")
                counts = count[name]
            if counts not in self._shares:
                self._shares[counts] = self._counted(counts, is_weighed)
            return self._shares[counts][index]

        return share

    def _counted(self, count: Any, is_weighed: bool) -> list[float]:
        if count is count_samples or count == FORWARD:
            if is_weighed and self.is_packed:
                raise CountError(
                    "a plain loss over packed sequences is the mean over their steps, whose number differs between "
                    "micro-batches and batches of a window; expected anybatch.Mean(total, number of steps), or "
                    "count= with a function that counts the steps"
                )
            return [items / sum(self.items) for items in self.items]
        *parts, total = fetched([counted(count, batch) for batch in (*self.batches, self.whole)])
        if abs(sum(parts) - total) > 1e-6 * max(1.0, abs(total)):
            raise CountError(
                f"count of the whole sequences is {total:g}, of their chunks together {sum(parts):g}; expected a count "
                "that adds up over time. Labels that are shifted within the loss do not: shift them in the batch "
                "(x = tokens[:, :-1], y = tokens[:, 1:]) and count without shift"
            )
        return [part / total if total else 0.0 for part in parts]


def checked_state(state: Any, where: str) -> Any:
    """Refuses a state with something in it that no gradient would go through, or that may change unseen.

    It gives the same leaves in containers of their own, so that nobody else can change what is in them.
    """
    wrong = [leaf for leaf in flat(state) if not isinstance(leaf, (*_FINE, *_FINE_OF_TORCH))]
    if not wrong:
        return map_leaves(lambda leaf: leaf, state)
    label = next(label for label, _, leaf in leaves(state, "state") if leaf is wrong[0])
    hint = "make it a dataclass, or register its class with torch.utils._pytree, so that its tensors are found"
    if isinstance(wrong[0], PackedSequence):
        hint = "put its .data there and leave the rest in the batch, or pad it"
    elif type(wrong[0]).__module__ == "numpy":
        hint = "make it a tensor"
    elif isinstance(wrong[0], torch.Generator):
        hint = "draw from the global random state, which is restored for the second pass"
    raise LossError(
        f"{label} of {where} is a {type(wrong[0]).__name__}; expected tensors and plain values in nested containers: "
        + hint
    )


def detached(state: Any) -> Any:
    """A state without its graph."""
    return map_leaves(lambda leaf: leaf.detach() if isinstance(leaf, torch.Tensor) else leaf, state)


def kept(state: Any, given: Any) -> Any:
    """A state without its graph and without what else lies in the storages of its tensors.

    The last step of an output, ``output[:, -1]``, would keep the output of the whole chunk. What was in the state
    before, such as the outputs of an encoder, stays where it is.
    """
    before = _storages(given)

    def alone(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        held = storages_of(leaf)
        is_view = len(held) == 1 and held[0].nbytes() > leaf.nbytes and held[0]._cdata not in before
        return leaf.detach().clone() if is_view else leaf.detach()

    return map_leaves(alone, state)


def own_bytes(state: Any, given: Any) -> int:
    """The bytes of a state that were not in the one before."""
    before = _storages(given)
    tensors = {id(leaf): leaf for leaf in flat(state) if isinstance(leaf, torch.Tensor)}
    return sum(t.nbytes for t in tensors.values() if not any(s._cdata in before for s in storages_of(t)))


def _storages(state: Any) -> set[int]:
    return {storage._cdata for leaf in flat(state) if isinstance(leaf, torch.Tensor) for storage in storages_of(leaf)}


def tensors_of(tree: Any) -> list[torch.Tensor]:
    """The tensors in a container whose writes can be seen, those of ``PackedSequence`` s included."""
    found = (leaf.data if isinstance(leaf, PackedSequence) else leaf for leaf in flat(tree))
    return [tensor for tensor in found if isinstance(tensor, torch.Tensor) and not tensor.is_inference()]


def standing_in(state: Any) -> tuple[Any, list[torch.Tensor | None]]:
    """A state of leaves of the graph, and these by position: ``None`` for what takes no gradient."""
    values = flat(state)
    can = [isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex()) for value in values]
    found = [value.detach().requires_grad_() if fits else None for value, fits in zip(values, can, strict=True)]
    return like(state, [old if leaf is None else leaf for old, leaf in zip(values, found, strict=True)]), found


def is_near(found: Any, expected: Any) -> bool:
    """Whether two leaves of a state are the same but for rounding; it waits for the device."""
    if not isinstance(found, torch.Tensor) or not isinstance(expected, torch.Tensor):
        return type(found) is type(expected) and bool(found == expected or found != found)
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return False
    if not found.is_floating_point():
        return torch.equal(found, expected)
    if not found.numel():
        return True
    worst, size = torch.stack([(found - expected).abs().max(), expected.abs().max()]).double().tolist()
    return not worst > math.sqrt(torch.finfo(found.dtype).eps) * max(size, 1e-30)  # NaN is no difference


class RowDims:
    """Along which dimension the sequences of a batch lie, in each tensor of a state.

    It is the first dimension of as many sequences as there are, but for ``[layers, rows, width]`` of the recurrent
    layers of torch. It is decided at the first states, where no sequence has ended yet.
    """

    def __init__(
        self, given: int | None, modules: Sequence[torch.nn.Module], known: dict[tuple[int, int], int | None]
    ) -> None:
        self._given = given
        self._recurrent = [module for module in modules if isinstance(module, torch.nn.RNNBase)]
        self._known = known
        self._found: dict[int, list[int | None]] = {}

    def of(self, state: Any, rows: int) -> Dims:
        """The dimension for each leaf."""
        count = len(flat(state))
        if count not in self._found:
            labelled = enumerate(leaves(state, "state"))
            found = [self._dim(leaf, rows, self._known.get((count, n)), label) for n, (label, _, leaf) in labelled]
            self._found[count] = found
            if rows > 1:
                self._known.update({(count, position): dim for position, dim in enumerate(found)})
        return self._found[count]

    def _dim(self, leaf: Any, rows: int, known: int | None, label: str) -> int | None:
        fitting = [dim for dim, size in enumerate(leaf.shape) if size == rows] if isinstance(leaf, torch.Tensor) else []
        wanted = known if self._given is None else self._given
        if wanted in fitting or self._given is not None:
            return wanted if wanted in fitting else None
        if not fitting or leaf.dim() < 3 or fitting[:2] != [0, 1]:
            return fitting[0] if fitting else None
        if leaf.dim() == 3 and any(_is_state_of(module, leaf) for module in self._recurrent):
            return 1
        raise BatchError(
            f"{label} has the shape {tuple(leaf.shape)}, and the {rows} sequences may be in dimension 0 or "
            "dimension 1; expected OverTime(state_dim=0), or state_dim=1 for [layers, rows, ...]",
            path=label,
        )


def _is_state_of(module: torch.nn.RNNBase, leaf: torch.Tensor) -> bool:
    widths = {module.hidden_size, module.proj_size or module.hidden_size}
    return leaf.shape[0] == module.num_layers * (2 if module.bidirectional else 1) and leaf.shape[2] in widths


def narrowed(state: Any, dims: Dims, start: int, stop: int) -> Any:
    """Some rows of a state; what has no rows stays."""
    return _along(dims, lambda leaf, dim: leaf.narrow(dim, start, stop - start), state)


def reordered(state: Any, dims: Dims, order: torch.Tensor) -> Any:
    """A state with its rows in another order."""
    return _along(dims, lambda leaf, dim: leaf.index_select(dim, order.to(leaf.device)), state)


def joined(states: Sequence[Any], dims: Dims) -> Any:
    """One state of the rows of several, at least one; what has no rows is that of the first."""
    if len(states) == 1:
        return states[0]
    columns = zip(*map(flat, states), strict=True)
    return like(states[0], [c[0] if dim is None else torch.cat(c, dim) for c, dim in zip(columns, dims, strict=True)])


def _along(dims: Dims, function: Callable[[torch.Tensor, int], torch.Tensor], state: Any) -> Any:
    pairs = zip(flat(state), dims, strict=True)
    return like(state, [leaf if dim is None else function(leaf, dim) for leaf, dim in pairs])


class Carried(NamedTuple):
    """The last states of a batch, for the next one to begin with."""

    rows: int  # of the batch
    # states of consecutive rows of the batch before, each with the first row and the one after the last
    parts: tuple[tuple[int, int, Any], ...] = ()
    coming: tuple[tuple[int, int, Any], ...] = ()  # those of the batch that is going through

    def of(self, start: int, stop: int, rows: int, dims: RowDims) -> Any:
        """The state of some rows; ``None`` while the first batch goes through.

        Raises:
            BatchError: the batch has another number of rows, or the states of these rows don't make one.
        """
        if rows != self.rows:
            raise BatchError(
                f"the batch has {rows} sequences, the state carried to it {self.rows}; expected the same streams "
                "in every batch. Call reset() where new streams begin, and drop a smaller last batch "
                "(drop_last=True)"
            )
        found = [(first, end, state) for first, end, state in self.parts if first < stop and start < end]
        if not found or [bounds[:2] for bounds in found] == [(start, stop)]:
            return found[0][2] if found else None
        first, end, largest = max(found, key=lambda part: part[1] - part[0])
        where = dims.of(largest, end - first)
        states = [narrowed(state, where, max(start - a, 0), min(stop, b) - a) for a, b, state in found]
        _check_rest(states, where)
        return joined(states, where)

    def followed_by(self, start: int, stop: int, state: Any) -> "Carried":
        """The same with the state after some rows of the batch that goes through."""
        coming = (*self.coming, (start, stop, state))
        return Carried(self.rows, coming) if stop == self.rows else self._replace(coming=coming)

    def state_dict(self) -> dict[str, Any]:
        """Plain containers around the states."""
        return {"rows": self.rows, "parts": [list(part) for part in self.parts]}

    @staticmethod
    def from_state_dict(state: Mapping[str, Any]) -> "Carried":
        """Makes what ``state_dict`` was taken of."""
        return Carried(state["rows"], tuple((start, stop, value) for start, stop, value in state["parts"]))


def _check_rest(states: Sequence[Any], dims: Dims) -> None:
    for dim, (first, *others) in zip(dims, zip(*map(flat, states), strict=True), strict=True):
        is_tensor = isinstance(first, torch.Tensor)
        if dim is None and not all(torch.equal(first, one) if is_tensor else first == one for one in others):
            raise BatchError(
                "the carried states of two micro-batches differ in values without rows, and the next batch is "
                "split differently; expected one row per sequence, or the same value for all sequences"
            )


class Called(NamedTuple):
    """The result of ``chunk_loss`` on one chunk."""

    result: Any  # a loss, a ``Mean``, a mapping of names to either, or ``None``
    state: Any  # after the chunk
    metrics: Any  # ``Mean`` s by name, or ``None``


class ChunkCall:
    """Calls the user's function on the chunks of a micro-batch."""

    def __init__(
        self, function: Callable[..., Any], model: Any, modules: Sequence[torch.nn.Module], batch: Any
    ) -> None:
        self._function, self._model, self._modules = function, model, modules
        self._batch = tensors_of(batch)
        self.devices = devices_among(modules)  # whose random states count
        self.checkpoint = Checkpoint("the chunk_loss of OverTime", modules, devices=self.devices)
        self.gives_losses = False  # whether any chunk has returned a loss
        # whether a loss given as a function draws random numbers; ``None`` before the first
        self.draws: bool | None = None

    def __call__(self, chunk: Any, state: Any, *, wants_loss: bool = True, looks: bool = False) -> Called:
        """Runs a chunk; if it ``looks``, it finds out whether a loss that is a function draws random numbers."""
        watched = tensors_of(state)
        given, batch = Writes(watched), Writes(self._batch)
        with in_place_explained("the state that chunk_loss was given"):
            found = self._function(
                self._model, chunk, map_leaves(lambda leaf: leaf, state)
            )  # containers are not shared
            result, new, metrics = _checked_parts(found, watched)
            self.gives_losses |= result is not None
            if callable(result) and not isinstance(result, (torch.Tensor, Mean, Mapping)):
                result = self._evaluated(result, looks=looks) if wants_loss else None
        if given.were_made:
            raise LossError(
                "chunk_loss modifies its input state in place (such as state.mul_() or state[...] = x), so the "
                "chunk can't run again; expected a new state: clone it first"
            )
        if batch.were_made:
            raise LossError(
                "chunk_loss wrote to a tensor of the batch in place, so the chunk would differ when it runs again; "
                "use the out-of-place operation, or clone the tensor first"
            )
        if isinstance(result, (GeneratorType, tuple)):
            kind = "generator" if isinstance(result, GeneratorType) else "tuple"
            raise LossError(
                f"the loss of chunk_loss is a {kind}; expected a loss, a Mean, a mapping of names to either, None, "
                "or a function without arguments that returns one of these. Metrics come after the state: (loss, "
                "state, metrics)"
            )
        return Called(result, checked_state(new, "chunk_loss"), metrics)

    def _evaluated(self, loss: Callable[[], Any], *, looks: bool) -> Any:
        if not looks:
            return loss()
        before = RandomState(self.devices)
        result = loss()
        has_drawn = not before.is_now()
        if self.draws is None:
            self.draws = has_drawn
        elif has_drawn and not self.draws:
            raise LossError(
                "the loss of chunk_loss is a function that draws random numbers in some chunks and not in the "
                "first; expected the loss itself instead of the function, so that they are drawn in the order of "
                "the chunks"
            )
        return result

    @contextlib.contextmanager
    def looking_back(self) -> Iterator[None]:
        """Refuses bidirectional layers in this block: within a chunk they do not see later chunks."""
        with contextlib.ExitStack() as stack:
            for module in self._modules:
                if isinstance(module, torch.nn.RNNBase) and module.bidirectional:
                    stack.callback(module.register_forward_pre_hook(_refuse_both_ways).remove)
            yield

    def refuse_hidden_dropout(self) -> None:
        """Refuses recurrent layers whose dropout between layers can't be replayed."""
        if found := hidden_dropout(self._modules):
            raise NotSplittable(
                f"{why_hidden(found[0])}, or OverTime(mode='truncated', chunk=...), which runs every chunk once",
                modules=[type(module).__name__ for module in found],
            )


def _checked_parts(found: Any, before: Sequence[torch.Tensor]) -> tuple[Any, Any, Any]:
    """The loss, the state and the metrics; refuses an empty state after one with tensors."""
    if not isinstance(found, tuple) or len(found) not in (2, 3):
        raise LossError(f"chunk_loss gave a {type(found).__name__}; expected (loss, state) or (loss, state, metrics)")
    result, new, metrics = (*found, None)[:3]
    if metrics is not None and not isinstance(metrics, Mapping):
        raise LossError(f"the metrics of chunk_loss are a {type(metrics).__name__}; expected a mapping of Means")
    if before and not tensors_of(new):  # an RNN would start every chunk from ``None``
        raise LossError(
            f"chunk_loss gave the state {new!r} after one with tensors; expected the state that the next chunk "
            "starts from: return (loss, state)"
        )
    return result, new, metrics


def _refuse_both_ways(module: torch.nn.Module, _: Any) -> None:
    kind = type(module).__name__
    raise NotSplittable(
        f"a bidirectional {kind} runs within chunk_loss of OverTime, where its backward direction would restart at "
        "the end of every chunk and never see what follows. Choose one:\n  - run it on all steps before they are "
        "cut (exact): OverTime(..., prepare=lambda model, batch: {**batch, 'x': model.rnn(batch['x'])[0]});\n  "
        f"- a {kind} in one direction only (a different model).",
        modules=[kind],
    )
