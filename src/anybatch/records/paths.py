"""Which parameters a loss reaches through autograd, and what stopped the others."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from anybatch.records.branches import Branch, branches_of, drawn, names_joined
from anybatch.records.plainvalues import Plain, nothing, plain
from anybatch.records.showing import Shown
from anybatch.units import format_bytes

if TYPE_CHECKING:
    from rich.tree import Tree


@dataclass(frozen=True, slots=True)
class Stop(Plain):
    """Where the way from a parameter to the loss ends.

    Args:
        op: what stopped it: an operation (``"detach"``, ``"argmax"``, ``"data"``, ``"item"``, ``"tensor"``), a mode
            (``"no_grad"``, ``"inference_mode"``), ``"sample"`` (of a distribution), ``"checkpoint"``, the name of an
            ``autograd.Function``, ``"requires_grad"``, ``"unused"`` (nothing read it), ``"left out"`` (what was made
            of it is not in the loss), or ``"unknown"``.
        module: the qualified name of the module that was running, or for ``"requires_grad"`` and ``"unused"`` of the
            one that owns the parameter; empty outside of all modules.
        file: of the user's line, empty if there is none.
        line: its number, 0 if there is none.
        after: what made the last tensor that still carried the parameter with a graph.
        message: what was seen, in full sentences.
        sure: whether the way from there into the loss was seen, or that there is none.
        others: further places where other ways to the same loss end.

    Example:
        >>> print(Stop("detach", "encoder", "train.py", 12))
        detach in encoder, train.py:12
    """

    op: str
    module: str = ""
    file: str = ""
    line: int = 0
    after: str = ""
    message: str = ""
    sure: bool = True
    others: tuple["Stop", ...] = ()

    def __str__(self) -> str:
        where = f" in {self.module}" if self.module else ""
        return f"{self.op}{where}{_place(self.file, self.line)}"


@dataclass(frozen=True, slots=True)
class Leaf:
    """What autograd knows of one parameter.

    Args:
        reached: whether a backward from the loss would arrive at it.
        requires_grad: its own flag.
        is_leaf: whether it is a leaf, which keeps its gradient in ``.grad``.
        retains_grad: whether it keeps its gradient although it is no leaf.
        numel: how many numbers it has.
    """

    reached: bool
    requires_grad: bool
    is_leaf: bool
    retains_grad: bool
    numel: int


@dataclass(frozen=True, slots=True)
class Cut:
    """What took the graph of some parameters away on their way into a term.

    Args:
        op: its name, as that of a ``Stop``.
        file: of the user's line at which it did.
        line: its number, 0 if it is not known.
        parameters: their names, at most 200.
    """

    op: str
    file: str = ""
    line: int = 0
    parameters: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Term:
    """One of the losses, or one summand of a loss.

    Args:
        value: its value, ``None`` if it is not known; signs and factors are left out.
        has_gradient: whether autograd goes through it; if not, it is a constant for the parameters.
        op: what made it, or the name of the loss.
        module: the module in which it was made.
        file: of the user's line.
        line: its number.
        parameters: how many parameters autograd reaches through it.
        stopped: how many parameters went into its value and are not reached through it.
        by: what stopped the first of those.
        by_file: of the user's line at which it did.
        by_line: its number, 0 if it is not known.
        cuts: all that did, the one with most parameters first; those of which another one comes later are left out.
    """

    value: float | None
    has_gradient: bool
    op: str
    module: str = ""
    file: str = ""
    line: int = 0
    parameters: int = 0
    stopped: int = 0
    by: str = ""
    by_file: str = ""
    by_line: int = 0
    cuts: tuple[Cut, ...] = ()

    def __str__(self) -> str:
        value = "" if self.value is None else f"{self.value:.6g}  "
        text = f"{value}{self.op}{f' in {self.module}' if self.module else ''}{_place(self.file, self.line)}"
        if not self.has_gradient:
            text += ": a constant for autograd"
        if self.stopped:
            text += f" ({self.stopped} parameters are in its value without gradient, by {self.by})"
        return text


@dataclass(frozen=True, slots=True)
class Saved:
    """A tensor that the graph of a loss keeps for the backward.

    Args:
        op: the node of the graph that keeps it.
        module: the module that ran when the node was made; empty if it is not known.
        shape: its shape.
        dtype: its precision, such as ``"float32"``.
        bytes: of its storage.
    """

    op: str
    module: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int


@dataclass(frozen=True, slots=True)
class Kept:
    """What the graph of a loss keeps in memory, without parameters and buffers of the model.

    Args:
        bytes: of all storages, each once.
        modules: bytes by module, the largest first; empty for a finished loss, whose graph names no modules.
        biggest: the largest tensors.
        packed: saved tensors that were given to hooks (checkpoints, offloading), and are not counted.
    """

    bytes: int
    modules: Mapping[str, int]
    biggest: tuple[Saved, ...]
    packed: int = 0


@dataclass(frozen=True, slots=True)
class Paths(Shown):
    """What ``anybatch.why`` found out about a loss and the parameters of a model.

    Args:
        leaves: by the name of the parameter; tied ones have several names.
        stopped: for each parameter that is not reached where its way ends, and by what.
        followed: whether the forward was followed, so that stops have an operation and a line.
        terms: of the loss, if it is a sum.
        outside: leaves that the loss reaches and the model does not have, described.
        kept: what the graph keeps in memory, ``None`` where it can't be read without side effects.
        notes: what limits the answer, in full sentences.

    Example:
        >>> stop = Stop("detach", "", "train.py", 12, "linear in 0")
        >>> leaf = Leaf(True, True, True, False, 4)
        >>> paths = Paths({"0.weight": Leaf(False, True, True, False, 6), "1.weight": leaf}, {"0.weight": stop})
        >>> paths.reached
        ('1.weight',)
        >>> print(paths)
        The loss reaches 1 of 2 parameters (4 of 10 numbers)
        ├── reached: 1.weight
        └── stopped by detach, train.py:12
            ├── parameters: 0.weight
            └── last with a graph: linear in 0
        >>> Paths.from_dict(paths.to_dict()) == paths
        True
    """

    leaves: Mapping[str, Leaf]
    stopped: Mapping[str, Stop]
    followed: bool = True
    terms: tuple[Term, ...] = ()
    outside: tuple[str, ...] = ()
    kept: Kept | None = None
    notes: tuple[str, ...] = field(default=())

    @property
    def reached(self) -> tuple[str, ...]:
        """Names of the parameters that a backward from the loss would arrive at."""
        return tuple(name for name, leaf in self.leaves.items() if leaf.reached)

    @property
    def constants(self) -> tuple[Term, ...]:
        """The terms of the loss that are constants for autograd."""
        return tuple(term for term in self.terms if not term.has_gradient)

    def to_dict(self) -> dict[str, Any]:
        """The fields as plain values for JSON; a number that is not finite becomes ``None``."""
        finite = {name: plain(value, nothing) for name, value in Shown.to_dict(self).items()}
        return finite | {"reached": list(self.reached)}

    def _tree(self) -> Branch:
        numbers = sum(leaf.numel for leaf in self.leaves.values())
        of_them = sum(leaf.numel for leaf in self.leaves.values() if leaf.reached)
        root = Branch(
            f"The loss reaches {len(self.reached)} of {len(self.leaves)} parameters "
            f"({of_them:,} of {numbers:,} numbers)"
        )
        if self.reached:
            root.add(f"reached: {names_joined(self.reached, self.leaves)}")
        groups: dict[Stop, list[str]] = {}
        for name, stop in self.stopped.items():
            groups.setdefault(stop, []).append(name)
        for stop, names in groups.items():
            self._add_stop(root, stop, names)
        if self.outside:
            root.add(f"reached, but not in the model: {', '.join(self.outside)}")
        if self.terms:
            branches_of(root.add(f"the loss has {len(self.terms)} terms"), self.terms)
        if self.kept is not None and self.kept.bytes:
            self._add_kept(root, self.kept)
        for note in self.notes:
            root.add(f"note: {note}")
        return root

    def _add_stop(self, root: Branch, stop: Stop, names: list[str]) -> None:
        branch = root.add(f"stopped by {stop}{'' if stop.sure else ' (perhaps)'}")
        branch.add(f"parameters: {names_joined(names, self.leaves)}")
        if stop.after:
            branch.add(f"last with a graph: {stop.after}")
        if stop.message:
            branch.add(stop.message)
        if stop.others:
            branches_of(branch.add("other ways end"), stop.others)

    @staticmethod
    def _add_kept(root: Branch, kept: Kept) -> None:
        packed = f", and {kept.packed} tensors in hooks" if kept.packed else ""
        branch = root.add(f"the graph keeps {format_bytes(kept.bytes)}{packed}")
        for module, count in list(kept.modules.items())[:5]:
            branch.add(f"{format_bytes(count)}  {module or 'outside of the named modules'}")
        if kept.biggest and not kept.modules:
            largest = kept.biggest[0]
            branch.add(f"largest: {format_bytes(largest.bytes)}, {largest.dtype}{list(largest.shape)} by {largest.op}")

    def __str__(self) -> str:
        return drawn(self._tree())

    def __rich__(self) -> "Tree":
        from anybatch.records.branches import as_rich

        return as_rich(self._tree())


def _place(file: str, line: int) -> str:
    return f", {PurePath(file).name}:{line}" if file else ""
