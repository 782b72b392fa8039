"""Whether the text of a script lays what it keeps of a loop beside labels of the data set, row by row."""

import ast
import re
from collections.abc import Callable, Iterator
from typing import Any

from anybatch.doctor.crashing.usercode import called

_LABELS = re.compile(
    r"(?:^|[^a-z])(?:[a-z]*(?:label|target|truth)(?:s|_?(?:test|train|val|valid|all|true))*|gts?|tgts?|"
    r"ys?(?:_?(?:t|te|tr|test|train|val|valid|all|true|np|numpy))?)(?:[\])'\"]*$|_(?:test|train|val|valid|all|true|np)$)",
    re.I,
)
_PARTS = re.compile(r"(tensors|(data|set)\w*\[\w+\])\[1\]$", re.I)  # of a data set, the second of each sample
_OF_ALL = frozenset({"mean", "sum", "std", "var", "norm", "max", "min", "item", "len", "numel", "print"})
_OF_NO_ROW = frozenset({"shape", "dtype", "device", "ndim"})
PUT = frozenset({"append", "extend"})
GROWS = frozenset({"cat", "concatenate", "hstack", "vstack"})
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_SCOPES = (*FUNCTIONS, ast.ClassDef)


def is_compared(tree: ast.Module, loop: ast.For | ast.ListComp, first: str) -> bool:
    """Whether what a loop keeps of the first thing that it takes is later compared with labels, or given beside them.

    Example:
        >>> text = "made = torch.cat([net(x) for x, _ in loader])\\n"
        >>> def compares(line: str) -> bool:
        ...     tree = ast.parse(text + line)
        ...     return is_compared(tree, next(one for one in ast.walk(tree) if isinstance(one, ast.ListComp)), "x")
        >>> [compares(one) for one in ("(made == data.targets).sum()", "zip(made, labels)", "p = made\\nf1(y_test, p)")]
        [True, True, True]
        >>> [compares(one) for one in ("made.std()", "print(made, labels)", "made = net(x)\\nmade == y")]
        [False, False, False]
    """
    scopes: list[Any] = [tree, *(one for one in ast.walk(tree) if isinstance(one, FUNCTIONS))]
    around = [one for one in scopes[1:] if one.lineno <= loop.lineno <= (one.end_lineno or 0)]
    scope = max(around, key=lambda one: one.lineno, default=tree)
    text = _Text(loop)
    if isinstance(loop, ast.ListComp):
        kept, start = set[str](), loop.lineno
    else:
        kept, start = text.kept_in(loop, first), (loop.end_lineno or loop.lineno) + 1
    if text.lays_beside(scope, kept, start):
        return True
    of_self = {one for one in kept if one.startswith("self.")}
    known = -1
    while known < len(text.giving):  # what a function returns is followed to where it is called
        known = len(text.giving)
        if any(text.lays_beside(one, set(of_self), 0) for one in scopes if of_self or text.giving):
            return True
    return False


class _Text:
    """What a script does with the rows that a loop keeps, followed in the order of its lines."""

    def __init__(self, loop: ast.For | ast.ListComp) -> None:
        self.loop = loop
        self.giving: set[str] = set()

    def kept_in(self, loop: ast.For, first: str) -> set[str]:
        """What the loop appends to, or writes in places of, with what it makes of the rows."""
        names, kept = {first}, set[str]()
        for one in _statements(loop.body):
            for call in (each for part in _own(one) for each in ast.walk(part) if isinstance(each, ast.Call)):
                if called(call) in PUT and isinstance(call.func, ast.Attribute) and self._any(call.args, names):
                    kept.add(_root(call.func.value))
            if isinstance(one, ast.Assign) and self._rows(one.value, names):
                grows = called(one.value) in GROWS
                own = {ast.unparse(each) for each in ast.walk(one.value) if isinstance(each, (ast.Name, ast.Attribute))}
                kept |= {_root(each) for each in one.targets if isinstance(each, ast.Subscript) or
                         (grows and _root(each) in own)}  # fmt: skip
            self._assign(one, names)
        return kept

    def lays_beside(self, scope: Any, kept: set[str], start: int) -> bool:
        """Whether rows stand beside labels in a scope; the names of functions that return such rows are kept."""
        labels = set[str]()
        for one in _statements(scope.body):
            if (one.end_lineno or one.lineno) < start or one is self.loop:
                continue
            for part in _own(one):
                if any(self._is_beside(each, kept, labels) for each in ast.walk(part)):
                    return True
            if isinstance(one, ast.Return) and one.value is not None and self._rows(one.value, kept):
                if isinstance(one.value, ast.Tuple) and any(
                    self._labels(each, kept, labels) for each in one.value.elts
                ):
                    return True
                self.giving |= {scope.name, f"self.{scope.name}"}
            self._assign(one, labels, lambda value: self._labels(value, kept, labels))
            self._assign(one, kept)
        return False

    def _is_beside(self, node: ast.AST, kept: set[str], labels: set[str]) -> bool:
        sides: list[ast.expr] = []
        if isinstance(node, ast.Compare) and isinstance(node.ops[0], (ast.Eq, ast.NotEq)):
            sides = [node.left, *node.comparators]
        elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Sub):
            sides = [node.left, node.right]
        elif isinstance(node, ast.Subscript):
            sides = [node.value, node.slice]
        elif isinstance(node, ast.Call) and called(node) != "print":
            method = [node.func.value] if isinstance(node.func, ast.Attribute) else []
            sides = [*method, *node.args, *(one.value for one in node.keywords)]
        return self._any(sides, kept) and any(self._labels(one, kept, labels) for one in sides)

    def _any(self, nodes: list[ast.expr], kept: set[str]) -> bool:
        return any(self._rows(one, kept) for one in nodes)

    def _rows(self, node: ast.AST, kept: set[str]) -> bool:
        """Whether a value has the rows of a name that is kept, of the loop, or of a function that returns them."""

        def is_source(one: ast.AST) -> bool:
            called = ast.unparse(one.func) if isinstance(one, ast.Call) else ""
            is_kept = isinstance(one, (ast.Name, ast.Attribute)) and ast.unparse(one) in kept
            return one is self.loop or called in self.giving or is_kept

        return _has_rows(node, is_source)

    def _labels(self, node: ast.AST, kept: set[str], labels: set[str]) -> bool:
        """Whether a value has the rows of labels, by their name, and none of those that are kept."""

        def is_source(one: ast.AST) -> bool:
            if not isinstance(one, (ast.Name, ast.Attribute, ast.Subscript)):
                return False
            name = ast.unparse(one)
            named = name.rpartition(".")[2] if not isinstance(one, ast.Subscript) else name.rpartition("[")[2]
            is_key = not isinstance(one, ast.Subscript) or isinstance(one.slice, ast.Constant)
            return name in labels or bool((is_key and _LABELS.search(named)) or _PARTS.search(name))

        return not self._rows(node, kept) and _has_rows(node, is_source)

    def _assign(self, one: ast.stmt, names: set[str], is_of: Callable[[ast.expr], bool] | None = None) -> None:
        """Names that a statement gives such a value are added, and those that it gives another are taken away."""
        holds = is_of or (lambda value: self._rows(value, names))
        for target, value, grows in _given(one):
            found, name = holds(value), _root(target)
            if found:
                names.add(name)
            elif not grows and not isinstance(target, ast.Subscript):
                names.discard(name)


def _has_rows(node: ast.AST, is_source: Callable[[ast.AST], bool]) -> bool:
    """Whether such a thing is in a value other than as a number that is taken of all its rows."""
    if is_source(node):
        return True
    if isinstance(node, ast.Attribute) and node.attr in _OF_NO_ROW:
        return False
    given = [*node.args, *(one.value for one in node.keywords)] if isinstance(node, ast.Call) else []
    if called(node) in _OF_ALL and not any(map(_is_dim, given)):
        return False
    return any(_has_rows(one, is_source) for one in ast.iter_child_nodes(node))


def _is_dim(node: ast.expr) -> bool:
    """Whether an argument is a dim other than that of the rows."""
    return bool(re.fullmatch(r"-?\d+", text := ast.unparse(node))) and text != "0"


def _given(one: ast.stmt) -> Iterator[tuple[ast.expr, ast.expr, bool]]:
    """Each target of a statement with its value, and whether it keeps what it had before."""
    pairs: list[tuple[ast.expr, ast.expr]] = []
    if isinstance(one, ast.Assign):
        pairs = [(target, one.value) for target in one.targets]
    elif isinstance(one, (ast.AugAssign, ast.AnnAssign)) and one.value is not None:
        yield one.target, one.value, isinstance(one, ast.AugAssign)
    elif isinstance(one, (ast.For, ast.AsyncFor)):
        target = one.target  # the number of a round has no rows
        if isinstance(target, ast.Tuple) and called(one.iter) == "enumerate":
            target = target.elts[-1]
        pairs = [(target, one.iter)]
    elif isinstance(one, ast.Expr) and isinstance(one.value, ast.Call) and called(one.value) in PUT:
        func = one.value.func
        yield from ((func.value, arg, True) for arg in one.value.args if isinstance(func, ast.Attribute))
    for target, value in pairs:
        parts = target.elts if isinstance(target, (ast.Tuple, ast.List)) else [target]
        values = value.elts if isinstance(value, ast.Tuple) and len(parts) > 1 else [value] * len(parts)
        yield from ((each, given, False) for each, given in zip(parts, values, strict=False))


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements of a scope in order, without those of functions and classes in it."""
    for one in body:
        if isinstance(one, _SCOPES):
            continue
        yield one
        for field in ("body", "handlers", "orelse", "finalbody", "cases"):
            inner = getattr(one, field, [])
            for each in inner:
                yield from _statements([each] if isinstance(each, ast.stmt) else each.body)


def _own(one: ast.stmt) -> Iterator[ast.AST]:
    """The expressions of a statement itself, without those of its body."""
    for child in ast.iter_child_nodes(one):
        if isinstance(child, ast.withitem):
            yield child.context_expr
        elif isinstance(child, ast.expr):
            yield child


def _root(node: ast.expr) -> str:
    while isinstance(node, ast.Subscript):
        node = node.value
    return ast.unparse(node)
