"""The layout of a batch: which leaves have a sample dimension, how many samples there are, and how they are split.

The rules, in order:

- A leaf in ``layout`` has its samples along the dimension given there; a leaf in ``broadcast`` goes whole to every
  micro-batch.
- Tensors and arrays with at least one dimension have their samples along dimension 0. Each sequence of a PackedSequence
  is a sample.
- Mappings, tuples, named tuples, dataclasses and SimpleNamespace itself are containers. So is a list at the top level
  that holds tensors or lists, as a DataLoader returns it.
- Any other list is a list of samples if it is as long as the batch, and so is a tuple of plain values. If all tensors
  are in lists, the lists give the batch size. A list of n tensors with n rows each could hold samples or leaves, and is
  refused. But if the lists give the batch size, and a tensor in them has another number of rows, they hold samples.
- Several tuples of equal length with items of one kind, as from ``tuple(zip(*samples))``, may hold samples, too. They
  do if their tensors differ in rows, and other containers or tensors beside them confirm it. If all their tensors have
  one number of rows, they could be both, and are refused.
- Numbers, strings and 0-dim tensors that stand alone go to every micro-batch.
- Anything else can't be split. It is refused by its path; where no split is needed, the batch runs whole.
"""

import enum
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import torch
from torch.nn.utils.rnn import PackedSequence

from anybatch.batch.trees import Child, Container, flat, leaves, opened
from anybatch.errors import BatchError

PLAIN = (type(None), bool, int, float, complex, str, bytes, enum.Enum, torch.dtype, torch.device, torch.Size)

IN_WINDOWS = "for batch in loader: step(batch), or for window in anybatch.windows(loader, batches=8): step(window)"
"""What is done with several batches, by one update each or by one for some of them."""


@dataclass(frozen=True, slots=True)
class Constant:
    """A leaf, or a container, that goes whole to every micro-batch."""

    value: Any
    label: str = ""


@dataclass(frozen=True, slots=True)
class Rows:
    """A leaf that is split along its samples."""

    value: Any
    label: str


@dataclass(frozen=True, slots=True)
class Branch:
    """A container and the layouts of its children."""

    container: Container  # the opened container
    children: list["Node"]  # in the same order
    # the sample dimension of a single tensor child, where it is not 0; in the child it is moved to 0
    dim: int | None = None


Node = Constant | Rows | Branch


@dataclass(frozen=True, slots=True)
class Layout:
    """How a batch is split."""

    rows: int  # the number of samples; 1 for a batch that can't be split
    root: Node  # the tree of leaves
    # of its tensors; with ``None`` if it has objects whose devices are not known
    devices: frozenset[torch.device | None] = frozenset()
    obstacle: BatchError | None = None  # why the batch can't be split; ``None`` if it can
    at_most: int | None = None  # the most samples that a batch that can't be split may have; ``None`` if not known
    is_counted: bool = False  # whether it has exactly ``at_most`` samples, however it is read

    @property
    def samples(self) -> int | None:
        """The number of samples; ``None`` if not known."""
        return self.rows if self.obstacle is None else self.at_most if self.is_counted else None


class Placement(tuple[str, ...]):  # noqa: SLOT001 - a tuple can't have slots of its own
    """What the user declared of a batch: a tuple of dotted paths that are not split, and sample dimensions.

    Attributes:
        dims: sample dimension by dotted path, which may have wildcards.
    """

    dims: Mapping[str, int]


def placement(broadcast: Sequence[str], layout: Mapping[str, int | None] | None = None) -> tuple[str, ...]:
    """Reads ``broadcast=`` and ``layout=``.

    Args:
        layout: sample dimension by dotted path, or ``None`` for a leaf that is not split.

    Raises:
        BatchError: one of them is malformed, or both name the same path.

    Example:
        >>> placed = placement(["mask"], {"x": 1, "table": None})
        >>> placed, lay_out({"x": torch.zeros(7, 4), "table": torch.ones(9), "mask": torch.ones(3)}, placed).rows
        (('mask', 'table'), 4)
    """
    if isinstance(broadcast, str):
        raise BatchError(
            f"broadcast is the string {broadcast!r}; expected a sequence of paths: broadcast=({broadcast!r},)"
        )
    if layout is None:
        return broadcast if isinstance(broadcast, Placement) else tuple(broadcast)
    if not isinstance(layout, Mapping):
        raise BatchError(
            f"layout is a {type(layout).__name__}; expected a mapping of paths to dimensions: layout={{'x': 1}}"
        )
    for path, dim in layout.items():
        if not isinstance(path, str) or isinstance(dim, bool) or not isinstance(dim, int | None):
            raise BatchError(
                f"layout[{path!r}] is {dim!r}; expected the sample dimension of the leaf at a dotted path, such as "
                "layout={'x': 1}, or None for a leaf that is not per sample"
            )
        if dim is not None and path in broadcast:
            raise BatchError(f"layout[{path!r}] is {dim}, and broadcast names the path, too; expected one of them")
    found = Placement((*broadcast, *(path for path, dim in layout.items() if dim is None and path not in broadcast)))
    found.dims = {path: dim for path, dim in layout.items() if dim is not None}
    return found


def lay_out(
    batch: Any, broadcast: Sequence[str] = (), *, may_be_empty: bool = False, may_be_whole: bool = False
) -> Layout:
    """Finds the samples of a batch.

    Args:
        batch: any nested container of tensors of shape ``[rows, ...]`` and lists of ``rows`` items.
        broadcast: dotted paths that are not split, such as ``"class_weights"``; or what ``placement`` returned.
        may_be_empty: whether no rows are accepted.
        may_be_whole: whether a batch that can't be split gets a layout with an ``obstacle``, instead of an error.

    Raises:
        BatchError: leaves disagree on the number of rows, there are none, a leaf is of an unknown kind, or a path is
            not in the batch.

    Example:
        >>> lay_out({"x": torch.zeros(5, 3), "name": ["a", "b", "c", "d", "e"], "scale": 2.0}).rows
        5
    """
    placed = broadcast if type(broadcast) is tuple else placement(broadcast)
    found = None if placed or isinstance(placed, Placement) else _lay_out_plain(batch)
    if found is not None:
        return found
    surveyor = _Surveyor(placed)
    try:
        found = surveyor.survey(batch)
    except BatchError as refusal:
        surveyor.check_names(batch)
        error, is_loader = refusal, isinstance(batch, torch.utils.data.DataLoader)
        if is_loader or isinstance(batch, Iterator):
            error = BatchError(f"the batch is a {type(batch).__name__}; iterate over it, as in: {IN_WINDOWS}")
        if is_loader or not may_be_whole:
            raise error from None
        whole = Constant(batch, "batch")
        return Layout(1, whole, frozenset(_devices(whole)), error, surveyor.at_most, surveyor.is_counted)
    surveyor.check_names(batch)
    if found.rows == 0 and not may_be_empty:
        raise BatchError("the batch has no rows; expected at least one sample. Leave empty batches out of the loader")
    return found


def _lay_out_plain(batch: Any) -> Layout | None:
    """The layout of the usual batch, one container of tensors with equal rows; ``None`` for any other batch."""
    if type(batch) not in (dict, list, tuple):
        return None
    container = opened(batch)
    sizes, devices, children = set[int](), set[torch.device | None](), list[Node]()
    for label, _, tensor in () if container is None else container.children:
        if type(tensor) is not torch.Tensor or not tensor.dim():
            return None
        sizes.add(tensor.size(0))
        devices.add(tensor.device)
        children.append(Rows(tensor, "batch" + label))
    if len(sizes) != 1 or sizes == {0} or container is None:
        return None
    return Layout(sizes.pop(), Branch(container, children), frozenset(devices))


def _devices(node: Node) -> Iterator[torch.device | None]:
    if isinstance(node, Branch):
        for child in node.children:
            yield from _devices(child)
        return
    for leaf in flat(node.value):
        device = home_of(leaf)
        if device is not None or moves_itself(leaf):
            yield device


def home_of(leaf: Any) -> torch.device | None:
    """The device of a leaf; ``None`` if it is not a tensor."""
    if isinstance(leaf, PackedSequence):
        leaf = leaf.data
    return leaf.device if isinstance(leaf, torch.Tensor) else None


def moves_itself(leaf: Any) -> bool:
    """Whether a leaf is an object with a ``to`` method, such as a batch of graphs."""
    if isinstance(leaf, (torch.Tensor, PackedSequence, torch.nn.Module, *PLAIN)):
        return False
    return callable(getattr(type(leaf), "to", None))


def refuse_graphs(nodes: Iterable[Rows | Constant]) -> None:
    """Refuses leaves with a ``grad_fn``: the backward of the first micro-batch would free their graph."""
    for node in nodes:
        tensor = node.value.data if isinstance(node.value, PackedSequence) else node.value
        if isinstance(node, Rows) and isinstance(tensor, torch.Tensor) and tensor.grad_fn is not None:
            raise BatchError(
                f"{node.label} has a grad_fn, and the first micro-batch's backward pass would free its graph; "
                f"expected data. Compute it in the loss function, or pass {node.label}.detach()",
                path=node.label,
            )


def rows_of(leaf: Any) -> int | None:
    """The size of dimension 0 of a tensor or array, or the sequences of a PackedSequence; ``None`` for other leaves."""
    if isinstance(leaf, PackedSequence):
        return int(leaf.batch_sizes[0])
    if isinstance(leaf, torch.Tensor):
        return int(leaf.size(0)) if leaf.is_nested or leaf.dim() else None
    shape: tuple[int, ...] = getattr(leaf, "shape", ()) if type(leaf).__module__ == "numpy" else ()
    return int(shape[0]) if shape else None


def _is_plain(leaf: Any) -> bool:
    return isinstance(leaf, PLAIN) or (type(leaf).__module__ == "numpy" and not getattr(leaf, "shape", ()))


class Found(NamedTuple):
    """A leaf with rows, or a container whose items may be samples."""

    label: str  # such as batch['x']
    dotted: str  # its path
    rows: int
    node: Any = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Of a tensor or array."""
        return tuple(getattr(self.node, "shape", ()))


class _Surveyor:
    """Walks a batch twice: to find the number of rows, and to build the layout."""

    def __init__(self, placed: tuple[str, ...]) -> None:
        self._broadcast = placed
        self._dims: Mapping[str, int] = getattr(placed, "dims", {})
        self._matched: set[str] = set()
        self._leaves: list[Found] = []
        self._lists: list[Found] = []
        self._tuples: list[tuple[Found, list[Found]]] = []  # each with the leaves in it
        self._samples: set[str] = set()  # paths of tuples that hold samples
        self._lists_hold_samples = False
        self._lists_hold_leaves = False
        self.is_counted = False  # whether read as samples and read as leaves it has equally many samples

    def survey(self, batch: Any) -> Layout:
        at_root = self._is_container_at_root(batch)
        self._collect(batch, "batch", (), None, self._leaves, as_container=at_root)
        rows = self._count_rows(batch)
        root = self._lay(batch, "batch", (), rows, None, as_container=at_root)
        return Layout(rows, root, frozenset(_devices(root)))

    @property
    def at_most(self) -> int | None:
        """The most samples that there can be, however the batch is read; ``None`` if not known."""
        inner = [leaf for _, found in self._tuples for leaf in found]
        found = [*self._leaves, *self._lists, *(one for one, _ in self._tuples), *inner]
        return max([*(one.rows for one in found), *self._sizes_in_lists()], default=0) or None

    def _sizes_in_lists(self) -> set[int]:
        """The numbers of rows of what lies in lists that may hold samples."""
        return {rows for one in self._lists for leaf in flat(one.node) if (rows := rows_of(leaf)) is not None}

    def check_names(self, batch: Any) -> None:
        """Refuses paths that are not in the batch."""
        wanted = [*self._broadcast, *self._dims]
        if all(name in self._matched for name in wanted):
            return
        known = [".".join(path) for _, path, _ in leaves(batch) if path]
        for option, names in (("broadcast", self._broadcast), ("layout", self._dims)):
            unknown = [name for name in names if not any(_lies_under(path, name) for path in known)]
            unknown = [name for name in unknown if name not in self._matched]
            if unknown:
                raise BatchError(f"{option} names {unknown}, which are not in the batch; it has {known[:20]}")

    def _is_container_at_root(self, batch: Any) -> bool:
        if not isinstance(batch, list) or "" in self._dims:
            return "" not in self._dims
        if self._opens(()) or all(isinstance(item, list) for item in batch):
            return bool(batch)
        return any(rows_of(item) is not None or isinstance(item, (tuple, list)) for item in batch) and not all(
            isinstance(item, tuple) for item in batch
        )

    def _named(self, path: tuple[str, ...], names: Iterable[str]) -> str | None:
        """The name that matches a path, exactly or by a wildcard."""
        dotted = ".".join(path)
        found = dotted if dotted in names else None
        if found is None and path:
            found = next((name for name in names if "*" in name and fnmatchcase(dotted, name)), None)
        if found is not None:
            self._matched.add(found)
        return found

    def _dim(self, path: tuple[str, ...], inherited: int | None) -> int | None:
        if not self._dims:
            return None
        name = self._named(path, self._dims)
        return inherited if name is None else self._dims[name]

    def _opens(self, path: tuple[str, ...]) -> bool:
        """Whether ``layout`` names items below a path, so that it is a container."""
        start = "".join(f"{key}." for key in path)
        return any(name != start and name.startswith(start) for name in self._dims if name)

    def _collect(
        self,
        node: Any,
        label: str,
        path: tuple[str, ...],
        dim: int | None,
        into: list[Found],
        *,
        as_container: bool = False,
    ) -> None:
        if self._named(path, self._broadcast) is not None:
            return
        dim = self._dim(path, dim)
        dotted = ".".join(path)
        rows = _rows_along(node, dim, label)
        if rows is not None:
            into.append(Found(label, dotted, rows, node))
            return
        if not as_container and not self._opens(path):
            if dim == 0 and _is_sequence(node):
                into.append(Found(label, dotted, len(node)))
                return
            if dim is None and _may_be_samples(node):
                self._lists.append(Found(label, dotted, len(node), node))
                return
            if dim is None and type(node) is tuple and len(node) > 1 and into is self._leaves and _are_alike(node):
                into = []
                self._tuples.append((Found(label, dotted, len(node), node), into))
        for child in _children(node):
            self._collect(child.value, label + child.label, (*path, child.key), dim, into)

    def _count_rows(self, batch: Any) -> int:
        self._resolve_tuples()
        if self._leaves:
            return _agreed(self._leaves)
        counted = [*self._lists, *(found for found, _ in self._tuples if found.dotted in self._samples)]
        if not counted:
            raise BatchError(
                f"the batch, a {type(batch).__name__}, has no tensor with rows and no list of samples; expected "
                f"tensors of shape [rows, ...]; {_OWN}. {IN_A_ROW}"
            )
        rows = _agreed(counted)
        sizes = self._sizes_in_lists()
        if len(sizes) == 1 and sizes != {rows} and not self._samples:
            if len(self._lists) > 1 and not all(_are_alike(found.node) for found in self._lists):
                self._lists_hold_leaves = True
                return sizes.pop()
            if len(self._lists) > 1 or isinstance(batch, list):
                raise could_be_both(self._lists, rows, sizes.pop())
        self._lists_hold_samples = sizes != {rows}
        return rows

    def _resolve_tuples(self) -> None:
        """Decides which tuples hold samples; the tensors in the others are leaves."""
        outside = {found.rows for found in self._leaves}
        sizes = {leaf.rows for _, inner in self._tuples for leaf in inner}
        together = sorted([*self._lists, *(found for found, _ in self._tuples)], key=lambda found: found.dotted)
        if outside:
            for found, inner in self._tuples:
                if outside == {found.rows} and {leaf.rows for leaf in inner} != outside:
                    self._samples.add(found.dotted)
        elif self._tuples and len(together) > 1 and len({found.rows for found in together}) == 1:
            rows = together[0].rows
            sizes |= self._sizes_in_lists()
            is_plain = all(_is_plain(item) for found in self._lists for item in found.node)
            is_pair = len(self._tuples) == 1 and sizes == {rows} and is_plain
            if len(sizes) == 1 and not is_pair:
                raise could_be_both(together, rows, next(iter(sizes)))
            if len(sizes) != 1 and (not sizes or self._lists or any(_children(one.node[0]) for one, _ in self._tuples)):
                self._samples.update(found.dotted for found, _ in self._tuples)
            elif len(sizes) > 1:
                raise mismatch([leaf for _, inner in self._tuples for leaf in inner], [one for one, _ in self._tuples])
        for found, inner in self._tuples:
            if found.dotted not in self._samples:
                self._leaves.extend(inner)

    def _lay(
        self,
        node: Any,
        label: str,
        path: tuple[str, ...],
        rows: int,
        dim: int | None,
        *,
        as_container: bool = False,
    ) -> Node:
        if self._named(path, self._broadcast) is not None:
            return Constant(node, label)
        dim = self._dim(path, dim)
        own = _rows_along(node, dim, label)
        if own is not None:
            if own != rows:
                raise mismatch([Found(label, ".".join(path), own, node), Found("the batch", "", rows)])
            return Rows(node, label) if not dim else _along(node, dim, label)
        if not as_container and not self._opens(path):
            if ".".join(path) in self._samples or (dim == 0 and _is_sequence(node)):
                return Rows(node, label)
            if _may_be_samples(node) and dim is None and not self._lists_hold_leaves:
                found = self._lay_samples(node, label, path, rows)
                if found is not None:
                    return found
        container = opened(node)
        if container is None:
            return _lone_leaf(node, label, ".".join(path))
        children = [self._lay(c.value, label + c.label, (*path, c.key), rows, dim) for c in container.children]
        return Branch(container, children)

    def _lay_samples(self, node: Any, label: str, path: tuple[str, ...], rows: int) -> Node | None:
        holds_rows = [size for leaf in flat(node) if (size := rows_of(leaf)) is not None]
        dotted = ".".join(path)
        if len(node) == rows:
            may_be_leaves = rows > 1 and len(holds_rows) >= rows and all(own == rows for own in holds_rows)
            if may_be_leaves and not self._lists_hold_samples:
                self.is_counted = True
                raise could_be_both([Found(label, dotted, rows, node)], rows, rows)
            return Rows(node, label)
        if holds_rows:
            return None
        raise BatchError(
            f"{label} is a {type(node).__name__} of {len(node)} items, the batch has {rows} rows; make it {rows} "
            f"items, or pass broadcast=({dotted!r},) if it does not have one item per sample",
            path=label,
        )


def _lies_under(path: str, name: str) -> bool:
    return path == name or path.startswith(f"{name}.") or ("*" in name and fnmatchcase(path, name))


def _children(node: Any) -> Sequence[Child]:
    container = opened(node)
    return () if container is None else container.children


def _is_sequence(node: Any) -> bool:
    return isinstance(node, Sequence) and not hasattr(node, "_fields") and not isinstance(node, PLAIN)


def _may_be_samples(node: Any) -> bool:
    if isinstance(node, list):
        return True
    return _is_sequence(node) and len(node) > 0 and all(_is_plain(item) for item in node)


def _are_alike(items: Sequence[Any]) -> bool:
    """Whether items are of one kind, as samples are; the inputs of a model often are not."""
    return len({_kind(item) for item in items}) == 1


def _kind(item: Any) -> tuple[Any, ...]:
    if isinstance(item, torch.Tensor):
        return item.dtype, item.dim()
    return type(item), *(child.key for child in _children(item) if isinstance(item, Mapping))


def _rows_along(node: Any, dim: int | None, label: str) -> int | None:
    """The number of samples of a leaf along a dimension, by default 0; ``None`` for a leaf without rows."""
    if not dim:
        return rows_of(node)
    if rows_of(node) is None:
        return None
    is_dense = isinstance(node, torch.Tensor) and node.layout is torch.strided and not node.is_nested
    if not is_dense or not -node.dim() <= dim < node.dim():
        got = f"shape {tuple(node.shape)}" if is_dense else f"kind {type(node).__name__}"
        raise BatchError(
            f"layout puts the samples of {label} in dimension {dim}, and it has the {got}; expected a dense tensor "
            "with that dimension",
            path=label,
        )
    return int(node.size(dim))


def _along(tensor: torch.Tensor, dim: int, label: str) -> Branch:
    """A tensor with its samples in another dimension: split with that one moved to 0, then moved back."""
    container = Container([Child("", "", tensor)], lambda values: values[0].movedim(0, dim))
    return Branch(container, [Rows(tensor.movedim(dim, 0), label)], dim % tensor.dim())


def _agreed(found: Sequence[Found]) -> int:
    """The number of rows that all leaves have; else an error about the first leaf that differs from most."""
    rows = Counter(one.rows for one in found).most_common(1)[0][0]
    odd = next((one for one in found if one.rows != rows), None)
    if odd is None:
        return rows
    rest = [one for one in found if one is not odd]
    raise mismatch([odd, *sorted(rest, key=lambda one: one.rows != rows)])


def _lone_leaf(node: Any, label: str, dotted: str) -> Node:
    if _is_plain(node) or isinstance(node, torch.Tensor):
        return Constant(node, label)
    raise BatchError(
        f"{label} is a {type(node).__module__}.{type(node).__qualname__}, which anybatch can't split into samples; "
        f"{_OWN}, or pass broadcast=({dotted!r},) to pass it whole to every micro-batch. {IN_A_ROW}",
        path=label,
    )


_OWN = (
    "make a class of your own a dataclass or a dict of tensors, or register it with "
    "torch.utils._pytree.register_pytree_node"
)
IN_A_ROW = (
    "If rows of several samples are concatenated, let the DataLoader return raw samples (collate_fn=list) and "
    "pass collate=, the function that joins them"
)
"""The remedy for flat pixels, nodes of graphs and packed sequences."""


def could_be_both(found: Sequence[Found], rows: int, own: int) -> BatchError:
    """The error about containers that may hold samples, or leaves with rows of their own."""
    first = found[0]
    kind = f"{first.label} is a {type(first.node).__name__}" if len(found) == 1 else "the batch"
    if len(found) > 1 or not first.dotted:
        what = f"{', '.join(one.label for one in found[:4])}: the batch could be {rows} samples or leaves of {own} rows"
    else:
        what = f"{kind} of {rows} items with {own} rows each, so it could be {rows} samples or {rows} leaves"
    items = ", ".join(f"{one.dotted!r}: 0" for one in found)
    inside = ", ".join(f"{(one.dotted + '.*').removeprefix('.')!r}: 0" for one in found)
    is_list = len(found) == 1 and isinstance(first.node, list)
    leaves_too = "make it a tuple if the items are leaves, or" if is_list else "if the items are leaves,"
    return BatchError(
        f"{what}; {leaves_too} pass layout={{{inside}}}. If they are samples, pass layout={{{items}}}, or stack them; "
        "where their shapes differ, pass a list, or let the DataLoader return raw samples (collate_fn=list) and pass "
        f"collate={'' if first.dotted else f'. If they are batches: {IN_WINDOWS}'}",
        path=first.label,
    )


def mismatch(found: Sequence[Found], tuples: Sequence[Found] = ()) -> BatchError:
    """The error about leaves with different numbers of rows: first the one that differs, then what it is unlike."""
    odd, usual = found[0], found[1]
    odds, others = (tuple(one.dotted for one in found if one.rows == rows) for rows in (odd.rows, usual.rows))
    pairs = (odd, usual), (usual, odd)
    hints = "".join([*(_turned(*pair, found) for pair in pairs), *(_flattened(*pair) for pair in pairs)])
    text = (
        f"{odd.label} has {odd.rows} rows, {usual.label} has {usual.rows}; every leaf needs the same number of rows "
        f"along dimension 0.{hints} If {odd.label} is not per "
        f"sample, pass broadcast={odds if len(odds) <= 3 else (odd.dotted,)!r}"
    )
    if all(others) and len(others) <= 3:
        text += f"; if {usual.label} is not, broadcast={others!r}"
    if tuples:
        paths = ", ".join(f"{one.dotted!r}: 0" for one in tuples)
        text += f". If the items of {' and '.join(one.label for one in tuples[:2])} are samples, pass them as a list, "
        text += f"or pass layout={{{paths}}}"
    return BatchError(f"{text}. {IN_A_ROW}", path=odd.label)


def _turned(one: Found, other: Found, found: Sequence[Found]) -> str:
    """The hint that the samples of a leaf, and of those like it, may be in a later dimension, as of hidden states."""
    if not one.dotted or other.rows not in one.shape[1:]:
        return ""
    dim, like_one = one.shape.index(other.rows, 1), [each for each in found if each.dotted and each.rows == one.rows]
    alike = [each for each in like_one if each.shape[dim : dim + 1] == (other.rows,)]
    labels, layout = " and ".join(each.label for each in alike), {each.dotted: dim for each in alike}
    return f" If the samples of {labels} are in dimension {dim}, pass layout={layout!r}."


def _flattened(one: Found, other: Found) -> str:
    """The hint that a leaf may have the first two dimensions of another one in one, as targets of each step."""
    shape = other.shape[:2]
    if not (one.dotted and other.dotted) or len(shape) < 2 or 1 in shape or one.rows != shape[0] * shape[1]:
        return ""
    return (
        f" If {one.label} is flattened, pass it as {one.label}.unflatten(0, {shape}), and flatten it in the loss; "
        f"if dimension 0 is time then, with layout={{{other.dotted!r}: 1, {one.dotted!r}: 1}}."
    )
