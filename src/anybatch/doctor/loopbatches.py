"""A loop that adds up the gradients of several batches: what it does for each batch, and can't do once for several."""

import ast
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, TypeVar

import torch

from anybatch.doctor.crashing.usercode import SCOPES, called, names_in, nodes_in
from anybatch.doctor.fixes.source import UserSource
from anybatch.doctor.loopnames import inputs_of, root_of, stored
from anybatch.doctor.loopparts import StepUnclear, value_of

_Node = TypeVar("_Node", bound=ast.AST)
_LOGS = re.compile(r"print|info|debug|warning|log|report|record|write|display|set_(postfix|description)|add_.|append")
_VARIABLES = (ast.Name, ast.Attribute, ast.Subscript)
_OF_WEIGHTS = ("parameters", "named_parameters", "modules", "state_dict")
_UPDATED = (torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler, torch.amp.GradScaler, torch.nn.Parameter)


class BatchLoop(NamedTuple):
    """A loop over the batches of a loader that updates once every some of them."""

    source: UserSource
    back: ast.stmt  # the statement that goes back
    names: Mapping[str, Any]  # the variables at the first backward
    loop: ast.For
    loader: ast.expr
    target: ast.expr  # of what the loader yields
    counter: ast.expr | None  # the target of the number of the iteration
    start: int  # that of the first iteration
    update: ast.If
    batches: str  # the code of how many make an update
    many: int  # its value

    def number(self, node: ast.expr) -> float | None:
        """The value of an expression of numbers and names."""
        return number_of(self.source, node, self.names)

    def is_many(self, node: ast.expr) -> bool:
        """Whether an expression is the number of batches of an update."""
        return self.number(node) == self.many

    @property
    def item_names(self) -> set[str]:
        """The variables of a batch."""
        return {one.id for one in nodes_in(self.target, ast.Name)}

    @property
    def carried(self) -> set[str]:
        """The names that an iteration reads as the last one left them."""
        body = self.loop.body
        return (inputs_of(body) & stored(body)) - self.item_names

    def where(self, node: ast.AST) -> str:
        """The file and line of a node."""
        return f"{self.source.path}:{getattr(node, 'lineno', '?')}"

    def each(self, kind: type[_Node]) -> Iterator[_Node]:
        """The nodes of the loop that run for each batch, without functions that are defined in it."""
        for one in nodes_in(self.loop.body, kind):
            around = [one, *self.source.ancestors(one)]
            around = around[: around.index(self.loop)]
            if self.update not in around and not any(isinstance(outer, SCOPES) for outer in around):
                yield one

    def added(self, statement: ast.AST) -> tuple[ast.expr, ast.expr] | None:
        """The variable that an iteration adds something to, and what; ``None`` for another statement."""
        to: ast.expr
        if isinstance(statement, ast.AugAssign) and isinstance(statement.op, ast.Add | ast.Sub):
            to, value = statement.target, statement.value
        elif isinstance(statement, ast.Assign) and isinstance(new := statement.value, ast.BinOp):
            if self.source.of(statement.targets[0]) != self.source.of(new.left) or not isinstance(new.op, ast.Add):
                return None
            to, value = statement.targets[0], new.right
        else:
            return None
        text = self.source.of(to)
        others = (other for one in self.each(ast.Assign) if one is not statement for other in one.targets)
        is_carried = root_of(to) in self.carried and not any(self.source.of(other) == text for other in others)
        return (to, value) if is_carried else None


def number_of(source: UserSource, node: ast.expr, names: Mapping[str, Any]) -> float | None:
    """The value of an expression of numbers and of names with attributes; ``None`` if it is no finite number."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div | ast.Mult):
        left, right = (number_of(source, one, names) for one in (node.left, node.right))
        if left is None or right is None or (isinstance(node.op, ast.Div) and not right):
            return None
        return left / right if isinstance(node.op, ast.Div) else left * right
    value: object = node.value if isinstance(node, ast.Constant) else value_of(source.of(node), names)
    return value if isinstance(value, int | float) and math.isfinite(value) else None


def check_each(found: BatchLoop) -> None:
    """Refuses what a loop does for each batch, and can't do once for several.

    Raises:
        StepUnclear: there is such a statement.
    """
    _check_backwards(found)
    for one in found.each(ast.stmt):
        if isinstance(one, ast.Assign | ast.AugAssign | ast.AnnAssign):
            _check_carried(found, one)
        elif isinstance(one, ast.Expr) and isinstance(one.value, ast.Call):
            _check_call(found, one.value)
        elif isinstance(one, ast.Break):
            _check_break(found, one)
    changed = names_in([ast.parse(found.batches)]) & stored([found.loop])
    if changed - {"self"}:
        raise StepUnclear(
            f"{found.where(found.loop)} changes {min(changed)!r}, the number of batches of an update, while it runs; "
            "set it before the loop"
        )


def _check_backwards(found: BatchLoop) -> None:
    calls = found.source.calls(found.loop, "backward")
    others = [str(one.lineno) for one in calls if found.source.around(one) is not found.back]
    if others:
        raise StepUnclear(
            f"{found.where(found.back)} adds up the gradients of several batches, and so does line {others[0]}; where "
            "both are of one update, go back once, by the sum of the losses; where each has an optimizer of its own, "
            f"as in a GAN, iterate over anybatch.windows(loader, batches={found.batches}), and make a TrainStep of each"
        )


def _check_carried(found: BatchLoop, one: ast.Assign | ast.AugAssign | ast.AnnAssign) -> None:
    """Refuses a value that is made of that of the last batch, such as a running mean."""
    source, value = found.source, one.value
    if value is None or found.added(one) is not None:
        return
    read = {source.of(node) for node in nodes_in(value, ast.expr) if isinstance(node, _VARIABLES)}
    targets = one.targets if isinstance(one, ast.Assign) else [one.target]
    for part in (part for to in targets for part in (to.elts if isinstance(to, ast.Tuple) else [to])):
        text = source.of(part)
        _check_update(found, one, part)
        earlier = (to for other in found.each(ast.Assign) if other.lineno < one.lineno for to in other.targets)
        is_own = isinstance(one, ast.AugAssign) or text in read
        if is_own and root_of(part) in found.carried and not any(source.of(to) == text for to in earlier):
            raise StepUnclear(
                f"{found.where(one)} makes {text!r} of what it was for the batch before, and an iteration over "
                "anybatch.windows has several batches; make it of a sum and a number of batches, or change it with "
                f"each update, in the if of line {found.update.lineno}"
            )


def _check_update(found: BatchLoop, one: ast.stmt, part: ast.expr) -> None:
    """Refuses a change of gradients, or of a learning rate where it is not that of the update that follows."""
    if isinstance(part, ast.Name):
        return
    root = root_of(part)
    loops = [outer for outer in found.source.ancestors(one) if isinstance(outer, ast.For) and outer is not found.loop]
    held = [each.iter for each in loops if root in names_in([each.target])] + [part]
    is_of_update = any(_is_updated(found, node) for each in held for node in nodes_in(each, ast.expr)
                       if isinstance(node, ast.Name | ast.Attribute))  # fmt: skip
    is_late = isinstance(one, ast.AugAssign) or one.lineno > found.update.lineno
    if root != "self" and is_of_update and (is_late or getattr(part, "attr", "") == "grad"):
        raise StepUnclear(
            f"{found.where(one)} changes {found.source.of(part)} for each batch, and an iteration over "
            f"anybatch.windows is one update of {found.many}; put it into the if of the update, line "
            f"{found.update.lineno}"
        )


def _check_call(found: BatchLoop, call: ast.Call) -> None:
    """Refuses a call for each batch that may change what is trained, or how."""
    name, source = called(call), found.source
    if source.around(call) is found.back or _LOGS.match(name) or name in ("train", "eval", "requires_grad_"):
        return
    around = [one for one in source.ancestors(call) if isinstance(one, ast.If) and found.loop in source.ancestors(one)]
    if any(counts_in(found, one.test) for one in around):
        return
    if name == "zero_grad":
        raise StepUnclear(
            f"{found.where(call)} clears the gradients for each batch, so that the update in line "
            f"{found.update.lineno} has only those of the last one; where it is to have those of {found.many} batches, "
            f"clear them in its if, behind the update"
        )
    loops = [one.iter for one in source.ancestors(call) if isinstance(one, ast.For) and one is not found.loop
             and found.loop in source.ancestors(one)]  # fmt: skip
    acts_on = [call.func.value if isinstance(call.func, ast.Attribute) else call.func, *call.args]
    acts_on += [one.value for one in call.keywords] + (loops if name.endswith("_") else [])
    in_place = name.endswith("_") and root_of(call.func) in found.carried
    if in_place or any(_is_updated(found, part) for one in acts_on for part in _parts(one)):
        raise StepUnclear(
            f"{found.where(call)} calls {source.of(call.func)} for each batch, and an iteration over anybatch.windows "
            f"is one update of {found.many}; put it into the if of the update, line {found.update.lineno}, and where "
            "it counts batches, as a schedule may, have it count updates"
        )


def _parts(node: ast.expr) -> Iterator[ast.expr]:
    """What a call is given as it is, or the weights of: ``model``, ``model.parameters()``."""
    if isinstance(node, ast.Name | ast.Attribute):
        yield node
    elif isinstance(node, ast.Call) and called(node) in _OF_WEIGHTS and isinstance(node.func, ast.Attribute):
        yield node.func.value
    elif isinstance(node, ast.Call) and called(node) in ("zip", "list", "enumerate"):
        for one in node.args:
            yield from _parts(one)


def _is_updated(found: BatchLoop, node: ast.expr) -> bool:
    """Whether an expression is what is trained, or takes part in an update, or holds such a thing."""
    value = value_of(found.source.of(node), found.names)
    held = [] if isinstance(value, torch.nn.Module | type) else list(getattr(value, "__dict__", {}).values())
    return any(
        isinstance(one, _UPDATED) or (isinstance(one, torch.nn.Module) and any(True for _ in one.parameters()))
        for one in (value, *held)
    )


def _check_break(found: BatchLoop, one: ast.Break) -> None:
    """Refuses to leave a loop between two updates, where an outer loop begins it again."""
    source = found.source
    loops = source.loops_around(one)
    if loops[0] is not found.loop or one.lineno < found.back.lineno or len(loops) < 2:
        return
    leaves: list[ast.stmt] = [one for one in nodes_in(loops[1], ast.Break) if source.loops_around(one)[0] is loops[1]]
    leaves += [node for node in nodes_in(loops[1], ast.Return) if found.loop not in source.ancestors(node)]
    if not leaves:
        raise StepUnclear(
            f"{found.where(one)} leaves the loop behind a batch that may be without an update, and line "
            f"{loops[1].lineno} begins it again; leave it in the if of the update, line {found.update.lineno}, and "
            "leave the outer loop, too"
        )


def counts_in(found: BatchLoop, node: ast.AST) -> list[ast.expr]:
    """Where an expression reads the number of the batch, or another number that each batch adds a constant to."""
    texts = counters_of(found)
    reads = (one for one in nodes_in(node, ast.expr) if isinstance(one, _VARIABLES) and isinstance(one.ctx, ast.Load))
    return [one for one in reads if found.source.of(one) in texts]


def changed_each(found: BatchLoop) -> frozenset[str]:
    """The variables that each batch finds as the last one left them."""
    texts = set(counters_of(found))
    for one in found.each(ast.stmt):
        targets = one.targets if isinstance(one, ast.Assign) else [one.target] if isinstance(one, ast.AugAssign) else []
        parts = (part for to in targets for part in (to.elts if isinstance(to, ast.Tuple) else [to]))
        texts |= {found.source.of(part) for part in parts if root_of(part) in found.carried}
        texts |= stored([one]) & found.carried if isinstance(one, ast.Expr) else set()
    return frozenset(texts)


def counters_of(found: BatchLoop) -> dict[str, ast.stmt | None]:
    """The variables that count batches, with the statement that adds 1; ``None`` for the number of the iteration."""
    texts: dict[str, ast.stmt | None] = {}
    for one in found.each(ast.stmt):
        is_sum = not isinstance(one, ast.AugAssign) or isinstance(one.op, ast.Add)
        if is_sum and (pair := found.added(one)) is not None and found.source.of(pair[1]) == "1":
            texts[found.source.of(pair[0])] = one
    if isinstance(found.counter, ast.Name):
        texts[found.counter.id] = None
    return texts
