"""Crashes of a second backward: what carried the graph of an earlier step over, or what two losses share."""

import ast
import inspect
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from anybatch.doctor.crashing.crashkinds import Told, kind, origin, quoted, shape
from anybatch.doctor.crashing.crashlive import Frame, Live, attributes, tensors_in, whose
from anybatch.doctor.crashing.crashsource import Carried, called, carried, loads, path_of, simple_statements, targets
from anybatch.doctor.graphs import nodes_behind


class Kept(NamedTuple):
    """A value that brings an old graph along.

    Args:
        path: the user's name of it.
        value: what it holds.
        file: where it is read.
        line: of that.
        module: that keeps it, if one does.
        again: whether it is made again in each round; otherwise it was made once, before the loop.
        weight: the heavier, the surer.
    """

    path: str
    value: Any
    file: str
    line: int
    module: str = ""
    again: bool = True
    weight: int = 0


def losses_of(live: Live) -> list[torch.Tensor]:
    """The tensors whose backward failed."""
    found = live.local("_engine_run_backward", "t_outputs") or live.local("backward", "tensors")
    found = (found,) if isinstance(found, torch.Tensor) else found or ()
    own = live.local("backward", "self")
    return [one for one in (*found, own) if isinstance(one, torch.Tensor)]


def graph_of(tensors: list[torch.Tensor]) -> set[Any]:
    """The nodes behind some tensors, without the leaves, which all steps share."""
    return {node for node in nodes_behind(tensors) if not hasattr(type(node), "variable")}


def kept_over(live: Live, losses: list[torch.Tensor]) -> list[Kept]:
    """What brings the graph of an earlier step into that of some losses, the surest first."""
    nodes = graph_of(losses)
    found = [*_attributes_of_modules(live, nodes), *_names_in_loops(live, nodes, losses)]
    return sorted(found, key=lambda one: -one.weight)


def detached(kept: Kept) -> str:
    """Code that cuts the old graph off."""
    path, value = kept.path, kept.value
    if isinstance(value, torch.Tensor):
        return f"{path} = {path}.detach()"
    if isinstance(value, dict):
        return f"{path} = {{key: part.detach() for key, part in {path}.items()}}"
    if isinstance(value, list):
        return f"{path} = [part.detach() for part in {path}]"
    return f"{path} = tuple(part.detach() for part in {path})"


def _names_in_loops(live: Live, nodes: set[Any], losses: list[torch.Tensor]) -> Iterator[Kept]:
    for depth, frame in enumerate(reversed(live.users)):
        source = live.source(frame)
        for loop in () if source is None else source.loops(frame.line):
            for one in carried(loop):
                value = live.value(frame, ast.parse(one.path, mode="eval").body)
                weight = _weight(one, value, nodes, losses)
                if weight is not None:
                    yield Kept(one.path, value, frame.file, one.line, "", bool(one.stored), weight - depth)


def _weight(one: Carried, value: Any, nodes: set[Any], losses: list[torch.Tensor]) -> int | None:
    """How sure it is that a name brings an old graph along, ``None`` if it does not."""
    if isinstance(value, torch.nn.Module):
        return None
    tensors = [tensor for _, tensor in tensors_in("value", value) if tensor.grad_fn is not None]
    if not tensors:
        return None
    inside = any(tensor.grad_fn in nodes for tensor in tensors)
    is_loss = any(tensor is loss for tensor in tensors for loss in losses)
    if not one.stored:
        return 30 if inside else None
    behind = graph_of(tensors)
    sums_up = one.added and not is_loss and any(loss.grad_fn in behind for loss in losses)
    if sums_up or not (inside or behind & nodes):
        return None
    return 40 + 20 * one.own + 10 * inside - 15 * one.added


def _attributes_of_modules(live: Live, nodes: set[Any]) -> Iterator[Kept]:
    live.module_name(None)
    owners: dict[int, Any] = {id(one): one for root in live.roots.values() for one in root.modules()}
    owners |= {id(frame.values["self"]): frame.values["self"] for frame in live.users if "self" in frame.values}
    for module in owners.values():
        if not isinstance(module, torch.Tensor):
            for name, value in attributes(module):
                tensors = [tensor for _, tensor in tensors_in("value", value) if tensor.grad_fn is not None]
                if tensors and (any(t.grad_fn in nodes for t in tensors) or graph_of(tensors) & nodes):
                    file, line = where_read(live, module, name)
                    if not line:
                        continue
                    yield Kept(f"self.{name}", value, file, line, live.module_name(module) or type(module).__name__,
                               True, 70)  # fmt: skip


def where_read(live: Live, module: Any, name: str) -> tuple[str, int]:
    """Where a method of the user's reads an attribute of itself that an earlier call has left there."""
    path = f"self.{name}"
    for cls in type(module).__mro__:
        for method in vars(cls).values():
            code = getattr(inspect.unwrap(method), "__code__", None) if callable(method) else None
            if code is None or whose(code.co_filename) == "torch" or code.co_name == "__init__":
                continue
            source = live.source_of_file(code.co_filename)
            scope = None if source is None else source.function(code.co_firstlineno + 1)
            if source is None or not isinstance(scope, ast.FunctionDef):
                continue
            reads = [line for one in ast.walk(scope) if path_of(one) == path and (line := _read_at(one))]
            stores = [one.lineno for one in simple_statements(scope) if path in targets(one)]
            if reads and stores and min(reads) <= min(stores):
                return source.file, min(reads)
    return "", 0


def _read_at(node: Any) -> int:
    return node.lineno if isinstance(node.ctx, ast.Load) else 0


def backwards_before(live: Live, frame: Frame) -> list[tuple[int, str]]:
    """Lines and losses of the other calls of backward in the same round, before the one that failed."""
    source = live.source(frame)
    if source is None:
        return []
    loops = source.loops(frame.line)
    scope: ast.AST = loops[0] if loops else source.function(frame.line)
    found = []
    for statement in simple_statements(scope):
        for node in ast.walk(statement):
            if called(node) == "backward" and isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                found.append((node.lineno, ast.unparse(node.func.value)))
    return [one for one in found if one[0] < frame.line]


@kind(r"^Trying to backward through the graph a second time")
def second_backward(live: Live, _: Any) -> Told | None:
    """Tells which tensor of an earlier step is in the graph."""
    frame = live.user
    losses = losses_of(live)
    if frame is None:
        return None
    kept = kept_over(live, losses)
    before = backwards_before(live, frame)
    if kept:
        return _carried(live, kept[0])
    if before:
        return _same_step(live, frame, losses, before[-1])
    outside = _outside_function(live, frame, losses) or _one_of_many(live, frame, losses)
    if outside is not None:
        return outside
    once = _made_once(live, graph_of(losses))
    if once is not None:
        return once
    call = live.code(frame)
    return Told(
        name="BACKWARD_TWICE",
        message=f"{quoted(call) or 'This backward'} goes through a graph that an earlier backward has freed.",
        cause="A tensor that the loss is computed from was part of the graph of an earlier backward.",
        fix="Compute the loss anew before each backward, or detach() what is kept from before.",
    )


def _made_once(live: Live, nodes: set[Any]) -> Told | None:
    """A tensor of a module that its constructor computed from parameters, and that every forward uses."""
    for root in live.roots.values():
        for module in root.modules():
            for name, value in attributes(module):
                if not isinstance(value, torch.Tensor) or value.grad_fn not in nodes or value.grad_fn is None:
                    continue
                owner = live.module_name(module) or type(module).__name__
                code = getattr(inspect.unwrap(type(module).__init__), "__code__", None)
                source = live.source_of_file(code.co_filename) if code is not None else None
                scope = source.function(code.co_firstlineno + 1) if source is not None and code is not None else None
                stores = [one for one in simple_statements(scope) if f"self.{name}" in targets(one)] if scope else []
                text = source.text(stores[0].lineno) if source is not None and stores else ""
                place = origin(source.file, stores[0].lineno, text) if source is not None and stores else {}
                return Told(
                    name="BACKWARD_TWICE",
                    message=f"`self.{name}` of {owner} was computed once, in __init__, and its graph was freed by the "
                    "first backward; it is no parameter itself.",
                    cause="What is computed from a parameter is no leaf: parameters() does not give it, and each "
                    "forward has to compute it anew.",
                    fix=f"self.{name} = nn.Parameter(...)  # of the finished value; or compute it in forward",
                    module=owner,
                    tensor=f"self.{name} {shape(value)}",
                    evidence=place | {"made_by": value.grad_fn.name()},
                )
    return None


def _carried(live: Live, kept: Kept) -> Told:
    source = live.source_of_file(kept.file)
    code = source.text(kept.line) if source is not None else ""
    first = next((tensor for _, tensor in tensors_in(kept.path, kept.value) if tensor.grad_fn is not None), None)
    made = "" if first is None or first.grad_fn is None else first.grad_fn.name()
    tensor = f"{kept.path} {shape(first)}" if first is not None else kept.path
    owner = f" of {kept.module}" if kept.module else ""
    evidence = origin(kept.file, kept.line, code) | {"made_by": made}
    if not kept.again:
        return Told(
            name="BACKWARD_TWICE_STATE",
            message=f"{quoted(kept.path)} was computed once, before the loop, and its graph was freed by the first "
            f"backward; {quoted(code)} uses it in every round.",
            cause="A graph is freed by its backward, and this part of it is not computed again.",
            fix=f"Compute {kept.path} inside of the loop; or, if no gradient is to pass through it: "
            f"{detached(kept)} before the loop",
            tensor=tensor,
            evidence=evidence,
        )
    return Told(
        name="BACKWARD_TWICE_STATE",
        message=f"{quoted(kept.path)}{owner} still has the graph of the step before, which that step's backward freed.",
        cause=f"The value of {kept.path} goes from one step into the next with its graph, so that this backward "
        f"reaches back into the step before. retain_graph=True would only hide it, and memory would grow.",
        fix=f"{detached(kept)}  # before {quoted(code)}",
        module=kept.module,
        tensor=tensor,
        evidence=evidence,
    )


def _one_of_many(live: Live, frame: Frame, losses: list[torch.Tensor]) -> Told | None:
    """A loss that is one of those which a loop goes through."""
    source = live.source(frame)
    for loop in () if source is None else source.loops(frame.line):
        for name in targets(loop):
            if any(frame.values.get(name) is loss for loss in losses) and isinstance(loop, ast.For):
                many = ast.unparse(loop.iter)
                return Told(
                    name="BACKWARD_TWICE",
                    message=f"{quoted(f'{name}.backward()')} of an earlier one of {quoted(many)} freed the graph that "
                    "this one shares with it.",
                    cause="The losses are of one forward, and have a graph in common.",
                    fix=f"sum({many}).backward() in place of the loop",
                    tensor=name,
                )
    return None


def _outside_function(live: Live, frame: Frame, losses: list[torch.Tensor]) -> Told | None:
    """A loss that is read in a function which is called again, and was computed outside of it."""
    source = live.source(frame)
    scope = None if source is None else source.function(frame.line)
    if source is None or not isinstance(scope, ast.FunctionDef):
        return None
    name = next((p for p, one in frame.values.items() if any(one is loss for loss in losses)), "")
    name = name or next((p for p, one in frame.names.items() if any(one is loss for loss in losses)), "")
    given = {argument.arg for argument in (*scope.args.args, *scope.args.kwonlyargs)}
    if not name or name in given or any(name in targets(one) for one in simple_statements(scope)):
        return None
    return Told(
        name="BACKWARD_TWICE_STATE",
        message=f"{quoted(name)} was computed once, outside of {scope.name}, and the first call of {scope.name} freed "
        "its graph.",
        cause=f"{scope.name} is called several times, as LBFGS calls its closure, and must compute the loss each time.",
        fix=f"Compute {name} inside of {scope.name}.",
        tensor=name,
    )


def _same_step(live: Live, frame: Frame, losses: list[torch.Tensor], before: tuple[int, str]) -> Told:
    nodes = graph_of(losses)
    loss = next((path for path, one, _ in live.named() if any(one is other for other in losses)), "the second loss")
    shared = next(
        (p for p, one, f in live.named() if f is frame and one.grad_fn in nodes and not any(one is x for x in losses)
         and p not in _assigned_after(live, frame, before[0])), "",
    )  # fmt: skip
    line, first = before
    at, source = line, live.source(frame)
    statements = [] if source is None else simple_statements(source.function(frame.line))
    between = [one for one in statements if line < one.lineno < frame.line]
    made = next((one for one in reversed(statements) if one.lineno <= line and first in targets(one)), None)
    steps = any(called(node) == "step" for one in between for node in ast.walk(one))
    later = [one for one in statements if line < one.lineno <= frame.line and shared and shared in loads(one)]
    if steps and shared and later and _trains(live, frame, between, shared):
        # What the two have in common belongs to the step of the first loss, so that the second one takes it as given.
        fix, at = _with_detached(later[0], shared), later[0].lineno
    elif steps and shared and made is not None and shared in loads(made):
        fix = _with_detached(made, shared)
        fix += f"  # if {first} does not train what {shared} is computed from"
        at = made.lineno
    elif first == loss:
        fix = f"Call {loss}.backward() once in a step."
    elif steps:
        fix = f"Compute {loss} after the step that follows {quoted(f'{first}.backward()')}, from a new forward."
    else:
        fix = f"({first} + {loss}).backward() in place of the two calls; or {first}.backward(retain_graph=True) first"
    return Told(
        name="BACKWARD_TWICE",
        message=f"{quoted(f'{first}.backward()')} in line {line} freed the graph that {loss} shares with it"
        f"{f', of {quoted(shared)}' if shared else ''}.",
        cause="Two losses of one forward have a graph in common; the first backward frees it.",
        fix=fix,
        tensor=shared,
        evidence=origin(frame.file, at, "" if source is None else source.text(at)),
    )


def _with_detached(statement: ast.stmt, name: str) -> str:
    return re.sub(rf"\b{re.escape(name)}\b", f"{name}.detach()", ast.unparse(statement))


def _trains(live: Live, frame: Frame, statements: list[ast.stmt], name: str) -> bool:
    """Whether an optimizer that steps in some lines holds parameters that a tensor is computed from."""
    value = live.value(frame, ast.parse(name, mode="eval").body)
    if not isinstance(value, torch.Tensor):
        return False
    behind = {id(node.variable) for node in nodes_behind([value]) if hasattr(type(node), "variable")}
    return any(behind & held for held in stepped_in(live, frame, statements).values())


def stepped_in(live: Live, frame: Frame, statements: list[ast.stmt]) -> dict[str, set[int]]:
    """For each optimizer that steps in some lines, by its name there, the identities of its parameters."""
    found: dict[str, set[int]] = {}
    for node in (node for one in statements for node in ast.walk(one)):
        if called(node) == "step" and isinstance(node, ast.Call):
            owner = node.func.value if isinstance(node.func, ast.Attribute) else None
            for asked in (owner, *node.args):  # scaler.step(optimizer) too
                value = live.value(frame, asked)
                if isinstance(value, torch.optim.Optimizer):
                    held = {id(one) for group in value.param_groups for one in group["params"]}
                    found[ast.unparse(asked) if asked is not None else ""] = held
    return found


def _assigned_after(live: Live, frame: Frame, line: int) -> set[str]:
    source = live.source(frame)
    statements = () if source is None else simple_statements(source.function(frame.line))
    return {path for statement in statements if statement.lineno > line for path in targets(statement)}
