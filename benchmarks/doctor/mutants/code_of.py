"""The source of a program as a tree: questions about training loops, and edits that keep all other text."""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

OPTIMIZERS = frozenset({"Adam", "AdamW", "SGD", "RMSprop", "Adagrad", "NAdam", "LBFGS", "SignMomentum"})
CROSS_ENTROPY = frozenset({"cross_entropy", "CrossEntropyLoss"})
BINARY = frozenset({"binary_cross_entropy_with_logits", "BCEWithLogitsLoss"})
DISTANCE = frozenset({"mse_loss", "l1_loss", "smooth_l1_loss", "MSELoss", "L1Loss", "SmoothL1Loss"})
LOSSES = CROSS_ENTROPY | BINARY | DISTANCE | {"binary_cross_entropy", "nll_loss"}
MODULES = frozenset({"Module", "LightningModule", "Linear"})
Function = ast.FunctionDef | ast.AsyncFunctionDef
Loop = ast.For | ast.While


@dataclass(frozen=True)
class Edit:
    """A piece of the source, from ``start`` to ``end``, that becomes ``text``."""

    start: int
    end: int
    text: str


class Code:
    """A program.

    Args:
        source: in ASCII, so that columns of the tree are those of the text.
    """

    def __init__(self, source: str) -> None:
        self.source = source
        self.tree = ast.parse(source)
        self._lines = source.splitlines(keepends=True)
        self._starts = [0]
        for line in self._lines:
            self._starts.append(self._starts[-1] + len(line))
        self.parents = {child: node for node in ast.walk(self.tree) for child in ast.iter_child_nodes(node)}
        self.nodes = sorted(
            (node for node in ast.walk(self.tree) if hasattr(node, "lineno")), key=lambda n: (n.lineno, n.col_offset)
        )

    # --- what is there -------------------------------------------------------------------------------------------

    def span(self, node: ast.AST) -> tuple[int, int]:
        """Where a node begins and ends in the text."""
        end_line, end_column = node.end_lineno, node.end_col_offset  # type: ignore[attr-defined]
        return (
            self._starts[node.lineno - 1] + node.col_offset,  # type: ignore[attr-defined]
            self._starts[end_line - 1] + end_column,
        )

    def text(self, node: ast.AST) -> str:
        """The source of a node."""
        start, end = self.span(node)
        return self.source[start:end]

    def calls(self, *names: str) -> list[ast.Call]:
        """Calls of functions or methods of these names, in order."""
        return [node for node in self.nodes if isinstance(node, ast.Call) and name_of(node) in names]

    def ancestors(self, node: ast.AST) -> Iterator[ast.AST]:
        """What a node is in, the innermost first."""
        while node in self.parents:
            node = self.parents[node]
            yield node

    def statement(self, node: ast.AST) -> ast.stmt:
        """The innermost statement that a node belongs to."""
        return next(one for one in (node, *self.ancestors(node)) if isinstance(one, ast.stmt))

    def function(self, node: ast.AST) -> Function | None:
        """The function that a node is in."""
        return next((one for one in self.ancestors(node) if isinstance(one, Function)), None)

    def block(self, statement: ast.stmt) -> list[ast.stmt]:
        """The statements that a statement stands among."""
        parent = self.parents[statement]
        for name in ("body", "orelse", "finalbody"):
            found = getattr(parent, name, None)
            if isinstance(found, list) and statement in found:
                return found
        raise LookupError(self.text(statement))

    def statements_of(self, *names: str) -> list[ast.Expr]:
        """Statements that are nothing but a call of a method of these names."""
        found = [self.parents[call] for call in self.calls(*names)]
        return [one for one in found if isinstance(one, ast.Expr)]

    def loop(self, node: ast.AST) -> Loop | None:
        """The innermost loop around a node, in the same function."""
        for one in self.ancestors(node):
            if isinstance(one, Loop):
                return one
            if isinstance(one, Function):
                return None
        return None

    def backwards(self) -> list[ast.Expr]:
        """Statements that run a backward."""
        return self.statements_of("backward", "manual_backward")

    def training_loops(self) -> list[Loop]:
        """The innermost loops in which a backward runs, directly or by a function that is called there."""
        loops = [found for one in self.backwards() if (found := self.loop(one)) is not None]
        if not loops:
            names = {function.name for one in self.backwards() if (function := self.function(one)) is not None}
            loops = [found for call in self.calls(*names) if (found := self.loop(call)) is not None]
        return list(dict.fromkeys(loops))

    def is_trained(self, node: ast.AST) -> bool:
        """Whether a node is in a module, in a loss, or in what trains, and not in data, scores or evaluation."""
        for one in self.ancestors(node):
            if isinstance(one, ast.ClassDef) and any(_last(base) in MODULES for base in one.bases):
                return True
            if isinstance(one, Function):
                if re.search(r"loss|nll|nt_xent|pinball|residual|episode_logits", one.name):
                    return True
                if any(self.function(back) is one and self.loop(back) is None for back in self.backwards()):
                    return True
        return any(loop in self.ancestors(node) for loop in self.training_loops())

    def optimizers(self) -> list[ast.Call]:
        """Calls that make an optimizer."""
        return self.calls(*OPTIMIZERS)

    def steps(self) -> list[ast.Expr]:
        """Statements that step an optimizer, by itself or by a scaler."""
        found = []
        for one in self.statements_of("step"):
            owner = receiver(self, one.value)
            if "opt" in owner.lower() or owner == "scaler":
                found.append(one)
        return found

    def schedules(self) -> list[ast.Expr]:
        """Statements that step a schedule of the learning rate."""
        steps = self.steps()
        owners = {"env", "scaler", "accelerator"}
        return [
            one for one in self.statements_of("step") if one not in steps and receiver(self, one.value) not in owners
        ]

    def optimized(self, call: ast.Call) -> tuple[str, ast.Call] | None:
        """The variable of the model whose parameters an optimizer gets, and the call that gives them."""
        first = call.args[0] if call.args else None
        if isinstance(first, ast.Call) and name_of(first) == "parameters":
            return receiver(self, first), first
        return None

    def losses(self, kinds: frozenset[str] = LOSSES) -> list[ast.Call]:
        """Calls that compare a prediction with a target, by a function or by a module that was made of a class."""
        made = {
            self.text(one.targets[0])
            for one in self.nodes
            if isinstance(one, ast.Assign) and isinstance(one.value, ast.Call) and name_of(one.value) in kinds
        }
        return [
            node
            for node in self.nodes
            if isinstance(node, ast.Call)
            and len(node.args) >= 2
            and (self.text(node.func) in made or name_of(node) in kinds)
        ]

    def loss_values(self) -> list[ast.expr]:
        """Expressions that are assigned to a loss, or that a function of a loss returns."""
        found: list[ast.expr] = []
        for node in self.nodes:
            if isinstance(node, ast.Assign) and "loss" in self.text(node.targets[0]).lower():
                found.append(node.value)
            elif isinstance(node, ast.Return) and node.value is not None:
                function = self.function(node)
                if function is not None and ("loss" in function.name.lower() or function.name in ("nll", "nt_xent")):
                    found.append(node.value)
        return [one for one in found if not isinstance(one, ast.Constant)]

    def forwards(self) -> list[Function]:
        """The methods ``forward`` of modules."""
        found = [node for node in self.nodes if isinstance(node, Function) and node.name == "forward"]
        return [node for node in found if node.args.args and node.args.args[0].arg == "self"]

    def class_of(self, variable: str) -> ast.ClassDef | None:
        """The class in this file of which a variable is made."""
        classes = {node.name: node for node in self.nodes if isinstance(node, ast.ClassDef)}
        made = self.made(variable)
        return classes.get(name_of(made.value)) if made is not None and isinstance(made.value, ast.Call) else None

    def made(self, variable: str) -> ast.Assign | None:
        """The statement in which a variable is made by a call."""
        found = [node for node in self.nodes if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call)]
        return next((node for node in found if self.text(node.targets[0]) == variable), None)

    # --- edits ---------------------------------------------------------------------------------------------------

    def replace(self, node: ast.AST, text: str) -> Edit:
        """A node becomes another text."""
        return Edit(*self.span(node), text)

    def keyword(self, call: ast.Call, name: str) -> ast.keyword | None:
        """A keyword of a call."""
        return next((one for one in call.keywords if one.arg == name), None)

    def with_keyword(self, call: ast.Call, name: str, text: str) -> Edit:
        """A call gets a keyword, or another value for it."""
        if (old := self.keyword(call, name)) is not None:
            return self.replace(old.value, text)
        _, end = self.span(call)
        inside = self.source[: end - 1].rstrip()
        comma = "" if inside.endswith(("(", ",")) else ", "
        return Edit(len(inside), len(inside), f"{comma}{name}={text}")

    def without_keyword(self, call: ast.Call, name: str) -> Edit | None:
        """A call loses a keyword."""
        old = self.keyword(call, name)
        if old is None:
            return None
        start, end = self.span(old)
        before = self.source[:start].rstrip()
        if before.endswith(","):
            return Edit(len(before) - 1, end, "")
        after = self.source[end:]
        return Edit(start, end + len(after) - len(after.lstrip(", ")), "")

    def delete(self, statement: ast.stmt) -> Edit:
        """A statement goes, with its lines; ``pass`` stays if nothing else does."""
        if len(self.block(statement)) == 1:
            return self.replace(statement, "pass")
        return Edit(self._starts[statement.lineno - 1], self._starts[statement.end_lineno or statement.lineno], "")

    def lines(self, statement: ast.stmt) -> str:
        """The text of a statement without its indentation, whole lines."""
        first, last = statement.lineno - 1, statement.end_lineno or statement.lineno
        return textwrap.dedent("".join(self._lines[first:last]))

    def before(self, statement: ast.stmt, text: str) -> Edit:
        """Lines are put in front of a statement, with its indentation."""
        at = self._starts[statement.lineno - 1]
        return Edit(at, at, self._indented(statement, text))

    def after(self, statement: ast.stmt, text: str) -> Edit:
        """Lines are put behind a statement, with its indentation."""
        at = self._starts[statement.end_lineno or statement.lineno]
        return Edit(at, at, self._indented(statement, text))

    def inside(self, statement: ast.stmt, text: str) -> Edit:
        """A statement is put into one with a colon that begins with ``text``."""
        start = self._starts[statement.lineno - 1]
        end = self._starts[statement.end_lineno or statement.lineno]
        body = textwrap.indent(self.lines(statement), "    ")
        return Edit(start, end, self._indented(statement, f"{text}\n{body}"))

    def unwrapped(self, statement: ast.With) -> Edit:
        """What is in a ``with`` statement stands without it."""
        start = self._starts[statement.lineno - 1]
        first, last = statement.body[0].lineno - 1, statement.end_lineno or statement.lineno
        body = textwrap.dedent("".join(self._lines[first:last]))
        return Edit(start, self._starts[last], self._indented(statement, body))

    def _indented(self, statement: ast.stmt, text: str) -> str:
        if not text.endswith("\n"):
            text += "\n"
        return textwrap.indent(text, " " * statement.col_offset)

    def apply(self, edits: Sequence[Edit]) -> str:
        """The source with edits."""
        source = self.source
        for edit in sorted(edits, key=lambda one: (one.start, one.end), reverse=True):
            source = source[: edit.start] + edit.text + source[edit.end :]
        return source

    def line_after(self, edits: Sequence[Edit], number: int = 0) -> int:
        """The line of an edit in the source that has all of them."""
        edit = edits[number]
        first = self.source.count("\n", 0, edit.start) + 1
        moved = sum(
            one.text.count("\n") - self.source.count("\n", one.start, one.end)
            for one in edits
            if one.start < edit.start
        )
        return first + moved


def name_of(call: ast.Call) -> str:
    """The last part of what is called: ``F.relu(x)`` has ``relu``."""
    function = call.func
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""


def _last(base: ast.expr) -> str:
    return base.attr if isinstance(base, ast.Attribute) else getattr(base, "id", "")


def receiver(code: Code, call: ast.AST) -> str:
    """The text of the object whose method is called."""
    function = getattr(call, "func", None)
    if not isinstance(function, ast.Attribute):
        return ""
    text = code.text(function)  # with the parentheses that the tree does not have
    return text[: text.rindex(".")].rstrip()


def atom(code: Code, node: ast.AST) -> str:
    """The text of an expression, to which an attribute can be added."""
    text = code.text(node)
    return text if isinstance(node, ast.Name | ast.Attribute | ast.Call | ast.Subscript) else f"({text})"
