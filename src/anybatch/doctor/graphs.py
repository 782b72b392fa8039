"""The autograd graph of tensors: which parameters each node leads to, and what the graph keeps in memory."""

import functools
import math
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from anybatch.doctor.values import storage_of
from anybatch.records.paths import Kept, Saved, Term

ADDITIONS = frozenset({"AddBackward0", "SubBackward0", "RsubBackward1"})
SCALING = frozenset({"MulBackward0", "DivBackward0", "NegBackward0"})
SUMMING = ("MeanBackward0", "SumBackward0")
_MOST_SAVED = 10


def nodes_of(*operations: str) -> frozenset[str]:
    """The nodes of operations, with those of their overloads."""
    return frozenset(f"{name}Backward{overload}" for name in operations for overload in range(3))


# What leaves each entry what it is, so that what comes before it feeds what comes after it.
MOVING = nodes_of(
    *("View", "UnsafeView", "ReshapeAlias", "Squeeze", "Unsqueeze", "ToCopy", "Clone", "Transpose", "Permute", "T"),
    *("Expand", "Slice", "Select", "Index", "IndexSelect", "MaskedSelect", "Alias", "Contiguous", "Flatten"),
)


def reentrant(node: Any) -> bool:
    """Whether a node is that of a reentrant checkpoint, whose inside is not in the graph."""
    return type(node).__name__ == "CheckpointFunctionBackward" and hasattr(node, "run_function")


@dataclass(slots=True)
class Graph:
    """For each node of the graph, the numbered leaves that it leads to, as bits of an integer."""

    bits: Mapping[int, int]  # of each leaf, by its ``id``
    inside: Callable[[Any], int] = lambda _: 0  # gives the bits that a reentrant checkpoint leads to besides its inputs
    place: Callable[[], str] = lambda: ""  # says what is running, for nodes that are new
    masks: dict[Any, int] = field(default_factory=dict)  # the bits by node; holding the nodes keeps their identity
    places: dict[Any, str] = field(default_factory=dict)  # what was running when a node was first seen
    others: dict[int, torch.Tensor] = field(default_factory=dict)  # leaves without a bit

    def of(self, tensor: torch.Tensor) -> int:
        """The bits of the leaves that a backward from a tensor reaches."""
        if not tensor.requires_grad:
            return 0
        node = tensor.grad_fn
        if node is None:
            return self._leaf(tensor)
        mask = self.masks.get(node)
        return self.behind(node) if mask is None else mask

    @property
    def outside(self) -> tuple[str, ...]:
        """The kinds and shapes of the leaves without a bit."""
        return tuple(f"{str(leaf.dtype).removeprefix('torch.')}{list(leaf.shape)}" for leaf in self.others.values())

    def _leaf(self, leaf: torch.Tensor) -> int:
        bit = self.bits.get(id(leaf), 0)
        if not bit:
            self.others.setdefault(id(leaf), leaf)
        return bit

    def behind(self, start: Any) -> int:
        """The bits of the leaves behind a node; goes through what is new only."""
        masks, place = self.masks, self.place()
        for node in inputs_first(start, masks):
            mask = 0 if (leaf := leaf_of(node)) is None else self._leaf(leaf)
            for after, _ in node.next_functions:
                mask |= masks[after] if after is not None else 0
            self.places[node] = place
            masks[node] = mask | (self.inside(node) if reentrant(node) else 0)
        return masks[start]


def is_custom(node: Any) -> bool:
    """Whether it belongs to an ``autograd.Function`` that somebody wrote."""
    return issubclass(type(node), torch.autograd.function.FunctionCtx)


@functools.lru_cache(maxsize=256)
def sort_of(kind: Any) -> tuple[bool, str]:  # asked of the type, since a node of the user's own may have any attribute
    """Whether nodes of a type gather the gradient of a leaf, and what they are called; empty for somebody's own."""
    is_own = issubclass(kind, torch.autograd.function.FunctionCtx)
    return hasattr(kind, "variable") and not is_own, "" if is_own else kind.__name__


def leaf_of(node: Any) -> torch.Tensor | None:
    """The leaf whose gradient a node gathers, ``None`` if it does not."""
    kind: Any = type(node)
    return node.variable if sort_of(kind)[0] else None


def inputs_first(start: Any, known: Container[Any] = (), most: float = math.inf) -> Iterator[Any]:
    """The nodes in an order in which each comes after those that it is made of, without those that are known.

    Nothing is called again for what lies deeper, since graphs are deeper than Python's stack.
    """
    waiting, done = [start], set[Any]()
    while waiting and len(done) < most:
        node = waiting[-1]
        missing = [one for one, _ in node.next_functions if one is not None and one not in done and one not in known]
        if node not in done and missing:
            waiting.extend(missing)
            continue
        waiting.pop()
        if node not in done:
            done.add(node)
            yield node


def outputs_first(starts: Iterable[Any], most: float = math.inf) -> list[Any]:
    """Some nodes and those behind them, the nearest first; a few more than the most if there are."""
    found = dict.fromkeys(starts)
    for node in (waiting := list(found)):
        if len(waiting) > most:
            break
        for one, _ in node.next_functions:
            if one is not None and one not in found:
                found[one] = None
                waiting.append(one)
    return waiting


def nodes_behind(tensors: Iterable[torch.Tensor]) -> list[Any]:
    """All nodes of the graph of some tensors, each once."""
    return outputs_first(tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None)


def following(node: Any) -> list[Any]:
    """What a node of the graph is made of; ``None`` for what has no graph."""
    return [after for after, _ in node.next_functions]


def summands(start: Any) -> list[Any]:
    """The summands of a scalar by their nodes, through factors and signs; ``None`` for what has no graph."""
    found: list[Any] = []
    waiting, looked_at = [start], 0
    while waiting and looked_at < 1000:
        node = waiting.pop()
        looked_at += 1
        before = [] if node is None else following(node)
        real = [after for after in before if after is not None]
        name = "" if node is None else node.name()
        if name in ADDITIONS or name in ("StackBackward0", "CatBackward0"):
            waiting.extend(reversed(before))
        elif len(real) == 1 and (
            name in SCALING or name in MOVING or (name in SUMMING and real[0].name() == "StackBackward0")
        ):
            waiting.extend(real)
        else:
            found.append(node)
    return found


def terms_of(loss: torch.Tensor, graph: Graph) -> tuple[Term, ...]:
    """The summands of a finished loss, as far as its graph shows them; empty for fewer than two."""
    parts = summands(loss.grad_fn) if loss.grad_fn is not None and loss.numel() == 1 else []
    terms = (
        Term(None, False, "a number, or a tensor without a graph") if part is None
        else Term(None, True, part.name(), parameters=graph.masks.get(part, 0).bit_count())
        for part in parts
    )  # fmt: skip
    return tuple(terms) if len(parts) > 1 else ()


def raw_saved(node: Any) -> Iterator[tuple[str, Any]]:
    """What a node has saved, by name, as torch holds it; nothing once a backward has freed it."""
    kind: Any = type(node)
    for name in _raw_names(kind):
        try:
            found = getattr(node, name)
        except RuntimeError:  # freed
            continue
        for entry in found if isinstance(found, (list, tuple)) else (found,):
            if entry is not None:
                yield name.removeprefix("_raw_saved_"), entry


@functools.lru_cache(maxsize=256)
def _raw_names(kind: type) -> list[str]:
    return [name for name in dir(kind) if name.startswith("_raw_saved_")]


def kept_by(tensors: Iterable[torch.Tensor], places: Mapping[Any, str], without: Iterable[torch.Tensor]) -> Kept | None:
    """What the graph of some tensors keeps in memory beside others; nothing is unpacked, so no checkpoint runs.

    ``None`` if this torch can't tell a saved tensor from one packed by hooks.
    """
    seen = {storage_of(tensor) for tensor in without if tensor.layout is torch.strided}
    saved: list[Saved] = []
    packed = 0
    for node in reversed(nodes_behind(tensors)):  # what made a tensor comes before what uses it
        for _, entry in raw_saved(node):
            if not hasattr(entry, "unpack_hook"):
                return None
            if entry.unpack_hook is not None:
                packed += 1
                continue
            tensor = entry.data
            if tensor is None or tensor.layout is not torch.strided or storage_of(tensor) in seen:
                continue
            seen.add(storage_of(tensor))
            shape, dtype = tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")
            size = tensor.untyped_storage().nbytes()
            saved.append(Saved(node.name(), places.get(node, ""), shape, dtype, size))
    saved.sort(key=lambda one: -one.bytes)
    modules: dict[str, int] = {}
    if places:
        for one in saved:
            modules[one.module] = modules.get(one.module, 0) + one.bytes
    by_size = dict(sorted(modules.items(), key=lambda entry: -entry[1]))
    return Kept(sum(one.bytes for one in saved), by_size, tuple(saved[:_MOST_SAVED]), packed)
