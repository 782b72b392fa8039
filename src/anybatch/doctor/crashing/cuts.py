"""Why a loss has no graph: the lines that its value went through, and whose way to it each of them ends."""

import ast
import builtins
import functools
import inspect
import re
from collections.abc import Iterator
from types import FunctionType, MethodType
from typing import Any, NamedTuple

import torch

from anybatch.doctor.crashing.carried import function_of, loss_name, losses_of
from anybatch.doctor.crashing.kinds import Answer, answer, quoted
from anybatch.doctor.crashing.live import Frame, Live, attributes, whose
from anybatch.doctor.crashing.usercode import Source, called, loads, path_of, simple_statements, targets
from anybatch.records.events import Forward, Stepped

_MOST = 50
_DEEPEST = 3
OFF = frozenset({"no_grad", "inference_mode", "set_grad_enabled"})
_INSTEAD = {
    "argmax": "a loss on the scores themselves, such as F.cross_entropy({of}, target), or a softmax",
    "argmin": "a loss on the scores themselves, or a softmin",
    "item": "the tensor itself, without .item()",
    "tolist": "the tensor itself, without .tolist()",
    "numpy": "torch's own functions instead of numpy's",
    "from_numpy": "torch's own functions on the tensor instead of numpy's",
    "tensor": "torch.stack([...]) of the tensors instead of torch.tensor(...)",
    "as_tensor": "torch.stack([...]) of the tensors instead of torch.as_tensor(...)",
    "detach": "it without .detach()",
    "detach_": "it without .detach_()",
    "data": "it without .data",
    "comparison": "a smooth function such as torch.sigmoid instead of the comparison",
    "grad": "torch.autograd.grad(..., create_graph=True)",
    "once_differentiable": "operations that can be differentiated twice, and no @once_differentiable in own Functions",
}
_WHY = {
    "grad": "Without create_graph=True what torch.autograd.grad gives has no graph itself.",
    "once_differentiable": "A second derivative is needed, and an operation behind this gradient has only a first one.",
}
_CALLS = _INSTEAD.keys() - {"data", "comparison", "grad", "once_differentiable"} | {
    "multinomial", "long", "int", "bool", "FloatTensor", "Tensor", "checkpoint", "requires_grad_"
}  # fmt: skip


class Cut(NamedTuple):
    """A line that ends the graph.

    Args:
        op: what ends it.
        at: file, number and text of the line.
        of: what lost its graph, as the line has it.
        module: whose forward it is.
        sure: 2 where the value before it is known to have a graph, 0 where it is known to have none.
        predicted: whether it is on another way than that of the targets, which may well be constants.
    """

    op: str
    at: tuple[str, int, str] = ("", 0, "")
    of: str = ""
    module: str = ""
    sure: int = 1
    predicted: bool = True


class _Scope(NamedTuple):
    """Where statements run.

    Args:
        source: of them.
        frame: in which they ran; of a call that has ended it knows what was there before.
        owner: the module or function of a call that has ended.
    """

    source: Source
    frame: Frame
    owner: Any = None


def frozen(live: Live, match: "re.Match[str]") -> Answer | None:
    """A model of which no parameter requires a gradient."""
    own = live.parameters()
    if not torch.is_grad_enabled() or not own or any(one.requires_grad for one in own.values()):
        return None
    name = loss_name(live, losses_of(live))
    return answer(loss=name or "The loss", count=len(own), root=next(iter(live.roots)), parameters=list(own)[:10],
                tensor=name, evidence={"frozen": len(own)})  # fmt: skip


def cut_of(live: Live) -> Cut | None:
    """The cut on the way from the trained parameters to the loss, the last one where several are as likely."""
    if live.user is None:
        return None
    found = list(_Search(live, live.user).cuts(loss_name(live, losses_of(live))))
    cut = max(
        (one for one in found if one.sure or one.op not in OFF), key=lambda one: (one.sure, one.predicted), default=None
    )
    if cut is None and any(
        "None of the inputs have requires_grad" in getattr(fact, "text", "") for fact in live.facts()
    ):
        return Cut("checkpoint")
    return cut


def switched_off(live: Live, match: "re.Match[str]") -> Answer | None:
    """Autograd is off, or was in the forward, as far as the record shows."""
    if live.user is None:
        return None
    if torch.is_grad_enabled():
        cut = cut_of(live)
        if (cut is not None and cut.op in {*OFF, "checkpoint"}) or not _forward_without(live):
            return None
    at = ("", 0, "")
    for frame in live.users:
        source = live.source(frame)
        for node in () if source is None else ast.walk(source.tree):
            if called(node) in OFF and isinstance(node, ast.Call) and not at[1]:
                off = torch.is_grad_enabled() or called(node) != "set_grad_enabled" or "False" in ast.unparse(node)
                at = live.at(node, frame.file) if off else at
    mode = "inference mode" if torch.is_inference_mode_enabled() else "gradients off"
    return answer(
        loss=loss_name(live, losses_of(live)) or "The loss", at=at,
        when="was switched off in the forward" if torch.is_grad_enabled() else f"is switched off ({mode})",
        by=f" by {quoted(at[2])} in line {at[1]}" if at[1] else "",
    )  # fmt: skip


def _forward_without(live: Live) -> bool:
    """Whether no forward since the last step was called with gradients on."""
    grads: list[bool] = []
    for fact in live.facts():
        if isinstance(fact, Stepped):
            grads.clear()
        elif isinstance(fact, Forward):
            grads.append(fact.grad)
    return bool(grads) and not any(grads)


def block(live: Live, match: "re.Match[str]") -> Answer | None:
    """A block around the forward that switches autograd off."""
    return _known(live, one if (one := cut_of(live)) is not None and one.op in OFF else None)


def reentrant(live: Live, match: "re.Match[str]") -> Answer | None:
    """A reentrant checkpoint none of whose inputs requires a gradient."""
    known = _known(live, one if (one := cut_of(live)) is not None and one.op == "checkpoint" else None)
    given = known["at"][2] if known is not None else ""
    written = "use_reentrant=True" in given
    change = (
        given.replace("use_reentrant=True", "use_reentrant=False")
        if written
        else "checkpoint(..., use_reentrant=False)"
    )
    return None if known is None else {**known, "change": change}


def cut(live: Live, match: "re.Match[str]") -> Answer | None:
    """An operation that ends the graph."""
    found = cut_of(live)
    known = _known(live, found)
    if found is None or known is None:
        return None
    instead = _INSTEAD.get(found.op, f"something that can be differentiated instead of {found.op}")
    why = (
        f"The result of {found.op} can't be differentiated, and nothing else in {known['loss']} depends on a parameter."
    )
    return {**known, "why": _WHY.get(found.op, why), "instead": instead.format(of=found.of or "scores"),
            "of": quoted(found.of) or "its value",
            "tensor": found.of or known["tensor"]}  # fmt: skip


def _known(live: Live, found: Cut | None) -> Answer | None:
    if found is None:
        return None
    name = loss_name(live, losses_of(live))
    return answer(
        loss=name or "The loss", op="torch.autograd.grad" if found.op in _WHY else found.op,
        line=f" in line {found.at[1]}" if found.at[1] else "",
        code=quoted(found.at[2]), module=found.module, tensor=name, at=found.at, evidence={"op": found.op},
    )  # fmt: skip


def nothing_cut(live: Live, match: "re.Match[str]") -> Answer | None:
    """A loss without a graph, and nothing is known to have cut it."""
    name = loss_name(live, losses_of(live))
    return answer(loss=name or "The loss", tensor=name) if live.user is not None else None


class _Search:
    """Goes up from a backward through the lines that its loss comes from.

    Args:
        live: the state of the crash.
        frame: where the backward was called.
    """

    def __init__(self, live: Live, frame: Frame) -> None:
        self.live, self.frame = live, frame
        self.seen: set[int] = set()
        held = [one for user in live.users for value in list(user.values.values()) for one in _optimizers(value)]
        given = [p for one in held for group in one.param_groups for p in group["params"]]
        self.trained = {id(p) for p in given if held} or {id(p) for p in live.parameters().values() if p.requires_grad}

    def cuts(self, loss: str) -> Iterator[Cut]:
        """Lines that the loss's value went through and that end a graph, the last first."""
        source, statement = self.live.source(self.frame), self.live.statement(self.frame)
        if source is None or statement is None:
            return
        scope, needed = _Scope(source, self.frame), {loss.split(".")[0]: True} if loss else {}
        for node in ast.walk(statement):
            if called(node) == "backward" and isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                self._need(needed, node.func.value, True)
                yield from self._in_value(scope, statement, node.func.value, True)
        yield from self._slice(scope, source.function(self.frame.line), self.frame.line, needed)

    def _slice(self, scope: _Scope, function: ast.AST, line: int, needed: dict[str, bool]) -> Iterator[Cut]:
        """Goes up from a line through the assignments that what is needed comes from."""
        for statement in reversed([one for one in simple_statements(function) if one.lineno <= line]):
            value, predicted = getattr(statement, "value", None), True
            if not isinstance(statement, ast.Return):
                stored = {path.split(".")[0] for path in targets(statement)} & needed.keys()
                if not stored or isinstance(statement, ast.For):
                    continue
                predicted = any(needed[name] for name in stored)
            if scope.owner is not None or not isinstance(statement, ast.Return):
                self._need(needed, value, predicted)
            yield from self._around(scope, statement, predicted)
            if value is not None:
                yield from self._in_value(scope, statement, value, predicted)

    def _need(self, needed: dict[str, bool], value: ast.AST | None, predicted: bool) -> None:
        """Notes the names that a value is computed from; those that only a target is computed from as such."""
        goals = set() if value is None else {name for goal in self._goals(value) for name in loads(goal)}
        for path in [] if value is None else loads(value):
            name = path.split(".")[0]
            needed[name] = needed.get(name, False) or (predicted and path not in goals)

    def _goals(self, value: ast.AST) -> Iterator[ast.AST]:
        """The targets that are given to losses within a value."""
        for node in ast.walk(value):
            if isinstance(node, ast.Call):
                name = (called(node) or called(node.func)).lower()
                known = isinstance(self.live.value(self.frame, node.func), torch.nn.modules.loss._Loss)
                if known or any(part in name for part in ("loss", "entropy", "criterion", "kl_div")):
                    yield from node.args[1:2] or [one.value for one in node.keywords if one.arg == "target"]

    def _around(self, scope: _Scope, statement: ast.stmt, predicted: bool) -> Iterator[Cut]:
        """The blocks and decorators around a statement that switch autograd off."""
        for above in scope.source.outer(statement):
            heads = [item.context_expr for item in above.items] if isinstance(above, ast.With) else []
            if isinstance(above, ast.FunctionDef):
                heads = above.decorator_list
            for head in heads:
                name = called(head) or path_of(head).rpartition(".")[2]
                if name in OFF and (name != "set_grad_enabled" or "False" in ast.unparse(head)):
                    reach = self._reach(statement, scope)
                    sure = 0 if reach is False else 1 if reach is None and scope.owner is None else 2
                    at = (scope.source.file, head.lineno, scope.source.lines[head.lineno - 1].strip())
                    yield Cut(name, at, "", self.live.module_name(scope.owner), sure, predicted)
            if isinstance(above, ast.FunctionDef):
                return

    def _in_value(self, scope: _Scope, statement: ast.stmt, value: ast.AST, predicted: bool) -> Iterator[Cut]:
        module = self.live.module_name(scope.owner) if isinstance(scope.owner, torch.nn.Module) else ""
        goals = {id(node) for goal in self._goals(value) for node in ast.walk(goal)}
        for node in ast.walk(value):
            op, of = _op(node)
            sure = self._sure(scope, statement, node, op, of) if op else None
            if sure is not None:
                line = node.lineno  # type: ignore[attr-defined]
                at = (scope.source.file, line, scope.source.text(line))
                text = "" if of is None else ast.unparse(of)
                yield Cut(op, at, text, module, sure, predicted and id(node) not in goals)
            if isinstance(node, ast.Call) and len(self.seen) < _MOST:
                yield from self._inside(node, scope)

    def _sure(self, scope: _Scope, statement: ast.stmt, node: ast.AST, op: str, of: ast.AST | None) -> int | None:
        """How sure it is that an operation ends a graph; ``None`` where its tensor is known to have had none."""
        if op in ("requires_grad_", "grad", "once_differentiable"):
            return int(op != "once_differentiable")
        if scope.owner is not None:
            return 1
        replaced = of is not None and path_of(of) in targets(statement)  # what it was is gone
        known = None if of is None or replaced else self.live.value(scope.frame, of)
        if isinstance(known, torch.Tensor):
            return 2 if known.requires_grad else None
        if known is not None:
            return 0
        return 2 if self._reach(of or node, scope) else 1

    def _inside(self, node: ast.Call, scope: _Scope) -> Iterator[Cut]:
        """Cuts within what a call runs, where that is the user's."""
        target = self.live.value(scope.frame, node.func)
        waiting: list[Any] = [target] if isinstance(target, torch.nn.Module | FunctionType) else []
        while waiting and len(self.seen) < _MOST:
            one = waiting.pop(0)
            function = type(one).forward if isinstance(one, torch.nn.Module) else one
            source, code = function_of(self.live, function)
            if source is not None and code is not None and whose(source.file) != "ours" and id(one) not in self.seen:
                self.seen.add(id(one))
                names = {"self": one} if isinstance(one, torch.nn.Module) else _names_of(one)
                known = getattr(function, "__globals__", {}) if isinstance(one, torch.nn.Module) else {}
                frame = Frame(source.file, code.lineno, code.name, names, known, "user")
                yield from self._slice(_Scope(source, frame, one), code, code.end_lineno or 0, {})
            elif isinstance(one, torch.nn.Sequential | torch.nn.ModuleList):
                waiting.extend(one)

    def _reach(self, node: ast.AST, scope: _Scope) -> bool | None:
        """Whether trained parameters, or what was computed from them, go into code; ``None`` if a name is not known."""
        stored = set(targets(node))
        read = {one.id for one in ast.walk(node) if _is_read(one) and isinstance(one, ast.Name)}
        unknown = isinstance(node, ast.AugAssign) or bool(stored & read)  # the old value is gone
        waiting = [node]
        while waiting:
            one = waiting.pop()
            if isinstance(one, ast.Name | ast.Attribute) and _is_read(one):
                value, name = self.live.value(scope.frame, one), one.id if isinstance(one, ast.Name) else ""
                if name in stored | _names_within(node) or (value is None and hasattr(builtins, name or " ")):
                    continue
                if self._has(value):
                    return True
                if value is not None or name:
                    unknown = unknown or value is None
                    continue
            waiting.extend(ast.iter_child_nodes(one))
        return None if unknown else False

    def _has(self, value: Any, depth: int = 0) -> bool:
        """Whether a value is or holds something trained."""
        if isinstance(value, torch.Tensor):
            return id(value) in self.trained or (value.requires_grad and not value.is_leaf)
        if isinstance(value, torch.nn.Module):
            return any(id(parameter) in self.trained for parameter in value.parameters())
        return depth <= _DEEPEST and any(self._has(one, depth + 1) for one in _inner(value))


def _is_read(node: Any) -> bool:
    return isinstance(getattr(node, "ctx", None), ast.Load)


def _inner(value: Any) -> list[Any]:
    """What a value holds that may be a module or a tensor."""
    if isinstance(value, MethodType):
        return [value.__self__, value.__func__]
    if isinstance(value, FunctionType):
        return list(_names_of(value).values())
    if isinstance(value, functools.partial):
        return [value.func, *value.args, *value.keywords.values()]
    if isinstance(value, dict | list | tuple):
        return list(dict.values(value) if isinstance(value, dict) else value)[:_MOST]
    return [] if type(value).__module__ == "builtins" else [one for _, one in attributes(value)][:_MOST]


def _names_of(function: FunctionType) -> dict[str, Any]:
    """The names of its closure and of its file that a function reads."""
    try:
        found = inspect.getclosurevars(function)
    except ValueError:  # one is not yet filled
        return {}
    return {**found.globals, **found.nonlocals}


def _optimizers(value: Any) -> list[torch.optim.Optimizer]:
    held = [value] if isinstance(value, torch.optim.Optimizer) else _inner(value)
    return [one for one in held[:_MOST] if isinstance(one, torch.optim.Optimizer)]


def _names_within(node: ast.AST) -> set[str]:
    """Names that a lambda or a comprehension has for itself."""
    found = {one.arg for one in ast.walk(node) if isinstance(one, ast.arg)}
    inner = [one.target for one in ast.walk(node) if isinstance(one, ast.comprehension)]
    return found | {name.id for one in inner for name in ast.walk(one) if isinstance(name, ast.Name)}


def _op(node: ast.AST) -> tuple[str, ast.AST | None]:
    """What an expression does that ends a graph, and to what."""
    if isinstance(node, ast.Attribute) and node.attr == "data" and isinstance(node.ctx, ast.Load):
        return "data", node.value
    if isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.Lt | ast.LtE | ast.Gt | ast.GtE):
        return "comparison", node.left
    name = called(node)
    if not isinstance(node, ast.Call):
        return "", None
    if path_of(node.func).endswith("autograd.grad"):
        return "once_differentiable" if "create_graph=True" in ast.unparse(node) else "grad", node
    if name == "requires_grad_":
        return ("requires_grad_", None) if "False" in ast.unparse(node) else ("", None)
    if name == "checkpoint":
        return ("checkpoint", None) if "use_reentrant=False" not in ast.unparse(node) else ("", None)
    if name not in _CALLS:
        return "", None
    if isinstance(node.func, ast.Attribute) and path_of(node.func.value) not in ("torch", "np", "numpy"):
        return name, node.func.value
    return name, (node.args[0] if node.args else None)
