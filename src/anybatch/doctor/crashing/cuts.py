"""Why a loss has no graph: the lines that its value went through, and which of them ends the graph."""

import ast
import re
from collections.abc import Iterator
from types import FunctionType
from typing import Any, NamedTuple

import torch

from anybatch.doctor.crashes import Answer, answer, quoted
from anybatch.doctor.crashing.carried import function_of, loss_name, losses_of
from anybatch.doctor.crashing.live import Frame, Live, whose
from anybatch.doctor.crashing.usercode import Source, called, loads, nodes_in, path_of, simple_statements, targets

_MOST = 50
OFF = frozenset({"no_grad", "inference_mode", "set_grad_enabled"})
_INSTEAD = {
    **dict.fromkeys(("argmax", "argmin"), "a loss on the scores themselves, such as F.cross_entropy({of}, target)"),
    **{name: f"the tensor itself, without .{name}()" for name in ("item", "tolist")},
    **{name: f"it without .{name}" for name in ("detach()", "detach_()", "data")},
    **dict.fromkeys(("numpy", "from_numpy"), "torch's own functions instead of numpy's"),
    **{name: f"torch.stack([...]) of the tensors instead of torch.{name}(...)" for name in ("tensor", "as_tensor")},
    "comparison": "a smooth function such as torch.sigmoid instead of the comparison",
    "torch.autograd.grad": "torch.autograd.grad(..., create_graph=True)",
    "once_differentiable": "operations that can be differentiated twice, and no @once_differentiable in own Functions",
}
_CALLS = frozenset({
    "argmax", "argmin", "item", "tolist", "numpy", "from_numpy", "tensor", "as_tensor", "detach", "detach_",
    "multinomial", "long", "int", "bool", "FloatTensor", "Tensor", "checkpoint", "requires_grad_",
})  # fmt: skip


class Cut(NamedTuple):
    """A line that ends the graph."""

    op: str  # what ends it
    at: tuple[str, int, str]  # file, number and text of the line
    of: str = ""  # what lost its graph, as the line has it
    module: str = ""  # whose forward it is
    sure: int = 1  # 2 where what goes in is known to have a graph, 0 where nothing that is trained is known to go in


def frozen(live: Live, match: "re.Match[str]") -> Answer | None:
    """A model of which no parameter requires a gradient."""
    own = live.parameters()
    if not torch.is_grad_enabled() or not own or any(one.requires_grad for one in own.values()):
        return None
    return answer(loss=_loss(live), count=len(own), root=next(iter(live.roots)), parameters=list(own)[:10],
                  tensor=_loss(live), evidence={"frozen": len(own)})  # fmt: skip


def switched_off(live: Live, match: "re.Match[str]") -> Answer | None:
    """Autograd is off in the backward itself."""
    if torch.is_grad_enabled():
        return None
    for frame in live.users:
        source = live.source(frame)
        for node in nodes_in(None if source is None else source.tree, ast.Call):
            if called(node) in OFF:
                at = live.at(node, frame.file)
                return answer(loss=_loss(live), at=at, code=quoted(at[2]), line=f" in line {at[1]}")
    return answer(loss=_loss(live), line="", code="something")


def block(live: Live, match: "re.Match[str]") -> Answer | None:
    """A block around the forward that switches autograd off."""
    return _known(live, one) if (one := _cut_of(live)) is not None and one.op in OFF else None


def reentrant(live: Live, match: "re.Match[str]") -> Answer | None:
    """A reentrant checkpoint none of whose inputs requires a gradient."""
    one = _cut_of(live)
    return _known(live, one) if one is not None and one.op == "checkpoint" else None


def cut(live: Live, match: "re.Match[str]") -> Answer | None:
    """An operation that ends the graph."""
    found = _cut_of(live)
    if found is None:
        return None
    instead = _INSTEAD.get(found.op, _INSTEAD.get(f"{found.op}()", f"something with a gradient instead of {found.op}"))
    return {**_known(live, found), "instead": instead.format(of=found.of or "scores"),
            "of": quoted(found.of) or "its value", "tensor": found.of or _loss(live)}  # fmt: skip


def nothing_cut(live: Live, match: "re.Match[str]") -> Answer | None:
    """A loss without a graph, and nothing is known to have cut it."""
    return answer(loss=_loss(live), tensor=_loss(live)) if live.user is not None else None


def _loss(live: Live) -> str:
    return loss_name(live, losses_of(live)) or "The loss"


def _known(live: Live, found: Cut) -> Answer:
    return answer(
        loss=_loss(live), op=found.op, line=f" in line {found.at[1]}", code=quoted(found.at[2]), module=found.module,
        tensor=_loss(live), at=found.at, evidence={"op": found.op},
    )  # fmt: skip


def _cut_of(live: Live) -> Cut | None:
    """The cut on the way from the trained parameters to the loss, the last one where several are as likely."""
    if live.user is None or (here := live.here()) is None:
        return None
    name = loss_name(live, losses_of(live)).split(".")[0]
    source, line = here
    function = source.function(line)
    for with_targets in (False, True):
        found = list(_Search(live, with_targets).above(source, live.user, function, line, {name} - {""}))
        found = [one for one in found if one.sure or one.op not in OFF]
        if found:
            return max(found, key=lambda one: one.sure)
    return None


class _Search:
    """Goes up from a backward through the lines of its loss; ``with_targets`` also through those of targets."""

    def __init__(self, live: Live, with_targets: bool) -> None:
        self.live, self.with_targets, self.seen = live, with_targets, set[int]()

    def above(
        self, source: Source, frame: Frame, function: ast.AST, line: int, needed: set[str], owner: Any = None
    ) -> Iterator[Cut]:
        """Cuts in the assignments that what is needed comes from; in a call that has ended also in what it returns."""
        for statement in reversed([one for one in simple_statements(function) if one.lineno <= line]):
            here, value = owner is None and statement.lineno == line, getattr(statement, "value", None)
            stored = {path.split(".")[0] for path in targets(statement)} & needed
            returned = isinstance(statement, ast.Return) and owner is not None
            if value is None or isinstance(statement, ast.For) or not (here or stored or returned):
                continue
            goals = [] if self.with_targets else [node for goal in _goals(value) for node in ast.walk(goal)]
            own = [node for node in ast.walk(value) if node not in goals]
            needed |= {node.id for node in own if isinstance(node, ast.Name)}
            module = self.live.module_name(owner) if isinstance(owner, torch.nn.Module) else ""
            for head in _switches(source, statement):
                sure = 2 if owner is not None or self._has_trained(frame, statement) else 0
                at = (source.file, head.lineno, source.lines[head.lineno - 1].strip())
                yield Cut(called(head) or path_of(head).rpartition(".")[2], at, "", module, sure)
            for node in own:
                yield from self._at(source, frame, statement, node, owner, module)

    def _at(
        self, source: Source, frame: Frame, statement: ast.stmt, node: Any, owner: Any, module: str
    ) -> Iterator[Cut]:
        """The cut that an expression is, and those within what it calls."""
        op, of = _op(node)
        was_there = of is not None and owner is None and path_of(of) not in targets(statement)
        value = self.live.value(frame, of) if was_there else None
        if op and not (isinstance(value, torch.Tensor) and not value.requires_grad):
            read = owner is None and self._has_trained(frame, of or node)
            sure = 2 if isinstance(value, torch.Tensor) or read else 1
            text = "" if of is None else ast.unparse(of)
            yield Cut(op, (source.file, node.lineno, source.text(node.lineno)), text, module, sure)
        target = self.live.value(frame, node.func) if isinstance(node, ast.Call) else None
        waiting: list[Any] = [target] if isinstance(target, torch.nn.Module | FunctionType) else []
        while waiting and len(self.seen) < _MOST:
            one = waiting.pop(0)
            function = type(one).forward if isinstance(one, torch.nn.Module) else one
            inner, code = function_of(self.live, function)
            if inner is not None and code is not None and whose(inner.file) != "ours" and id(one) not in self.seen:
                self.seen.add(id(one))
                names = {"self": one} if isinstance(one, torch.nn.Module) else {}
                known = Frame(inner.file, code.lineno, code.name, names, getattr(function, "__globals__", {}), "user")
                yield from self.above(inner, known, code, code.end_lineno or 0, set(), one)
            elif isinstance(one, torch.nn.Sequential | torch.nn.ModuleList):
                waiting.extend(one)

    def _has_trained(self, frame: Frame, node: ast.AST) -> bool:
        """Whether code reads a module with trained parameters, or a tensor with a graph."""
        functions = [path_of(one.func) for one in nodes_in(node, ast.Call)]
        for path in [*loads(node), *filter(None, functions)]:
            parts = path.split(".")
            for value in (self.live.read(".".join(parts[: n + 1]), frame) for n in range(len(parts))):
                if isinstance(value, torch.Tensor) and value.requires_grad:
                    return True
                if isinstance(value, torch.nn.Module) and any(one.requires_grad for one in value.parameters()):
                    return True
        return False


def _goals(value: ast.AST) -> Iterator[ast.AST]:
    """The targets that are given to losses within a value, which may well be constants."""
    for node in nodes_in(value, ast.Call):
        name = (called(node) or called(node.func)).lower()
        if any(part in name for part in ("loss", "entropy", "criterion", "kl_div")):
            yield from node.args[1:2] or [one.value for one in node.keywords if one.arg == "target"]


def _switches(source: Source, statement: ast.stmt) -> Iterator[ast.expr]:
    """The blocks and decorators around a statement that switch autograd off."""
    for above in source.ancestors(statement):
        heads = [item.context_expr for item in above.items] if isinstance(above, ast.With) else []
        heads = above.decorator_list if isinstance(above, ast.FunctionDef) else heads
        for head in heads:
            name = called(head) or path_of(head).rpartition(".")[2]
            if name in OFF and (name != "set_grad_enabled" or "False" in ast.unparse(head)):
                yield head
        if isinstance(above, ast.FunctionDef):
            return


def _op(node: ast.AST) -> tuple[str, ast.AST | None]:
    """What an expression does that ends a graph, and to what."""
    if isinstance(node, ast.Attribute) and node.attr == "data" and isinstance(node.ctx, ast.Load):
        return "data", node.value
    if isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.Lt | ast.LtE | ast.Gt | ast.GtE):
        return "comparison", node.left
    name = called(node)
    if not isinstance(node, ast.Call) or (name == "requires_grad_" and "False" not in ast.unparse(node)):
        return "", None
    if path_of(node.func).endswith("autograd.grad"):
        return "once_differentiable" if "create_graph=True" in ast.unparse(node) else "torch.autograd.grad", node
    if name not in _CALLS or (name == "checkpoint" and "use_reentrant=False" in ast.unparse(node)):
        return "", None
    if isinstance(node.func, ast.Attribute) and path_of(node.func.value) not in ("torch", "np", "numpy"):
        return name, None if name in ("checkpoint", "requires_grad_") else node.func.value
    return name, node.args[0] if node.args and name != "checkpoint" else None
