"""Which backward came before, and what carries the graph of an earlier step into this one."""

import ast
import inspect
import re
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch

from anybatch.doctor.crashes import Answer, answer, quoted, shape
from anybatch.doctor.crashing.live import Live, attributes, tensors_in, whose
from anybatch.doctor.crashing.usercode import (
    Carried,
    Source,
    called,
    carried,
    loads,
    nodes_in,
    path_of,
    simple_statements,
    targets,
)
from anybatch.doctor.graphs import leaf_of, nodes_behind


class Kept(NamedTuple):
    """A value that brings an old graph along."""

    path: str  # the user's name of it
    value: Any  # what it holds
    file: str  # where it is read
    line: int  # of that
    module: str = ""  # that keeps it, if one does
    again: bool = True  # whether it is made again in each round; otherwise it was made once, before the loop
    weight: int = 0  # the heavier, the surer

    @property
    def detached(self) -> str:
        """Code that cuts the old graph off."""
        path, value = self.path, self.value
        if isinstance(value, torch.Tensor):
            return f"{path} = {path}.detach()"
        if isinstance(value, dict):
            return f"{path} = {{key: part.detach() for key, part in {path}.items()}}"
        parts = f"part.detach() for part in {path}"
        return f"{path} = [{parts}]" if isinstance(value, list) else f"{path} = tuple({parts})"


def losses_of(live: Live) -> list[torch.Tensor]:
    """The tensors whose backward failed."""
    found = live.local("_engine_run_backward", "t_outputs") or live.local("backward", "tensors")
    found = (found,) if isinstance(found, torch.Tensor) else found or ()
    return [one for one in (*found, live.local("backward", "self")) if isinstance(one, torch.Tensor)]


def loss_name(live: Live, losses: list[torch.Tensor]) -> str:
    """The user's name of the tensor whose backward failed; empty if it has none."""
    return next((path for path, one, _ in live.named() if any(one is loss for loss in losses)), "")


def graph_of(tensors: Iterable[torch.Tensor]) -> set[Any]:
    """The nodes behind some tensors, without the leaves, which all steps share."""
    return {node for node in nodes_behind(tensors) if leaf_of(node) is None}


def with_graph(value: Any) -> list[torch.Tensor]:
    """The tensors in a value that have a graph."""
    return [tensor for _, tensor in tensors_in("value", value) if tensor.grad_fn is not None]


def kept_over(live: Live, losses: list[torch.Tensor]) -> list[Kept]:
    """What brings the graph of an earlier step into that of some losses, the surest first."""
    nodes = graph_of(losses)
    found = [*_in_modules(live, nodes), *_in_loops(live, nodes, losses)]
    return sorted(found, key=lambda one: -one.weight)


def _in_loops(live: Live, nodes: set[Any], losses: list[torch.Tensor]) -> Iterator[Kept]:
    for depth, frame in enumerate(reversed(live.users)):
        source = live.source(frame)
        for loop in () if source is None else source.loops(frame.line):
            for one in carried(loop):
                value = live.read(one.path, frame)
                weight = _weight(one, value, nodes, losses)
                if weight is not None:
                    yield Kept(one.path, value, frame.file, one.line, "", bool(one.stored), weight - depth)


def _weight(one: Carried, value: Any, nodes: set[Any], losses: list[torch.Tensor]) -> int | None:
    """How sure it is that a name brings an old graph along, ``None`` if it does not."""
    tensors = [] if isinstance(value, torch.nn.Module) else with_graph(value)
    inside = any(tensor.grad_fn in nodes for tensor in tensors)
    if not tensors or not one.stored:
        return 30 if inside else None
    is_loss = any(tensor is loss for tensor in tensors for loss in losses)
    behind = graph_of(tensors)
    sums_up = one.added and not is_loss and any(loss.grad_fn in behind for loss in losses)
    if sums_up or not (inside or behind & nodes):
        return None
    return 40 + 20 * one.own + 10 * inside - 15 * one.added


def _in_modules(live: Live, nodes: set[Any]) -> Iterator[Kept]:
    """Attributes of modules and of the user's objects that a method reads before it makes them anew."""
    owners: dict[int, Any] = {id(one): one for one in live.modules()}
    owners |= {id(frame.values["self"]): frame.values["self"] for frame in live.users if "self" in frame.values}
    for owner in owners.values():
        for name, value in attributes(owner) if not isinstance(owner, torch.Tensor) else ():
            tensors = with_graph(value)
            if tensors and (any(one.grad_fn in nodes for one in tensors) or graph_of(tensors) & nodes):
                file, line = _where_read(live, owner, f"self.{name}")
                if line:
                    keeper = live.module_name(owner) or type(owner).__name__
                    yield Kept(f"self.{name}", value, file, line, keeper, True, 70)


def _where_read(live: Live, owner: Any, path: str) -> tuple[str, int]:
    """Where a method of the user's reads an attribute of itself that an earlier call has left there."""
    for cls in type(owner).__mro__:
        for method in vars(cls).values():
            source, scope = function_of(live, method) if callable(method) else (None, None)
            if source is None or scope is None or scope.name == "__init__":
                continue
            named = (one for one in ast.walk(scope) if isinstance(one, ast.Name | ast.Attribute | ast.Subscript))
            reads = [one.lineno for one in named if path_of(one) == path and isinstance(one.ctx, ast.Load)]
            stores = [one.lineno for one in simple_statements(scope) if path in targets(one)]
            if reads and stores and min(reads) <= min(stores):
                return source.file, min(reads)
    return "", 0


def function_of(live: Live, function: Any) -> tuple[Source | None, ast.FunctionDef | None]:
    """The source of a function that is not torch's, below its decorators."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    source = live.source_of_file(code.co_filename) if code is not None and whose(code.co_filename) != "torch" else None
    if source is None or code is None:
        return None, None
    rows = enumerate(source.lines[code.co_firstlineno - 1 : code.co_firstlineno + 20])
    offset = next((number for number, row in rows if re.match(r"\s*(async\s+)?def\s", row)), 0)
    scope = source.function(code.co_firstlineno + offset)
    return (source, scope) if isinstance(scope, ast.FunctionDef) else (None, None)


def from_the_step_before(live: Live, match: "re.Match[str]") -> Answer | None:
    """A value that goes from one step into the next with its graph."""
    kept = kept_over(live, losses_of(live))
    return _of_kept(live, kept[0]) if kept and kept[0].again else None


def from_before_the_loop(live: Live, match: "re.Match[str]") -> Answer | None:
    """A value that was computed once, before the loop that uses it."""
    kept = kept_over(live, losses_of(live))
    return _of_kept(live, kept[0]) if kept and not kept[0].again else None


def _of_kept(live: Live, kept: Kept) -> Answer:
    first = next(iter(with_graph(kept.value)), None)
    at = live.at(kept.line, kept.file)
    made = "" if first is None or first.grad_fn is None else first.grad_fn.name()
    return answer(
        path=kept.path, of=f" of {kept.module}" if kept.module else "", reads=quoted(at[2]), detached=kept.detached,
        module=kept.module, tensor=f"{kept.path} {shape(first)}" if first is not None else kept.path, at=at,
        evidence={"made_by": made},
    )  # fmt: skip


def of_the_same_round(live: Live, match: "re.Match[str]") -> Answer | None:
    """The backward of the same round that freed what this one needs too, and what the two losses share."""
    frame, losses, here = live.user, losses_of(live), live.here()
    if frame is None or here is None:
        return None
    before = [
        (node.lineno, ast.unparse(node.func.value)) for node in nodes_in(live.round(), ast.Call)
        if called(node) == "backward" and isinstance(node.func, ast.Attribute) and node.lineno < frame.line
    ]  # fmt: skip
    if not before:
        return None
    line, first = before[-1]
    loss, nodes = loss_name(live, losses) or "the second loss", graph_of(losses)
    statements = live.scope()
    after = {path for one in statements if one.lineno > line for path in targets(one)}
    shared = next(
        (path for path, one, own in live.named() if own is frame and one.grad_fn in nodes and path not in after
         and not any(one is other for other in losses)), "",
    )  # fmt: skip
    change, at = _apart(live, statements, line, first, loss, shared)
    return answer(
        first=quoted(f"{first}.backward()"), line=line, loss=loss, change=change, tensor=shared, at=live.at(at),
        of=f", of {quoted(shared)}" if shared else "",
    )  # fmt: skip


def _apart(live: Live, statements: list[ast.stmt], line: int, first: str, loss: str, shared: str) -> tuple[str, int]:
    """How two losses of one graph are kept apart, and at which line."""
    here = live.user.line if live.user is not None else 0
    between = [one for one in statements if line < one.lineno < here]
    made = next((one for one in reversed(statements) if one.lineno <= line and first in targets(one)), None)
    later = [one for one in statements if line < one.lineno <= here and shared and shared in loads(one)]
    if first == loss:
        steps = False
    else:
        steps = any(called(node) == "step" for node in nodes_in(between, ast.Call))
    value = live.read(shared)
    behind = {id(leaf_of(node)) for node in nodes_behind([value] if shared else [])}
    if steps and later and any(behind & held for held in stepped_in(live, between).values()):
        # What the two have in common belongs to the step of the first loss, so that the second one takes it as given.
        return _with_detached(later[0], shared), later[0].lineno
    if steps and shared and made is not None and shared in loads(made):
        note = f"  # if {first} does not train what {shared} is computed from"
        return _with_detached(made, shared) + note, made.lineno
    if first == loss:
        return f"Call {loss}.backward() once in a step.", line
    if steps:
        return f"Compute {loss} after the step that follows {quoted(f'{first}.backward()')}, from a new forward.", line
    return (
        f"({first} + {loss}).backward() in place of the two calls; or {first}.backward(retain_graph=True) first",
        line,
    )


def _with_detached(statement: ast.stmt, name: str) -> str:
    return re.sub(rf"\b{re.escape(name)}\b", f"{name}.detach()", ast.unparse(statement))


def stepped_in(live: Live, statements: list[ast.stmt]) -> dict[str, set[int]]:
    """For each optimizer that steps in some lines, by its name there, the identities of its parameters."""
    found: dict[str, set[int]] = {}
    for node in nodes_in(statements, ast.Call):
        if called(node) == "step" and live.user is not None:
            owner = node.func.value if isinstance(node.func, ast.Attribute) else None
            for asked in (owner, *node.args):  # scaler.step(optimizer) too
                value = live.value(live.user, asked)
                if isinstance(value, torch.optim.Optimizer):
                    held = {id(one) for group in value.param_groups for one in group["params"]}
                    found[ast.unparse(asked) if asked is not None else ""] = held
    return found


def outside_of_closure(live: Live, match: "re.Match[str]") -> Answer | None:
    """A loss that is read in a function which is called again, and was computed outside of it."""
    frame, losses, here = live.user, losses_of(live), live.here()
    scope = here[0].function(here[1]) if here else None
    if frame is None or not isinstance(scope, ast.FunctionDef):
        return None
    held = [
        path for names in (frame.values, frame.names) for path, one in names.items() if any(one is x for x in losses)
    ]
    own = {argument.arg for argument in (*scope.args.args, *scope.args.kwonlyargs)}
    own |= {path for one in simple_statements(scope) for path in targets(one)}
    return answer(path=held[0], function=scope.name, tensor=held[0]) if held and held[0] not in own else None


def one_of_many(live: Live, match: "re.Match[str]") -> Answer | None:
    """A loss that is one of those which a loop goes through."""
    frame, losses, here = live.user, losses_of(live), live.here()
    for loop in here[0].loops(here[1]) if here else ():
        for name in targets(loop):
            if isinstance(loop, ast.For) and any(frame.values.get(name) is loss for loss in losses):  # type: ignore[union-attr]
                return answer(call=quoted(f"{name}.backward()"), many=ast.unparse(loop.iter), tensor=name)
    return None


def made_in_constructor(live: Live, match: "re.Match[str]") -> Answer | None:
    """A tensor of a module that its constructor computed from parameters, and that every forward uses."""
    nodes = graph_of(losses_of(live))
    for module in live.modules():
        for name, value in attributes(module):
            if isinstance(value, torch.Tensor) and value.grad_fn is not None and value.grad_fn in nodes:
                source, scope = function_of(live, type(module).__init__)
                stores = [one for one in simple_statements(scope) if f"self.{name}" in targets(one)] if scope else []
                owner = live.module_name(module) or type(module).__name__
                return answer(
                    path=f"self.{name}", owner=owner, module=owner, tensor=f"self.{name} {shape(value)}",
                    at=live.at(stores[0], source.file) if source is not None and stores else None,
                    evidence={"made_by": value.grad_fn.name()},
                )  # fmt: skip
    return None


def not_a_scalar(live: Live, match: "re.Match[str]") -> Answer | None:
    """The shape of a loss that is no scalar."""
    losses = losses_of(live)
    if live.user is None or not losses:
        return None
    loss, code = losses[0], live.code()
    name = loss_name(live, losses[:1]) or "loss"
    better = code.replace(f"{name}.backward(", f"{name}.mean().backward(")
    return answer(path=quoted(name), name=name, size=shape(loss), tensor=f"{name} {shape(loss)}",
                change=better if better != code else f"{name}.mean().backward()",
                evidence={"shape": list(loss.shape)})  # fmt: skip
