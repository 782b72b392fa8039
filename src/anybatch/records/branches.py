"""A tree of lines, as plain text and for rich."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.tree import Tree

_MOST_NAMES = 12


@dataclass(slots=True)
class Branch:
    """A line of a tree, with the lines below it."""

    text: str  # the line
    children: list["Branch"] = field(default_factory=list)

    def add(self, text: str) -> "Branch":
        """Adds a line below this one and returns its branch."""
        self.children.append(Branch(text))
        return self.children[-1]


def branches_of(parent: Branch, items: Iterable[object]) -> None:
    """Adds the text of each item below a branch."""
    for item in items:
        parent.add(str(item))


def drawn(root: Branch) -> str:
    """The tree as lines of text.

    Example:
        >>> root = Branch("a")
        >>> _ = root.add("b").add("c"), root.add("d")
        >>> print(drawn(root))
        a
        ├── b
        │   └── c
        └── d
    """
    return "\n".join([root.text, *_lines(root)])


def _lines(branch: Branch) -> Iterable[str]:
    for child in branch.children:
        is_last = child is branch.children[-1]
        yield ("└── " if is_last else "├── ") + child.text
        yield from (("    " if is_last else "│   ") + line for line in _lines(child))


def as_rich(root: Branch) -> "Tree":
    """The tree for rich; brackets in the user's names are shown literally, not read as markup."""
    from rich.text import Text
    from rich.tree import Tree

    tree = Tree(Text(root.text, style="bold"))
    waiting = [(tree, child) for child in root.children]
    for parent, branch in waiting:
        style = "red" if branch.text.startswith("stopped by") else ""
        waiting.extend(
            (added, child) for added in [parent.add(Text(branch.text, style=style))] for child in branch.children
        )
    return tree


def names_joined(names: Collection[str], among: Collection[str]) -> str:
    """Joins names of parameters; where all parameters of a module are among them, the module is named instead.

    Args:
        names: the names to show; at most 12 entries are listed, the others are counted.
        among: the names of all parameters.

    Example:
        >>> names_joined(["a.0.w", "a.0.b", "b.w"], ["a.0.w", "a.0.b", "a.1.w", "b.w", "b.b"])
        'a.0.* (2), b.w'
    """
    chosen = set(names)
    shown: dict[str, None] = {}
    counts: dict[str, list[int]] = {}
    for name in among:
        parts = name.split(".")
        for length in range(1, len(parts)):
            count = counts.setdefault(".".join(parts[:length]), [0, 0])
            count[0] += 1
            count[1] += name in chosen
    for name in names:
        parts = name.split(".")
        prefixes = (".".join(parts[:length]) for length in range(1, len(parts)))
        whole = next((p for p in prefixes if counts[p][0] == counts[p][1] > 1), None)
        shown[name if whole is None else f"{whole}.* ({counts[whole][0]})"] = None
    texts = list(shown)
    more = [f"and {len(texts) - _MOST_NAMES} more"] if len(texts) > _MOST_NAMES else []
    return ", ".join(texts[:_MOST_NAMES] + more)
