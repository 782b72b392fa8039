"""The user's source around a line: statements, loops, what is carried from one round to the next. No torch."""

import ast
import itertools
import linecache
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

_Node = TypeVar("_Node", bound=ast.AST)
_LONGEST = 160
_BODIES = (
    ast.For, ast.While, ast.With, ast.AsyncFor, ast.AsyncWith, ast.If, ast.Try, ast.FunctionDef, ast.ClassDef,
)  # fmt: skip
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
LOOPS = (ast.For, ast.AsyncFor, ast.While)
SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda, ast.Module)
Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Module


class Parsed:
    """A file's syntax tree, of whose nodes it is known what they are in."""

    def __init__(self, tree: ast.Module) -> None:
        self.tree = tree
        self._parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}

    def parent(self, node: ast.AST) -> ast.AST | None:
        """What a node is directly in."""
        return self._parents.get(node)

    def ancestors(self, node: ast.AST) -> Iterator[ast.AST]:
        """What a node is in, from the innermost on."""
        while (outer := self._parents.get(node)) is not None:
            yield outer
            node = outer

    def innermost(self, line: int) -> ast.stmt | None:
        """The innermost statement that has a line."""
        inside = [one for one in ast.walk(self.tree) if isinstance(one, ast.stmt) and _has(one, line)]
        return inside[-1] if inside else None  # the walk goes outside in

    def loops_around(self, node: ast.AST) -> list[ast.For | ast.AsyncFor | ast.While]:
        """The loops of the same function that a node is in, the innermost first."""
        inside = itertools.takewhile(lambda one: not isinstance(one, SCOPES), self.ancestors(node))
        return [one for one in inside if isinstance(one, LOOPS)]


class Source(Parsed):
    """A file of the user's."""

    def __init__(self, file: str, lines: list[str], tree: ast.Module) -> None:
        super().__init__(tree)
        self.file, self.lines = file, lines

    def statements(self, line: int) -> list[ast.stmt]:
        """All statements without a body that have a line, since several may stand in one."""
        return [one for one in simple_statements(self.tree, inner=True) if _has(one, line)]

    def function(self, line: int) -> Function:
        """The innermost function that has a line, or the file."""
        inside = (one for one in ast.walk(self.tree) if isinstance(one, _FUNCTIONS) and _has(one, line))
        return max(inside, key=lambda one: one.lineno, default=self.tree)

    def round(self, line: int) -> ast.AST:
        """What is run again together with a line: the innermost loop around it, or its function."""
        return next(iter(self.loops(line)), None) or self.function(line)

    def loops(self, line: int) -> list[ast.For | ast.AsyncFor | ast.While]:
        """The loops of the same function around a line, the innermost first."""
        statement = self.innermost(line)
        return [] if statement is None else self.loops_around(statement)

    def text(self, line: int) -> str:
        """The statement at a line on one line; only its first line if it has a body or is long."""
        first = _without_comment(self.lines[line - 1]) if 0 < line <= len(self.lines) else ""
        statement = self.innermost(line)
        if statement is None or isinstance(statement, _BODIES):
            return first
        rows = self.lines[statement.lineno - 1 : statement.end_lineno]
        whole = " ".join(_without_comment(row) for row in rows)
        return whole if len(whole) <= _LONGEST else first[:_LONGEST]


def _without_comment(line: str) -> str:
    head, mark, comment = line.partition("  #")
    return (line if mark and (head.count('"') % 2 or head.count("'") % 2 or not comment) else head).strip()


def source_of(file: str, names: dict[str, Any] | None = None) -> Source | None:
    """Reads a file as the traceback would, through the loader of its module where need be."""
    lines = linecache.getlines(file, names)
    if not lines:
        return None
    try:
        return Source(file, lines, ast.parse("".join(lines)))
    except (SyntaxError, ValueError, RecursionError):
        return None


def path_of(node: ast.AST) -> str:
    """``name``, ``self.name`` or ``batch['x']`` as text, empty for another expression."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        inner = path_of(node.value)
        return f"{inner}.{node.attr}" if inner else ""
    if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
        inner = path_of(node.value)
        return f"{inner}[{node.slice.value!r}]" if inner else ""
    return ""


def called(node: ast.AST) -> str:
    """The last name of what a call calls, such as ``"detach"``; empty for anything else."""
    if not isinstance(node, ast.Call):
        return ""
    if isinstance(node.func, ast.Attribute):
        return node.func.attr
    return node.func.id if isinstance(node.func, ast.Name) else ""


def nodes_in(outer: ast.AST | Iterable[ast.AST] | None, kind: type[_Node]) -> Iterator[_Node]:
    """The nodes of a kind in a node or in several, these included; none in ``None``."""
    for one in () if outer is None else (outer,) if isinstance(outer, ast.AST) else outer:
        yield from (node for node in ast.walk(one) if isinstance(node, kind))


def operations(outer: ast.AST | Iterable[ast.AST], sign: type[ast.operator]) -> Iterator[ast.BinOp]:
    """The expressions with a sign, such as ``ast.Mult``."""
    return (one for one in nodes_in(outer, ast.BinOp) if isinstance(one.op, sign))


def names_in(outer: ast.AST | Iterable[ast.AST], ctx: type[ast.expr_context] = ast.expr_context) -> set[str]:
    """The names in a node or in several; only those that are read, or stored, by ``ast.Load`` or ``ast.Store``."""
    return {one.id for one in nodes_in(outer, ast.Name) if isinstance(one.ctx, ctx)}


def targets(statement: ast.AST) -> list[str]:
    """What a statement assigns to, tuples taken apart."""
    if isinstance(statement, ast.Assign):
        waiting: list[ast.AST] = list(statement.targets)
    elif isinstance(statement, ast.AugAssign | ast.AnnAssign | ast.NamedExpr | ast.For):
        waiting = [statement.target]
    else:
        return []
    found = []
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Tuple | ast.List):
            waiting.extend(reversed(node.elts))
        elif isinstance(node, ast.Starred):
            waiting.append(node.value)
        elif path := path_of(node):
            found.append(path)
    return found


def loads(node: ast.AST | None) -> list[str]:
    """Names and attributes that an expression or statement reads, the longest paths, in order."""
    found: list[str] = []
    waiting: list[ast.AST] = [] if node is None else [node]
    while waiting:
        one = waiting.pop()
        path = path_of(one)
        if path and isinstance(getattr(one, "ctx", None), ast.Load):
            found.append(path)
            continue
        if isinstance(one, ast.Call) and isinstance(one.func, ast.Attribute):  # a method's name is not what is read
            waiting.extend(reversed([one.func.value, *one.args, *one.keywords]))
            continue
        if isinstance(one, ast.AugAssign):
            found.extend(targets(one))
        waiting.extend(reversed(list(ast.iter_child_nodes(one))))
    return list(dict.fromkeys(found))


def simple_statements(node: ast.AST, *, inner: bool = False) -> list[ast.stmt]:
    """The statements in a node that have no body, and the heads of loops, in order; not of functions by default."""
    found: list[ast.stmt] = []
    waiting: list[ast.AST] = list(ast.iter_child_nodes(node))
    while waiting:
        one = waiting.pop()
        if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda) and not inner:
            continue
        if isinstance(one, ast.stmt) and (not isinstance(one, _BODIES) or isinstance(one, ast.For)):
            found.append(one)
        waiting.extend(ast.iter_child_nodes(one))
    return sorted(found, key=lambda one: (one.lineno, one.col_offset))


@dataclass(frozen=True, slots=True)
class Carried:
    """A name that a loop reads."""

    path: str
    line: int  # where the loop reads it first
    stored: int = 0  # the line where the loop stores it, 0 if it doesn't
    own: bool = False  # whether it goes into the call that makes its next value
    added: bool = False  # whether it is only added to


def carried(loop: ast.For | ast.AsyncFor | ast.While) -> list[Carried]:
    """What a loop reads that comes from before the round, in order: those with ``stored`` from the round before."""
    first_read: dict[str, int] = {}
    stored: dict[str, ast.stmt] = {}
    made = set(targets(loop))
    for statement in (one for one in simple_statements(loop) if one is not loop):
        for path in loads(statement.iter if isinstance(statement, ast.For) else statement):
            if path not in stored and path not in made and path.split(".")[0] not in made | stored.keys():
                first_read.setdefault(path, statement.lineno)
        for path in targets(statement):
            stored.setdefault(path, statement)
    found = []
    for path, line in first_read.items():
        store = stored.get(path)
        value = getattr(store, "value", None)
        own = value is not None and any(path in loads(node) for node in ast.walk(value) if isinstance(node, ast.Call))
        plus = isinstance(store, ast.AugAssign) or (
            isinstance(value, ast.BinOp) and isinstance(value.op, ast.Add) and path in (loads(value.left) or [""])[:1]
        )
        found.append(Carried(path, line, 0 if store is None else store.lineno, own, plus))
    return found


def _has(node: Any, line: int) -> bool:
    return bool(node.lineno <= line <= (node.end_lineno or node.lineno))
