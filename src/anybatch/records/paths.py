"""Which parameters a loss reaches through autograd, and what cuts off the others."""

import io
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from anybatch.records.reading import Plain, nothing
from anybatch.records.showing import Shown
from anybatch.units import format_bytes

if TYPE_CHECKING:
    from rich.tree import Tree


_MOST_NAMES = 12
_WIDEST = 2**20


def names_joined(names: Collection[str], among: Collection[str]) -> str:
    """Joins names of parameters; where all parameters of a module are among them, the module is named instead.

    Example:
        >>> names_joined(["a.0.w", "a.0.b", "b.w"], ["a.0.w", "a.0.b", "a.1.w", "b.w", "b.b"])
        'a.0.* (2), b.w'
    """
    return cut_off(wholes(names, among))


def wholes(names: Collection[str], among: Collection[str]) -> list[str]:
    """Names, with the outermost module of which all are among them in the place of these."""
    chosen = dict.fromkeys(names)
    there = Counter(part for name in dict.fromkeys(among) for part in _containers(name))
    listed = Counter(part for name in chosen for part in _containers(name))
    shown: dict[str, None] = {}
    for name in chosen:
        whole = next((part for part in _containers(name) if listed[part] == there[part] > 1), None)
        shown[name if whole is None else f"{whole}.* ({there[whole]})"] = None
    return list(shown)


def cut_off(texts: list[str]) -> str:
    """Texts in a row, of which 12 at most are shown and the others counted."""
    more = [f"and {len(texts) - _MOST_NAMES} more"] if len(texts) > _MOST_NAMES else []
    return ", ".join(texts[:_MOST_NAMES] + more)


def _containers(name: str) -> Iterator[str]:
    """The modules that a name lies in, the outermost first."""
    pieces = name.split(".")
    return (".".join(pieces[:length]) for length in range(1, len(pieces)))


@dataclass(frozen=True, slots=True)
class Stop(Plain):
    """Where the path from a parameter to the loss ends.

    Example:
        >>> print(Stop("detach", "encoder", "train.py", 12))
        detach in encoder, train.py:12
    """

    # what cut it off: an operation (``"detach"``, ``"argmax"``, ``"data"``, ``"item"``, ``"tensor"``), a mode
    # (``"no_grad"``, ``"inference_mode"``), ``"sample"`` (of a distribution), ``"checkpoint"``, the name of an
    # ``autograd.Function``, ``"requires_grad"``, ``"unused"`` (no operation read it), ``"left out"`` (results computed
    # from it are not in the loss), or ``"unknown"``
    op: str
    # the qualified name of the module that was running; for ``"requires_grad"`` and ``"unused"``, of the module that
    # owns the parameter; empty outside of modules
    module: str = ""
    file: str = ""  # the file of the user's line; empty if there is none
    line: int = 0  # the number of that line; 0 if there is none
    after: str = ""  # the operation that made the last tensor of the path with a graph
    message: str = ""  # what was seen, in full sentences
    sure: bool = True  # whether it was seen how the value goes on into the loss from there, or that it does not
    others: tuple["Stop", ...] = ()  # where other paths from the parameter to this loss end

    def __str__(self) -> str:
        where = f" in {self.module}" if self.module else ""
        return f"{self.op}{where}{_place(self.file, self.line)}"


@dataclass(frozen=True, slots=True)
class Leaf:
    """The state of one parameter in autograd."""

    reached: bool  # whether a backward from the loss would reach it
    requires_grad: bool  # its ``requires_grad``
    is_leaf: bool  # whether it is a leaf, which keeps its gradient in ``.grad``
    retains_grad: bool  # whether it keeps its gradient although it is not a leaf
    numel: int  # the number of its elements


@dataclass(frozen=True, slots=True)
class Cut:
    """An operation that cuts some parameters off from a term of the loss."""

    op: str  # its name, as in ``Stop``
    file: str = ""  # the file of the user's line
    line: int = 0  # the number of that line; 0 if unknown
    parameters: tuple[str, ...] = ()  # the names of the parameters that it cuts off, at most 200


@dataclass(frozen=True, slots=True)
class Term:
    """One of the losses, or one summand of a loss."""

    value: float | None  # its value without signs and factors; ``None`` if unknown
    has_gradient: bool  # whether it has a graph; without one it is a constant for autograd
    op: str  # the operation that computed it, or the name of the loss
    module: str = ""  # the module in which it was computed
    file: str = ""  # the file of the user's line
    line: int = 0  # the number of that line
    parameters: int = 0  # the number of parameters that autograd reaches through it
    stopped: int = 0  # the number of parameters that its value depends on and that autograd does not reach through it
    by: str = ""  # what cuts off the first of those
    by_file: str = ""  # the file of the user's line that does so
    by_line: int = 0  # the number of that line; 0 if unknown
    # everything that cuts parameters off, most parameters first; a cut before another cut is left out
    cuts: tuple[Cut, ...] = ()

    def __str__(self) -> str:
        value = "" if self.value is None else f"{self.value:.6g}  "
        text = f"{value}{self.op}{f' in {self.module}' if self.module else ''}{_place(self.file, self.line)}"
        if not self.has_gradient:
            text += ": a constant for autograd"
        if self.stopped:
            many = f"{self.stopped} parameter{'s' if self.stopped > 1 else ''}"
            text += f" (its value depends on {many} without a gradient, cut off by {self.by})"
        return text


@dataclass(frozen=True, slots=True)
class Saved:
    """A tensor that the graph of a loss saves for the backward."""

    op: str  # the node of the graph that saves it
    module: str  # the module that was running; empty if unknown
    shape: tuple[int, ...]  # its shape
    dtype: str  # its dtype, such as ``"float32"``
    bytes: int  # the bytes of its storage


@dataclass(frozen=True, slots=True)
class Kept:
    """The memory that the graph of a loss keeps, without parameters and buffers of the model."""

    bytes: int  # the bytes of all saved storages, each counted once
    # bytes by module, the largest first; empty if the loss was given as a tensor, whose graph does not name modules
    modules: Mapping[str, int]
    biggest: tuple[Saved, ...]  # the largest tensors
    # the number of saved tensors that went to saved-tensor hooks (checkpointing, offloading); not counted in ``bytes``
    packed: int = 0


@dataclass(frozen=True, slots=True)
class Paths(Shown):
    """What ``anybatch.why`` found about a loss and the parameters of a model.

    Args:
        leaves: the parameters by name; tied ones have several names.
        stopped: for each parameter that is not reached, where and by what its path is cut off.
        followed: whether the forward was traced; only then does a stop have an operation and a line.
        terms: the terms of the loss, if it is a sum.
        outside: descriptions of leaves that the loss reaches and the model does not own.
        kept: the memory that the graph keeps; ``None`` if it can't be read without side effects.
        notes: the limits of the answer, in full sentences.

    Example:
        >>> stop = Stop("detach", "", "train.py", 12, "linear in 0")
        >>> leaf = Leaf(True, True, True, False, 4)
        >>> paths = Paths({"0.weight": Leaf(False, True, True, False, 6), "1.weight": leaf}, {"0.weight": stop})
        >>> paths.reached
        ('1.weight',)
        >>> print(paths)
        The loss reaches 1 of 2 parameters (4 of 10 elements)
        ├── reached: 1.weight
        └── stopped by detach, train.py:12
            ├── parameters: 0.weight
            └── last with a graph: linear in 0
        >>> Paths.from_dict(paths.to_dict()) == paths
        True
    """

    _not_finite = nothing
    leaves: Mapping[str, Leaf]
    stopped: Mapping[str, Stop]
    followed: bool = True
    terms: tuple[Term, ...] = ()
    outside: tuple[str, ...] = ()
    kept: Kept | None = None
    notes: tuple[str, ...] = field(default=())

    @property
    def reached(self) -> tuple[str, ...]:
        """Names of the parameters that a backward from the loss would reach."""
        return tuple(name for name, leaf in self.leaves.items() if leaf.reached)

    @property
    def constants(self) -> tuple[Term, ...]:
        """The terms of the loss that are constants for autograd."""
        return tuple(term for term in self.terms if not term.has_gradient)

    def to_dict(self) -> dict[str, Any]:
        """The fields as plain values for JSON, and ``reached``; a number that is not finite becomes ``None``."""
        return Shown.to_dict(self) | {"reached": list(self.reached)}

    def __rich__(self) -> "Tree":
        from rich.text import Text
        from rich.tree import Tree

        elements = sum(leaf.numel for leaf in self.leaves.values())
        reached = sum(leaf.numel for leaf in self.leaves.values() if leaf.reached)
        count = f"{len(self.reached)} of {len(self.leaves)} parameters ({reached:,} of {elements:,} elements)"
        root = Tree(Text(f"The loss reaches {count}", style="bold"))
        if self.reached:
            _add(root, f"reached: {names_joined(self.reached, self.leaves)}")
        groups: dict[Stop, list[str]] = {}
        for name, stop in self.stopped.items():
            groups.setdefault(stop, []).append(name)
        for stop, names in groups.items():
            self._add_stop(root, stop, names)
        if self.outside:
            _add(root, f"reached, but not in the model: {', '.join(self.outside)}")
        if self.terms:
            _add(root, f"the loss has {len(self.terms)} terms", *self.terms)
        if self.kept is not None and self.kept.bytes:
            self._add_kept(root, self.kept)
        for note in self.notes:
            _add(root, f"note: {note}")
        return root

    def _add_stop(self, root: "Tree", stop: Stop, names: list[str]) -> None:
        branch = _add(root, f"stopped by {stop}{'' if stop.sure else ' (perhaps)'}")
        _add(branch, f"parameters: {names_joined(names, self.leaves)}")
        if stop.after:
            _add(branch, f"last with a graph: {stop.after}")
        if stop.message:
            _add(branch, stop.message)
        if stop.others:
            _add(branch, "other paths end at", *stop.others)

    @staticmethod
    def _add_kept(root: "Tree", kept: Kept) -> None:
        packed = f", and {kept.packed} tensors in hooks" if kept.packed else ""
        branch = _add(root, f"the graph keeps {format_bytes(kept.bytes)}{packed}")
        for module, count in list(kept.modules.items())[:5]:
            _add(branch, f"{format_bytes(count)}  {module or 'outside of named modules'}")
        if kept.biggest and not kept.modules:
            largest = kept.biggest[0]
            _add(
                branch, f"largest: {format_bytes(largest.bytes)}, {largest.dtype}{list(largest.shape)} by {largest.op}"
            )

    def __str__(self) -> str:
        from rich.console import Console

        with io.StringIO() as text:  # as wide as need be, so that no line is broken
            Console(file=text, width=_WIDEST, color_system=None, legacy_windows=False).print(self, soft_wrap=True)
            return text.getvalue().rstrip()


def _add(tree: "Tree", text: object, *below: object) -> "Tree":
    """Adds a line below one, with others below it; brackets in the user's names are shown, not read as markup."""
    from rich.text import Text

    line = str(text)
    branch = tree.add(Text(line, style="red" if line.startswith("stopped by") else ""))
    for one in below:
        _add(branch, one)
    return branch


def _place(file: str, line: int) -> str:
    return f", {PurePath(file).name}:{line}" if file else ""
