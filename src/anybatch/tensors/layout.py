"""Where the samples lie in a batch: which leaves have rows, how many, and how they are cut.

The rules, in order:

- Tensors and arrays with at least one dimension have their samples along dimension 0, a PackedSequence has one for each
  sequence.
- Mappings, tuples, named tuples and dataclasses are containers. So is a list at the top that holds tensors or lists, as
  a DataLoader gives it.
- Any other list is a dimension of samples if it is as long as the batch, and so is a tuple of plain values. With no
  tensor outside of lists, the lists say how long the batch is. A list of as many tensors as each of them has rows could
  be samples or leaves, and is refused; but where the lists say how long the batch is, and some tensor in them has
  another number of rows, they can only hold samples.
- Numbers, strings and tensors without dimensions that stand alone go to every micro-batch.
- What ``broadcast`` names goes to every micro-batch. Anything else is refused by its path.
"""

import enum
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence

from anybatch.errors import BatchError
from anybatch.tensors.trees import Container, leaves, opened

PLAIN = (type(None), bool, int, float, complex, str, bytes, enum.Enum, torch.dtype, torch.device, torch.Size)


@dataclass(frozen=True, slots=True)
class Constant:
    """A leaf, or a container, that goes to every micro-batch as it is."""

    value: Any
    label: str = ""


@dataclass(frozen=True, slots=True)
class Rows:
    """A leaf that is cut along its samples."""

    value: Any
    label: str


@dataclass(frozen=True, slots=True)
class Branch:
    """A container whose children are laid out in turn."""

    container: Container
    children: list["Node"]


Node = Constant | Rows | Branch


@dataclass(frozen=True, slots=True)
class Layout:
    """How a batch is cut.

    Args:
        rows: the number of samples.
        root: the tree of leaves that are cut and leaves that are not.
        devices: where its tensors lie.
    """

    rows: int
    root: Node
    devices: frozenset[torch.device] = frozenset()


def lay_out(batch: Any, broadcast: Sequence[str] = (), *, may_be_empty: bool = False) -> Layout:
    """Finds the samples of a batch.

    Args:
        batch: any nested container of tensors of shape ``[rows, ...]`` and lists of ``rows`` items.
        broadcast: dotted paths, such as ``"class_weights"`` or ``"attention.bias"``, of what is not cut.
        may_be_empty: whether a batch without rows is one.

    Returns:
        The number of samples and what is cut.

    Raises:
        BatchError: leaves disagree on the number of rows, there are none, or a leaf is of an unknown kind.

    Example:
        >>> lay_out({"x": torch.zeros(5, 3), "name": ["a", "b", "c", "d", "e"], "scale": 2.0}).rows
        5
    """
    if isinstance(broadcast, str):
        raise BatchError(
            f"broadcast is the text {broadcast!r}; expected a sequence of paths: broadcast=({broadcast!r},)"
        )
    found = None if broadcast else _lay_out_plain(batch)
    return _Surveyor(tuple(broadcast), may_be_empty).survey(batch) if found is None else found


def _lay_out_plain(batch: Any) -> Layout | None:
    """Lays out the usual batch, tensors of as many rows in one container; ``None`` for any other, good or bad."""
    if type(batch) not in (dict, list, tuple):
        return None
    tensors = list(batch.values()) if type(batch) is dict else batch
    if not all(type(tensor) is torch.Tensor and tensor.dim() for tensor in tensors):
        return None
    sizes = {tensor.size(0) for tensor in tensors}
    container = opened(batch)
    if len(sizes) != 1 or sizes == {0} or container is None:
        return None
    children: list[Node] = [Rows(child.value, "batch" + child.label) for child in container.children]
    return Layout(sizes.pop(), Branch(container, children), frozenset(tensor.device for tensor in tensors))


def _devices(node: Node) -> Iterator[torch.device]:
    if isinstance(node, Branch):
        for child in node.children:
            yield from _devices(child)
        return
    for leaf in [node.value] if isinstance(node.value, torch.Tensor) else [leaf for _, _, leaf in leaves(node.value)]:
        device = home_of(leaf)
        if device is not None:
            yield device


def home_of(leaf: Any) -> torch.device | None:
    """Where a leaf lies, ``None`` if it is no tensor and stays on the host."""
    if isinstance(leaf, PackedSequence):
        leaf = leaf.data
    return leaf.device if isinstance(leaf, torch.Tensor) else None


def refuse_graphs(node: Node) -> None:
    """Refuses leaves that were computed with a gradient, whose graph every micro-batch would go through.

    Args:
        node: of a batch that is cut into several micro-batches.

    Raises:
        BatchError: names the leaf.
    """
    if isinstance(node, Branch):
        for child in node.children:
            refuse_graphs(child)
        return
    tensor = node.value.data if isinstance(node.value, PackedSequence) else node.value
    if isinstance(node, Rows) and isinstance(tensor, torch.Tensor) and tensor.grad_fn is not None:
        raise BatchError(
            f"{node.label} has a graph behind it, which the first micro-batch would free for the others; expected "
            f"data. Compute it in the loss function, or pass {node.label}.detach()",
            path=node.label,
        )


def rows_of(leaf: Any) -> int | None:
    """The number of samples of a tensor-like leaf, ``None`` for a leaf without rows."""
    if isinstance(leaf, PackedSequence):
        return int(leaf.batch_sizes[0])
    if isinstance(leaf, torch.Tensor):
        return int(leaf.size(0)) if leaf.is_nested or leaf.dim() else None
    shape: tuple[int, ...] = getattr(leaf, "shape", ()) if type(leaf).__module__ == "numpy" else ()
    return int(shape[0]) if shape else None


def _is_plain(leaf: Any) -> bool:
    return isinstance(leaf, PLAIN) or (type(leaf).__module__ == "numpy" and not getattr(leaf, "shape", ()))


class _Surveyor:
    """One walk to find the number of rows, one to lay the batch out by it."""

    def __init__(self, broadcast: tuple[str, ...], may_be_empty: bool = False) -> None:
        self._broadcast = broadcast
        self._may_be_empty = may_be_empty
        self._matched: set[str] = set()
        self._lists_hold_samples = False

    def survey(self, batch: Any) -> Layout:
        root_is_container = self._root_list_is_container(batch)
        rows = self._count_rows(batch, root_is_container)
        root = self._lay(batch, "batch", (), rows, at_root=root_is_container)
        unknown = [name for name in self._broadcast if name not in self._matched]
        if unknown:
            known = [".".join(path) for _, path, _ in leaves(batch) if path]
            raise BatchError(f"broadcast names {unknown}, which are not in the batch; it has {known[:20]}")
        if rows == 0 and not self._may_be_empty:
            raise BatchError(
                "the batch has no rows; expected at least one sample. Leave empty batches out of the loader"
            )
        return Layout(rows, root, frozenset(_devices(root)))

    @staticmethod
    def _root_list_is_container(batch: Any) -> bool:
        if not isinstance(batch, list):
            return True
        if all(isinstance(item, list) for item in batch):
            return bool(batch)
        return any(rows_of(item) is not None or isinstance(item, (tuple, list)) for item in batch) and not all(
            isinstance(item, tuple) for item in batch
        )

    def _is_broadcast(self, path: tuple[str, ...]) -> bool:
        dotted = ".".join(path)
        if dotted in self._broadcast:
            self._matched.add(dotted)
            return True
        return False

    def _count_rows(self, batch: Any, root_is_container: bool) -> int:
        tensors: list[tuple[str, str, int]] = []
        lists: list[tuple[str, str, int]] = []
        self._collect(batch, "batch", (), root_is_container, tensors, lists)
        if tensors:
            return _agreed(tensors)
        if not lists:
            raise BatchError(
                f"the batch, a {type(batch).__name__}, holds no tensor with rows and no list of samples; expected "
                "tensors "
                "of shape [rows, ...]. A type of your own is made known with torch.utils._pytree.register_pytree_node"
            )
        rows = _agreed(lists)
        sizes = {rows_of(leaf) for _, _, leaf in leaves(batch)} - {None}
        self._refuse_rows_in_lists(batch, rows, len(lists), sizes)
        self._lists_hold_samples = sizes != {rows}
        return rows

    @staticmethod
    def _refuse_rows_in_lists(batch: Any, rows: int, lists: int, sizes: set[int | None]) -> None:
        """Refuses lists whose tensors agree on another number of rows, so that both could be the samples."""
        holds_mappings = isinstance(batch, list)
        if len(sizes) == 1 and sizes != {rows} and (lists > 1 or holds_mappings):
            raise BatchError(
                f"the batch could be {rows} samples or leaves of {sizes.pop()} rows, for all tensors in its lists "
                "have as "
                "many; make a list a tuple if its items are leaves, pass collate= if they are raw samples"
            )

    def _collect(
        self,
        node: Any,
        label: str,
        path: tuple[str, ...],
        as_container: bool,
        tensors: list[tuple[str, str, int]],
        lists: list[tuple[str, str, int]],
    ) -> None:
        if self._is_broadcast(path):
            return
        rows = rows_of(node)
        if rows is not None:
            tensors.append((label, ".".join(path), rows))
        elif not as_container and _may_be_samples(node):
            lists.append((label, ".".join(path), len(node)))
        elif (container := opened(node)) is not None:
            for child in container.children:
                self._collect(child.value, label + child.label, (*path, child.key), False, tensors, lists)

    def _lay(self, node: Any, label: str, path: tuple[str, ...], rows: int, *, at_root: bool = False) -> Node:
        if self._is_broadcast(path):
            return Constant(node, label)
        own = rows_of(node)
        if own is not None:
            if own != rows:
                raise _mismatch(label, ".".join(path), own, "the batch", rows)
            return Rows(node, label)
        if not at_root and _may_be_samples(node):
            found = self._lay_samples(node, label, path, rows)
            if found is not None:
                return found
        container = opened(node)
        if container is None:
            return _lone_leaf(node, label, ".".join(path))
        children = [self._lay(c.value, label + c.label, (*path, c.key), rows) for c in container.children]
        return Branch(container, children)

    def _lay_samples(self, node: Any, label: str, path: tuple[str, ...], rows: int) -> Node | None:
        holds_rows = [rows_of(leaf) for _, _, leaf in leaves(node) if rows_of(leaf) is not None]
        if len(node) == rows:
            may_be_leaves = rows > 1 and len(holds_rows) >= rows and all(own == rows for own in holds_rows)
            if may_be_leaves and not self._lists_hold_samples:
                raise BatchError(
                    f"{label} is a list of {rows} items with {rows} rows each, so it could be {rows} samples or "
                    f"{rows} leaves; make it a tuple if the items are leaves. If they are samples, stack them; where "
                    "their shapes differ, let the DataLoader give raw samples (collate_fn=list) and pass collate=",
                    path=label,
                )
            return Rows(node, label)
        if holds_rows:
            return None
        dotted = ".".join(path)
        raise BatchError(
            f"{label} is a {type(node).__name__} of {len(node)} items, the batch has {rows} rows; make it {rows} "
            "items, "
            f"or broadcast=({dotted!r},) if it is not one item a sample",
            path=label,
        )


def _may_be_samples(node: Any) -> bool:
    if isinstance(node, list):
        return True
    is_row = isinstance(node, Sequence) and not hasattr(node, "_fields") and not isinstance(node, PLAIN)
    return is_row and len(node) > 0 and all(_is_plain(item) for item in node)


def _agreed(found: list[tuple[str, str, int]]) -> int:
    """The number of rows that most leaves have; the first leaf that has another is named."""
    rows = Counter(own for _, _, own in found).most_common(1)[0][0]
    reference = next(label for label, _, own in found if own == rows)
    for label, dotted, own in found:
        if own != rows:
            raise _mismatch(label, dotted, own, reference, rows)
    return rows


def _mismatch(label: str, dotted: str, own: int, reference: str, rows: int) -> BatchError:
    return BatchError(
        f"{label} has {own} rows, {reference} has {rows}; every leaf needs the same number of rows along dimension 0. "
        f"If {label} is not per sample, pass broadcast=({dotted!r},)",
        path=label,
    )


def _lone_leaf(node: Any, label: str, dotted: str) -> Node:
    if _is_plain(node) or isinstance(node, torch.Tensor):
        return Constant(node, label)
    raise BatchError(
        f"{label} is a {type(node).__module__}.{type(node).__qualname__}, which anybatch can't cut into samples; make "
        "it "
        f"known with torch.utils._pytree.register_pytree_node, or pass broadcast=({dotted!r},) to give it whole to "
        "every "
        "micro-batch",
        path=label,
    )
