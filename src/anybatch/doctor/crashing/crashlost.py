"""Crashes of a loss without a graph: which line of the user's cut it."""

import ast
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from anybatch.doctor.crashing.crashinplace import forward_of
from anybatch.doctor.crashing.crashkinds import Told, kind, origin, quoted
from anybatch.doctor.crashing.crashlive import Frame, Live, whose
from anybatch.doctor.crashing.crashsource import Source, called, loads, path_of, simple_statements, targets
from anybatch.doctor.crashing.crashtwice import losses_of
from anybatch.records.events import Forward, Stepped

_CALLS = frozenset(
    {"detach", "detach_", "item", "tolist", "numpy", "argmax", "argmin", "multinomial", "long", "int", "bool",
     "from_numpy", "tensor", "as_tensor", "FloatTensor", "Tensor", "checkpoint", "requires_grad_"}
)  # fmt: skip
_OFF = frozenset({"no_grad", "inference_mode", "set_grad_enabled"})
_INSTEAD = {
    "argmax": "a loss on the scores themselves, such as F.cross_entropy({of}, target), or a softmax",
    "argmin": "a loss on the scores themselves, or a softmin",
    "item": "the tensor itself, without .item()",
    "tolist": "the tensor itself, without .tolist()",
    "numpy": "torch's own functions instead of numpy's",
    "tensor": "torch.stack([...]) of the tensors instead of torch.tensor(...)",
    "as_tensor": "torch.stack([...]) of the tensors instead of torch.as_tensor(...)",
    "detach": "it without .detach()",
    "detach_": "it without .detach_()",
    "data": "it without .data",
    "comparison": "a smooth function such as torch.sigmoid instead of the comparison",
    "checkpoint": "checkpoint(..., use_reentrant=False)",
}
_DEEPEST = 6


class Cut(NamedTuple):
    """A line that ends the graph.

    Args:
        op: what ends it.
        file: of the line.
        line: its number.
        code: its text.
        of: what lost its graph, as the line has it.
        module: whose forward it is.
        sure: 2 where the value before it is known to have a graph, 0 where it is known to be no tensor.
    """

    op: str
    file: str
    line: int
    code: str
    of: str = ""
    module: str = ""
    sure: int = 1


@kind(r"^element 0 of (tensors|variables) does not require grad and does not have a grad_fn")
def without_graph(live: Live, _: Any) -> Told | None:
    """Tells why the loss has no graph."""
    frame, losses = live.user, losses_of(live)
    if frame is None:
        return None
    call = live.code(frame)
    name = next((p for p, one, _ in live.named() if any(one is loss for loss in losses)), "")
    loss = name or "The loss"
    if not torch.is_grad_enabled():
        return _switched_off(live, loss)
    parameters = live.parameters()
    if parameters and not any(parameter.requires_grad for parameter in parameters.values()):
        return Told(
            name="LOSS_NO_GRAD",
            message=f"{loss} has no graph, since all {len(parameters)} parameters have requires_grad=False.",
            cause="Everything is frozen, so that there is nothing to compute a gradient for.",
            fix="Leave requires_grad on for what is to be trained: "
            f"{next(iter(live.roots))}.requires_grad_() or that of one of its layers.",
            parameters=tuple(parameters)[:10],
            tensor=name,
            evidence={"frozen": len(parameters)},
        )
    cut = max(_cuts(live, frame, name), key=lambda one: one.sure, default=None)
    if (cut is None or cut.op not in {*_OFF, "checkpoint"}) and _called_without(live):
        return _switched_off(live, loss)
    if cut is not None:
        return _told(live, cut, loss, name)
    if any("None of the inputs have requires_grad" in getattr(fact, "text", "") for fact in live.facts()):
        return _told(live, Cut("checkpoint", "", 0, ""), loss, name)
    return Told(
        name="LOSS_NO_GRAD",
        message=f"{loss} in {quoted(call)} has no graph: no parameter that requires a gradient is in it.",
        cause="Somewhere between the parameters and the loss the values were taken out of the graph.",
        fix="anybatch.why(lambda: <compute the loss>, model) shows where.",
        tensor=name,
    )


def _told(live: Live, cut: Cut, loss: str, name: str) -> Told:
    evidence = {"op": cut.op, **origin(cut.file, cut.line, cut.code)}
    line = f" in line {cut.line}" if cut.line else ""
    if cut.op in _OFF:
        return Told(
            name="NO_GRAD_ACTIVE",
            message=f"{loss} has no graph, since {quoted(cut.code)}{line} switches autograd off for its forward.",
            cause="Under no_grad and inference_mode no graph is recorded.",
            fix=f"Take the forward that is trained out of {quoted(cut.code)}.",
            module=cut.module,
            tensor=name,
            evidence=evidence,
        )
    if cut.op == "checkpoint":
        return Told(
            name="CKPT_NO_INPUT_GRAD",
            message=f"{loss} has no graph, since a reentrant checkpoint{line} gets no input that requires a gradient.",
            cause="A reentrant checkpoint looks at its inputs alone; the parameters inside of it get no gradient.",
            fix=f"{cut.code.replace('use_reentrant=True', 'use_reentrant=False')}"
            if "use_reentrant=True" in cut.code
            else "checkpoint(..., use_reentrant=False)",
            module=cut.module,
            tensor=name,
            evidence=evidence,
        )
    instead = _INSTEAD.get(cut.op, f"something that can be differentiated instead of {cut.op}")
    return Told(
        name="LOSS_NO_GRAD",
        message=f"{loss} has no graph: {cut.op} in {quoted(cut.code)}{line} takes "
        f"{quoted(cut.of) or 'its value'} out of it.",
        cause=f"The result of {cut.op} can't be differentiated, and nothing else in {loss} depends on a parameter.",
        fix=f"Use {instead.format(of=cut.of or 'scores')}.",
        module=cut.module,
        tensor=cut.of or name,
        evidence=evidence,
    )


def _called_without(live: Live) -> bool:
    """Whether no forward since the last step was called with gradients on."""
    grads: list[bool] = []
    for fact in live.facts():
        if isinstance(fact, Forward):
            grads.append(fact.grad)
        elif isinstance(fact, Stepped):
            grads.clear()
    return bool(grads) and not any(grads)


def _switched_off(live: Live, loss: str) -> Told:
    found = ("", 0, "")
    for frame in live.users:
        source = live.source(frame)
        for node in () if source is None else ast.walk(source.tree):
            if called(node) not in _OFF or not isinstance(node, ast.Call) or found[1]:
                continue
            if torch.is_grad_enabled() or called(node) != "set_grad_enabled" or "False" in ast.unparse(node):
                found = (frame.file, node.lineno, source.text(node.lineno)) if source else found
    mode = "inference mode" if torch.is_inference_mode_enabled() else "gradients off"
    when = "was switched off in the forward" if torch.is_grad_enabled() else f"is switched off ({mode})"
    return Told(
        name="NO_GRAD_ACTIVE",
        message=f"{loss} has no graph, since autograd {when}"
        f"{f' by {quoted(found[2])} in line {found[1]}' if found[1] else ''}.",
        cause="While autograd is off no graph is recorded.",
        fix="torch.set_grad_enabled(True) before the forward that is trained.",
        evidence=origin(*found),
    )


def _cuts(live: Live, frame: Frame, loss: str) -> Iterator[Cut]:
    """Lines that the loss's value went through and that end a graph, the last first."""
    source = live.source(frame)
    statement = live.statement(frame)
    if source is None or statement is None:
        return
    needed = {loss.split(".")[0]} if loss else set()
    for node in ast.walk(statement):
        if called(node) == "backward" and isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            needed |= {path.split(".")[0] for path in loads(node.func.value)}
            yield from _in_value(live, node.func.value, source, frame, frame, set())
    yield from _slice(live, source, source.function(frame.line), frame.line, needed, frame, None, set())


def _slice(
    live: Live, source: Source, scope: ast.AST, line: int, needed: set[str], frame: Frame | None, owner: Any,
    seen: set[Any],
) -> Iterator[Cut]:  # fmt: skip
    """Goes up from a line through the assignments that what is needed comes from."""
    for statement in reversed([one for one in simple_statements(scope) if one.lineno <= line]):
        value = getattr(statement, "value", None)
        if isinstance(statement, ast.Return):
            needed = needed | {path.split(".")[0] for path in loads(value)} if owner is not None else needed
        elif not {path.split(".")[0] for path in targets(statement)} & needed or isinstance(statement, ast.For):
            continue
        else:
            needed = needed | {path.split(".")[0] for path in loads(value)}
        yield from _around(source, statement, live.module_name(owner))
        if value is not None:
            yield from _in_value(live, value, source, frame, owner, seen)


def _around(source: Source, statement: ast.stmt, module: str) -> Iterator[Cut]:
    """The blocks and decorators around a statement that switch autograd off."""
    for above in source.outer(statement):
        heads = [item.context_expr for item in above.items] if isinstance(above, ast.With) else []
        if isinstance(above, ast.FunctionDef):
            heads = above.decorator_list
        for head in heads:
            name = called(head) or path_of(head).rpartition(".")[2]
            if name in ("no_grad", "inference_mode") or (name == "set_grad_enabled" and "False" in ast.unparse(head)):
                code = source.lines[head.lineno - 1].strip()
                yield Cut(name, source.file, head.lineno, code, "", module, 2)
        if isinstance(above, ast.FunctionDef):
            return


def _in_value(
    live: Live, value: ast.AST, source: Source, frame: Frame | None, owner: Any, seen: set[Any]
) -> Iterator[Cut]:
    module = live.module_name(owner) if isinstance(owner, torch.nn.Module) else ""
    for node in ast.walk(value):
        op, of = _op(node)
        if op:
            known = None if frame is None or of is None else live.value(frame, of)
            if isinstance(known, torch.Tensor) and not known.requires_grad:
                continue
            text = "" if of is None else ast.unparse(of)
            sure = 2 if isinstance(known, torch.Tensor) and op != "requires_grad_" else 1 if known is None else 0
            code = source.text(node.lineno)  # type: ignore[attr-defined]
            yield Cut(op, source.file, node.lineno, code, text, module, sure)  # type: ignore[attr-defined]
        if isinstance(node, ast.Call) and len(seen) < 50:
            yield from _inside(live, node, frame, owner, seen)


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


def _inside(live: Live, node: ast.Call, frame: Frame | None, owner: Any, seen: set[Any]) -> Iterator[Cut]:
    """Cuts within what a call runs, where that is the user's."""
    path = path_of(node.func)
    target: Any = None
    if path.startswith("self.") and isinstance(owner, torch.nn.Module):
        target = dict(owner.named_modules()).get(path.removeprefix("self."))
    elif frame is not None:
        target = live.value(frame, node.func)
    modules = [target] if isinstance(target, torch.nn.Module) else []
    while modules and len(seen) < 50:
        module = modules.pop(0)
        found = forward_of(live, module)
        if found is not None and id(module) not in seen:
            seen.add(id(module))
            source, scope = found
            yield from _slice(live, source, scope, scope.end_lineno or 0, set(), None, module, seen)
        elif isinstance(module, torch.nn.Sequential | torch.nn.ModuleList):
            modules.extend(module)
    code = getattr(target, "__code__", None)
    if code is not None and whose(code.co_filename) == "user" and code not in seen:
        seen.add(code)
        source_ = live.source_of_file(code.co_filename)
        scope_ = None if source_ is None else source_.function(code.co_firstlineno)
        if source_ is not None and isinstance(scope_, ast.FunctionDef):
            yield from _slice(live, source_, scope_, scope_.end_lineno or 0, set(), None, target, seen)


@kind(r"^grad can be implicitly created only for scalar outputs")
def not_a_scalar(live: Live, _: Any) -> Told | None:
    """Tells the shape of a loss that is no scalar."""
    frame, losses = live.user, losses_of(live)
    if frame is None or not losses:
        return None
    loss = losses[0]
    name = next((path for path, one, _ in live.named() if one is loss), "loss")
    code = live.code(frame)
    better = code.replace(f"{name}.backward(", f"{name}.mean().backward(")
    return Told(
        name="LOSS_NOT_SCALAR",
        message=f"{quoted(name)} has the shape {list(loss.shape)}; a backward without a gradient needs one number.",
        cause='A loss with reduction="none", or several losses, were not made into one number.',
        fix=better if better != code else f"{name}.mean().backward()",
        tensor=f"{name} {list(loss.shape)}",
        evidence={"shape": list(loss.shape)},
    )
