"""Where the graph of a loss was cut: the lines that its value went through, and whose way to it each of them ends."""

import ast
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from anybatch.doctor.crashing.crashinplace import forward_of
from anybatch.doctor.crashing.crashlive import Frame, Live, whose
from anybatch.doctor.crashing.crashsource import Source, called, loads, path_of, simple_statements, targets
from anybatch.doctor.crashing.crashtrained import Trained

_MOST = 50
_CALLS = frozenset(
    {"detach", "detach_", "item", "tolist", "numpy", "argmax", "argmin", "multinomial", "long", "int", "bool",
     "from_numpy", "tensor", "as_tensor", "FloatTensor", "Tensor", "checkpoint", "requires_grad_"}
)  # fmt: skip
OFF = frozenset({"no_grad", "inference_mode", "set_grad_enabled"})


class Cut(NamedTuple):
    """A line that ends the graph.

    Args:
        op: what ends it.
        file: of the line.
        line: its number.
        code: its text.
        of: what lost its graph, as the line has it.
        module: whose forward it is.
        sure: 2 where the value before it is known to have a graph, 0 where it is known to have none.
        predicted: whether it is on another way than that of the targets, which may well be constants.
    """

    op: str
    file: str
    line: int
    code: str
    of: str = ""
    module: str = ""
    sure: int = 1
    predicted: bool = True


def surest_cut(live: Live, frame: Frame, loss: str) -> Cut | None:
    """The cut on the way from the trained parameters to a loss, the last one where several are as likely.

    Args:
        live: the state of the crash.
        frame: where the backward was called.
        loss: the name of the loss there, if it has one.
    """
    found = [one for one in _Search(live, frame).cuts(loss) if one.sure or one.op not in OFF]
    return max(found, key=lambda one: (one.sure, one.predicted), default=None)


class _Search:
    """Goes up from a backward through the lines that its loss comes from.

    Args:
        live: the state of the crash.
        frame: where the backward was called.
    """

    def __init__(self, live: Live, frame: Frame) -> None:
        self.live, self.frame = live, frame
        self.trained = Trained(live)
        self.seen: set[Any] = set()

    def cuts(self, loss: str) -> Iterator[Cut]:
        """Lines that the loss's value went through and that end a graph, the last first."""
        frame, source, statement = self.frame, self.live.source(self.frame), self.live.statement(self.frame)
        if source is None or statement is None:
            return
        needed = {loss.split(".")[0]: True} if loss else {}
        for node in ast.walk(statement):
            if called(node) == "backward" and isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                self._need(needed, node.func.value, True)
                yield from self._in_value(statement, node.func.value, source, frame, None, True)
        yield from self._slice(source, source.function(frame.line), frame.line, needed, frame, None)

    def _slice(
        self, source: Source, scope: ast.AST, line: int, needed: dict[str, bool], frame: Frame | None, owner: Any
    ) -> Iterator[Cut]:
        """Goes up from a line through the assignments that what is needed comes from."""
        for statement in reversed([one for one in simple_statements(scope) if one.lineno <= line]):
            value = getattr(statement, "value", None)
            predicted = True
            if not isinstance(statement, ast.Return):
                stored = {path.split(".")[0] for path in targets(statement)} & needed.keys()
                if not stored or isinstance(statement, ast.For):
                    continue
                predicted = any(needed[name] for name in stored)
            if owner is not None or not isinstance(statement, ast.Return):
                self._need(needed, value, predicted)
            yield from self._around(source, statement, frame, owner, predicted)
            if value is not None:
                yield from self._in_value(statement, value, source, frame, owner, predicted)

    def _need(self, needed: dict[str, bool], value: ast.AST | None, predicted: bool) -> None:
        """Notes the names that a value is computed from; those that only a target is computed from as such."""
        goals = set() if value is None else {name for goal in self._goals(value) for name in loads(goal)}
        rest = [] if value is None else loads(value)
        for path in rest:
            name = path.split(".")[0]
            needed[name] = needed.get(name, False) or (predicted and path not in goals)

    def _goals(self, value: ast.AST) -> Iterator[ast.AST]:
        """The targets that are given to losses within a value."""
        for node in ast.walk(value):
            if isinstance(node, ast.Call) and self._is_loss(node):
                yield from node.args[1:2] or [one.value for one in node.keywords if one.arg == "target"]

    def _is_loss(self, node: ast.Call) -> bool:
        name = (called(node) or called(node.func)).lower()
        known = self.live.value(self.frame, node.func)
        return isinstance(known, torch.nn.modules.loss._Loss) or any(
            part in name for part in ("loss", "entropy", "criterion", "kl_div")
        )

    def _around(
        self, source: Source, statement: ast.stmt, frame: Frame | None, owner: Any, predicted: bool
    ) -> Iterator[Cut]:
        """The blocks and decorators around a statement that switch autograd off."""
        for above in source.outer(statement):
            heads = [item.context_expr for item in above.items] if isinstance(above, ast.With) else []
            if isinstance(above, ast.FunctionDef):
                heads = above.decorator_list
            for head in heads:
                name = called(head) or path_of(head).rpartition(".")[2]
                if name in OFF and (name != "set_grad_enabled" or "False" in ast.unparse(head)):
                    reach = self.trained.reach(statement, frame, owner)
                    sure = 0 if reach is False else 1 if reach is None and frame is not None else 2
                    code = source.lines[head.lineno - 1].strip()
                    module = self.live.module_name(owner)
                    yield Cut(name, source.file, head.lineno, code, "", module, sure, predicted)
            if isinstance(above, ast.FunctionDef):
                return

    def _in_value(
        self, statement: ast.stmt, value: ast.AST, source: Source, frame: Frame | None, owner: Any, predicted: bool
    ) -> Iterator[Cut]:
        module = self.live.module_name(owner) if isinstance(owner, torch.nn.Module) else ""
        goals = {id(node) for goal in self._goals(value) for node in ast.walk(goal)}
        for node in ast.walk(value):
            op, of = _op(node)
            if op:
                sure = self._sure(statement, node, op, of, frame, owner)
                if sure is not None:
                    text, line = "" if of is None else ast.unparse(of), node.lineno  # type: ignore[attr-defined]
                    is_goal = id(node) in goals or not predicted
                    yield Cut(op, source.file, line, source.text(line), text, module, sure, not is_goal)
            if isinstance(node, ast.Call) and len(self.seen) < _MOST:
                yield from self._inside(node, frame, owner)

    def _sure(
        self, statement: ast.stmt, node: ast.AST, op: str, of: ast.AST | None, frame: Frame | None, owner: Any
    ) -> int | None:
        """How sure it is that an operation ends a graph; ``None`` where its tensor is known to have had none."""
        if op == "requires_grad_":
            return 1
        replaced = of is not None and path_of(of) in targets(statement)  # what it was is gone
        known = None if frame is None or of is None or replaced else self.live.value(frame, of)
        if isinstance(known, torch.Tensor):
            return 2 if known.requires_grad else None
        if known is not None:
            return 0
        return 2 if frame is not None and self.trained.reach(of or node, frame, owner) else 1

    def _inside(self, node: ast.Call, frame: Frame | None, owner: Any) -> Iterator[Cut]:
        """Cuts within what a call runs, where that is the user's."""
        path = path_of(node.func)
        target: Any = None
        if path.startswith("self.") and isinstance(owner, torch.nn.Module):
            target = dict(owner.named_modules()).get(path.removeprefix("self."))
        elif frame is not None:
            target = self.live.value(frame, node.func)
        modules = [target] if isinstance(target, torch.nn.Module) else []
        while modules and len(self.seen) < _MOST:
            module = modules.pop(0)
            found = forward_of(self.live, module)
            if found is not None and id(module) not in self.seen:
                self.seen.add(id(module))
                source, scope = found
                yield from self._slice(source, scope, scope.end_lineno or 0, {}, None, module)
            elif isinstance(module, torch.nn.Sequential | torch.nn.ModuleList):
                modules.extend(module)
        code = getattr(target, "__code__", None)
        if code is not None and whose(code.co_filename) == "user" and code not in self.seen:
            self.seen.add(code)
            source_ = self.live.source_of_file(code.co_filename)
            scope_ = None if source_ is None else source_.function(code.co_firstlineno)
            if source_ is not None and isinstance(scope_, ast.FunctionDef):
                yield from self._slice(source_, scope_, scope_.end_lineno or 0, {}, None, target)


def _op(node: ast.AST) -> tuple[str, ast.AST | None]:
    """What an expression does that ends a graph, and to what."""
    if isinstance(node, ast.Attribute) and node.attr == "data" and isinstance(node.ctx, ast.Load):
        return "data", node.value
    if isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.Lt | ast.LtE | ast.Gt | ast.GtE):
        return "comparison", node.left
    name = called(node)
    if name not in _CALLS or not isinstance(node, ast.Call):
        return "", None
    if name == "requires_grad_":
        return ("requires_grad_", None) if "False" in ast.unparse(node) else ("", None)
    if name == "checkpoint":
        return ("checkpoint", None) if "use_reentrant=False" not in ast.unparse(node) else ("", None)
    if isinstance(node.func, ast.Attribute) and path_of(node.func.value) not in ("torch", "np", "numpy"):
        return name, node.func.value
    return name, (node.args[0] if node.args else None)
