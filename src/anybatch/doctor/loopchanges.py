"""The lines of a plain loop that change so that anybatch takes its step."""

import ast
import types
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from anybatch.doctor.crashing.usercode import LOOPS, SCOPES, called, names_in, nodes_in
from anybatch.doctor.fixes.source import Change, Edit, UnclearEdit
from anybatch.doctor.loopsteps import LoopStep, StepUnclear, inputs_of, read, rows_of, stored, value_of

_SUMS = ("AddBackward0", "SubBackward0", "NegBackward0")
_MOST_NODES = 1000
_HARMLESS = ("print", "append", "item")
_LOOKS = (*_HARMLESS, "len", "size", "numel", "detach", "cpu", "float", "int")
_LEAVES = (ast.Return, ast.Break, ast.Continue)
_ORDERS = (ast.Lt, ast.LtE, ast.Gt, ast.GtE)
_DECIDES = ("item", "any", "all", "isnan", "isfinite", "isinf")
_ONE_OF_TWO = ("MulBackward0", "DivBackward0")  # the other one is a factor


@dataclass(slots=True)
class Update:
    """The statements around a backward that make one update, which a ``TrainStep`` can replace."""

    optimizer: str  # what the loop calls it
    statements: list[ast.stmt]  # that go: those that clear, clip, unscale and step
    clip: str = ""  # the text of what the gradient is clipped to; empty without


def update_of(step: LoopStep) -> Update | None:
    """The update of a loop, if its block clears once, goes back once, steps once and clips at most once."""
    block = step.source.block(step.back)
    found = {one: kind for one in block if (kind := _kind(step, one))}
    kinds = list(found.values())
    steps = [one for one, kind in found.items() if kind == "step"]
    if not step.loops or len(steps) != 1 or "clear" not in kinds or kinds.count("clip") > 1:
        return None
    if steps[0].lineno < step.back.lineno:
        return None
    between = block[block.index(step.back) + 1 : block.index(steps[0])]
    optimizer = _receiver(step, steps[0])
    names = {text.partition(".")[0] for text in (*step.modules, optimizer)}
    others = [one for one in between if one not in found]
    if any(read([one]) & names or ".grad" in step.source.of(one) or not _may_wait(step, one) for one in others):
        return None
    updates = [one for one in step.source.calls(step.loops[0], "step") if _is_optimizer(step, one)]
    goes_back = step.source.calls(step.loops[0], "backward")
    home = home_of(step, optimizer)
    if len(updates) > 1 or len(goes_back) > 1 or home is None:
        return None
    if any(_before_step_only(step, one, optimizer) for one in run_behind(step).statements):
        return None
    clips = [one for one, kind in found.items() if kind == "clip"]
    limit = _limit(step, clips[0]) if clips else ""
    if limit and (names_in(ast.parse(limit)) & stored([home]) or any(nodes_in(ast.parse(limit), ast.Call))):
        return None  # it may be another one in each step
    return Update(optimizer, list(found), limit)


class Behind(NamedTuple):
    """What stands between a forward and its backward, and has to run after both, in its order."""

    statements: list[ast.stmt]
    changes: bool  # whether one of them changes what the forward reads


def run_behind(step: LoopStep) -> Behind:
    """The statements that read what the forward gives or change what it reads, and those that depend on them."""
    block, found, changes = step.source.block(step.back), list[ast.stmt](), False
    if not step.forward or step.forward[0] not in block:
        return Behind(found, changes)
    made, needed = stored(step.forward), inputs_of([*step.forward, step.loss])
    for one in block[block.index(step.forward[0]) : block.index(step.back)]:
        if one in step.forward or _kind(step, one) == "clear" or (_clears(one) and not read([one]) & made):
            continue
        acts = any(called(call) not in _LOOKS for call in nodes_in(one, ast.Call))
        own = stored([one]) & needed | ({name for name in read([one]) & needed if acts and _is_object(step, name)})
        if own or read([one]) & made or stored([one]) & made:
            changes |= bool(own)
            found.append(one)
            made |= stored([one])
            needed |= read([one]) if own else set()
    return Behind(found, changes)


def _is_object(step: LoopStep, name: str) -> bool:
    """Whether a call may change what a name stands for, as an update of a teacher does."""
    value = step.names.get(name)
    known = (torch.Tensor, str, int, float, complex, list, tuple, dict, types.ModuleType, torch.device, torch.dtype)
    return isinstance(value, torch.nn.Module) or not (value is None or callable(value) or isinstance(value, known))


def _clears(statement: ast.stmt) -> bool:
    """Whether a statement clears gradients, in any form."""
    stores = (one for one in nodes_in(statement, ast.Attribute) if isinstance(one.ctx, ast.Store))
    calls = (called(one) for one in nodes_in(statement, ast.Call))
    return any(one.attr == "grad" for one in stores) or "zero_grad" in calls


def _before_step_only(step: LoopStep, statement: ast.stmt, optimizer: str) -> bool:
    """Whether a statement may not run after the update: it can leave the loop, or knows the model or the optimizer."""
    held = {*step.modules, optimizer}
    roots = {text.partition(".")[0] for text in held}
    for node in ast.walk(statement):
        if isinstance(node, (*_LEAVES, ast.Raise, ast.Assert)) or called(node) == "step":
            return True
        if isinstance(node, ast.Subscript | ast.Attribute) and isinstance(node.ctx, ast.Store):
            return True  # such as a learning rate
        if isinstance(node, ast.Name | ast.Attribute) and step.source.of(node) in held:
            return True
        if isinstance(node, ast.Name) and node.id in roots:
            outer = step.source.parent(node)
            call = step.source.parent(outer) if isinstance(outer, ast.Attribute) else None
            if not isinstance(outer, ast.Attribute) or (isinstance(call, ast.Call) and call.func is outer):
                return True  # log(self), self.log()
    return False


def _check_behind(step: LoopStep) -> None:
    """Refuses what would be another training once it runs behind the backward."""
    block, made = step.source.block(step.back), stored(step.forward)
    for one in run_behind(step).statements:
        later = [other for other in step.forward if other.lineno > one.lineno]
        again = read([one]) & stored(later)
        if again:
            raise StepUnclear(
                f"{step.where(one)} reads {min(again)!r} before the forward gives it another value; give the two "
                "values different names"
            )
        leaving = next((node for node in ast.walk(one) if isinstance(node, _LEAVES)), None)
        if leaving is not None and not any(_clears(other) for other in block[: block.index(step.back)]):
            raise StepUnclear(
                f"{step.where(leaving)} may leave out the backward by what the forward gave, and anybatch runs both; "
                "call zero_grad() at the start of each iteration, so that it may leave out the optimizer's step instead"
            )
        if _clears(one):
            raise StepUnclear(
                f"{step.where(one)} clears gradients by what the forward gave, and anybatch runs it with the backward; "
                "call zero_grad() at the start of each iteration"
            )
    for node in nodes_in(step.forward, ast.AST):
        if isinstance(node, ast.If | ast.While | ast.IfExp) and _decides(step, node.test, made):
            raise StepUnclear(
                f"{step.where(node)} decides by values of the batch, as each micro-batch would for itself; decide for "
                "each sample, as by torch.where, or before the forward"
            )


def _decides(step: LoopStep, test: ast.expr, made: set[str]) -> bool:
    """Whether a condition is about the values that a forward gives, and not about their shapes."""
    for node in ast.walk(test):
        is_order = isinstance(node, ast.Compare) and any(isinstance(one, _ORDERS) for one in node.ops)
        if not (is_order or called(node) in _DECIDES) or not read([node]) & made:
            continue
        sides: list[ast.AST] = [node.left, *node.comparators] if isinstance(node, ast.Compare) else [node]
        if any(read([one]) & made and not _is_shape(one) for one in sides):
            return True
    return False


def _is_shape(node: ast.AST) -> bool:
    attributes = {one.attr for one in nodes_in(node, ast.Attribute)}
    return bool(attributes & {"shape", "ndim", "dim", "size", "numel"}) or "len" in map(called, ast.walk(node))


def _may_wait(step: LoopStep, statement: ast.stmt) -> bool:
    """Whether a statement between the backward and the step certainly does the same behind the step."""
    if not isinstance(statement, ast.Assign | ast.AnnAssign | ast.AugAssign | ast.Expr | ast.Pass):
        return False
    changed = [one for one in nodes_in(statement, ast.expr) if isinstance(getattr(one, "ctx", None), ast.Store)]
    if not all(isinstance(one, ast.Name | ast.Tuple) for one in changed):
        return False
    if isinstance(statement, ast.AugAssign) and _is_tensor(step, statement.target):
        return False
    return all(called(one) in _HARMLESS for one in nodes_in(statement, ast.Call))


def _is_tensor(step: LoopStep, node: ast.expr) -> bool:
    return isinstance(value_of(step.source.of(node), step.names), torch.Tensor)


def _call(statement: ast.stmt) -> ast.Call | None:
    return statement.value if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call) else None


def _kind(step: LoopStep, statement: ast.stmt) -> str:
    """What a statement does in an update; empty if it is no part of one."""
    call = _call(statement)
    if call is None or not isinstance(call.func, ast.Attribute | ast.Name):
        return ""
    name = called(call)
    if name == "zero_grad":
        return "clear"
    if name == "step" and _is_optimizer(step, call):
        return "step"
    if name in ("unscale_", "update") and step.scaler and step.source.of(call.func).startswith(f"{step.scaler}."):
        return "scale"
    return "clip" if name == "clip_grad_norm_" and _limit(step, statement) else ""


def _is_optimizer(step: LoopStep, call: ast.Call) -> bool:
    if not isinstance(call.func, ast.Attribute):
        return False
    if step.scaler and step.source.of(call.func.value) == step.scaler:
        return len(call.args) == 1 and not call.keywords
    value = value_of(step.source.of(call.func.value), step.names)
    return isinstance(value, torch.optim.Optimizer) and not call.args and not call.keywords


def _receiver(step: LoopStep, statement: ast.stmt) -> str:
    """The optimizer of a statement that steps, as the loop calls it."""
    call = _call(statement)
    if call is None or not isinstance(call.func, ast.Attribute):
        return ""
    return step.source.of(call.args[0] if call.args else call.func.value)


def _limit(step: LoopStep, statement: ast.stmt) -> str:
    """What all of the model's gradient is clipped to; empty if it is clipped in another way."""
    call = _call(statement)
    if call is None or not call.args or step.source.of(call.args[0]) != f"{step.model_text}.parameters()":
        return ""
    given = [*call.args[1:], *(one.value for one in call.keywords if one.arg == "max_norm")]
    return step.source.of(given[0]) if len(given) == 1 and len(call.args) + len(call.keywords) == 2 else ""


def home_of(step: LoopStep, *texts: str) -> ast.stmt | None:
    """The outermost loop before which the modules and other variables already exist; ``None`` if there is none."""
    roots = {text.partition(".")[0] for text in (*texts, *step.modules)}
    home = None
    for loop in step.loops:
        if stored([loop]) & roots:
            break
        home = loop
    return home


def change_of(step: LoopStep, update: Update | None, budget: str, plan: str) -> Edit:
    """The edit of a loop's file; without an ``Update`` the loop keeps its own, and calls ``anybatch.backward``.

    ``budget`` are the arguments of a ``TrainStep`` that say how to split, ``plan`` those of ``anybatch.backward``.
    """
    rows = results_of(step)
    taken = set(step.names) | stored([step.source.tree])
    function, result, stepper = (_free(taken, one) for one in ("loss_fn", "result", "step"))
    text = step.loss_text(function, rows)
    if update is None:
        scaler = f", scaler={step.scaler}" if step.scaler else ""
        size = f", {plan}" if plan else ""
        call = f"anybatch.backward({step.model_text}, {function}, {step.batch_text}{size}{scaler})"
    else:
        options = [one for one in (budget, update.clip and f"clip_norm={update.clip}") if one]
        options += [f"scaler={step.scaler}"] if step.scaler else []
        made = f"anybatch.TrainStep({step.model_text}, {', '.join([function, update.optimizer, *options])})"
        text += f"\n\n{stepper} = {made}"
        call = f"{stepper}({step.batch_text})"
    after = [
        f'{name} = {result}.metrics["{name}"]' if name == text else f'{name} = torch.tensor({result}.metrics["{name}"])'
        for name, text in rows.items()
    ]
    if isinstance(step.loss, ast.Name) and step.loss.id in _outside(step):
        after.append(f"{step.source.of(step.loss)} = torch.tensor({result}.loss)")
    lines = [f"{result} = {call}" if after else call, *after]
    try:
        return step.source.edit(_edits(step, update, text, lines))
    except UnclearEdit as error:
        raise StepUnclear(
            f"the lines before {step.where(step.back)} can't be changed in one way only: {error}"
        ) from None


def _edits(step: LoopStep, update: Update | None, text: str, lines: Sequence[str]) -> Iterator[Change]:
    source, block = step.source, step.source.block(step.back)
    first = step.forward[0] if step.forward else step.back
    home = home_of(step, update.optimizer if update else "")
    if "anybatch" not in step.names:  # first, for the loop may be the next statement
        body = source.tree.body
        behind: list[ast.stmt] = [one for one in body if isinstance(one, ast.Import | ast.ImportFrom)]
        if not behind and ast.get_docstring(source.tree) is not None:
            behind = body[:1]
        yield source.inserted((behind or body[:1])[-1], "import anybatch", after=bool(behind))
    yield source.inserted(home or first, f"{text}\n" if home else text)
    gone = [*step.forward, *(update.statements if update else ())]
    for one in gone:
        yield source.removed(one)
    line = source.text.split("\n")[step.back.lineno - 1].encode()
    if len(lines) > 1 and block[0].lineno == step.back.lineno and line[: block[0].col_offset].strip():
        raise StepUnclear(f"{step.where(step.back)} stands in the line of its loop; put it in a line of its own")
    yield source.replaced(step.back, f"\n{source.indent(step.back)}".join(lines))
    for one in run_behind(step).statements:
        yield from source.moved(one, step.back, after=True)


def _free(taken: set[str], name: str) -> str:
    return next(one for one in (name, f"batch_{name}", f"anybatch_{name}") if one not in taken)


def _outside(step: LoopStep) -> set[str]:
    """Names of the forward that something else in the function reads."""
    scope = step.source.scope(step.back)
    inner = step.loops[0] if step.loops else scope
    near = inputs_of(_from_here(step, inner))
    if isinstance(inner, LOOPS):
        near |= inputs_of(inner.orelse) | inputs_of(_after(step, inner))
    return stored(step.forward) & (near | _read_by_functions(scope))


def _read_by_functions(scope: ast.AST) -> set[str]:
    """Names of a scope that functions in it read, whenever they are called."""
    found = set[str]()
    for one in nodes_in(scope, ast.AST):
        if one is not scope and isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            body = one.body if isinstance(one.body, list) else [one.body]
            own = {each.arg for each in nodes_in(one.args, ast.arg)} | names_in(body, ast.Store)
            found |= names_in(body, ast.Load) - own
    return found


def _after(step: LoopStep, loop: ast.stmt) -> list[ast.AST]:
    """What may run in a function once a loop has ended, in this order."""
    found, here = list[ast.AST](), loop
    while True:
        block = step.source.block(here)
        found += block[block.index(here) + 1 :]
        outer = next(one for one in step.source.ancestors(here) if isinstance(one, ast.stmt | ast.Module))
        if isinstance(outer, SCOPES) or not isinstance(outer, ast.stmt):
            return found
        if isinstance(outer, LOOPS):
            again = [outer.test] if isinstance(outer, ast.While) else []
            found += [*again, *outer.orelse, *block[: block.index(here)]]
        elif isinstance(outer, ast.Try):
            found += [*outer.handlers, *outer.orelse, *outer.finalbody]
        here = outer


def _from_here(step: LoopStep, inner: ast.AST) -> list[ast.AST]:
    """What runs after the forward in a loop, in this order, up to the next forward."""
    first = min((one.lineno for one in step.forward), default=step.back.lineno)
    behind, ahead, here = list[ast.AST](), list[ast.stmt](), step.back
    while True:
        block = [one for one in step.source.block(here) if one not in step.forward]
        behind += block[block.index(here) + 1 :]
        ahead = [*block[: block.index(here)], *ahead]
        outer = next(one for one in step.source.ancestors(here) if isinstance(one, ast.stmt | ast.Module))
        if outer is inner or not isinstance(outer, ast.stmt):
            break
        behind += [one for one in _statements(outer, {id(one) for one in (*block, *step.forward)}) if one is not here]
        here = outer
    behind += [inner.test] if isinstance(inner, ast.While) else []
    between = [one for one in ahead if one.lineno > first]  # such as what is moved behind the step
    return [*between, *behind, *(one for one in ahead if one not in between)]


def _statements(outer: ast.AST, skipped: set[int]) -> Iterator[ast.stmt]:
    """The statements in a block, those of inner blocks too, without other functions."""
    for node in ast.iter_child_nodes(outer):
        if id(node) in skipped or isinstance(node, SCOPES):
            continue
        if isinstance(node, ast.stmt):
            yield node
        yield from _statements(node, skipped)


def _shallow(statements: Iterable[ast.stmt]) -> Iterator[ast.AST]:
    """What stands in statements themselves, and not in their bodies."""
    for one in statements:
        if not hasattr(one, "body"):
            yield one
            continue
        yield from (node for node in ast.iter_child_nodes(one) if not isinstance(node, ast.stmt | ast.ExceptHandler))


def _check_block(step: LoopStep) -> None:
    """Refuses a forward elsewhere than its backward, and what can't run behind both."""
    block = step.source.block(step.back)
    away = next((one for one in step.forward if one not in block), None)
    if away is not None:
        raise StepUnclear(
            f"the forward at {step.where(away)} is not in the block of its backward, line {step.back.lineno}; put them "
            "into one block, and where training and evaluation share a loop, give the training a loop of its own"
        )
    _check_behind(step)


def results_of(step: LoopStep) -> dict[str, str]:
    """The code of the metrics for the tensors of the forward that the loop reads after the backward, by name.

    They have one row per sample, or are means over the samples, such as the terms of a loss.
    """
    _check_block(step)
    scope = step.source.scope(step.back)
    deleted = {one.id for one in nodes_in(scope, ast.Name) if isinstance(one.ctx, ast.Del)} & stored(step.forward)
    if deleted:
        raise StepUnclear(
            f"{step.source.path} deletes {min(deleted)!r}, which exists within the loss function only once anybatch "
            "takes the step; take it out of the del"
        )
    rows = rows_of(step.logical_batch)
    goes_on = len(step.source.calls(step.loops[-1] if step.loops else step.source.scope(step.back), "backward")) > 1
    found: dict[str, str] = {}
    for name in sorted(_outside(step)):
        value: Any = step.names.get(name)
        is_loss = isinstance(step.loss, ast.Name) and name == step.loss.id
        is_term = not is_loss and bool(step.rows_text) and _is_mean(value)
        if (is_loss or is_term) and not isinstance(step.names.get("torch"), type(torch)):
            raise StepUnclear(f"{step.source.path} reads the loss after the backward; it needs import torch")
        if is_loss:
            continue
        if goes_on and isinstance(value, torch.Tensor) and value.requires_grad:
            raise StepUnclear(
                f"the loop reads {name!r} of the forward after {step.where(step.back)}, where it goes back again, and "
                "what micro-batches leave has no graph; compute it again after the step"
            )
        if is_term:
            found[name] = f"anybatch.Mean({name} * {step.rows_text}, {step.rows_text})"
        elif isinstance(value, torch.Tensor) and value.dim() and len(value) == rows:
            found[name] = name
        elif name not in names_in(step.forward, ast.Store):
            raise StepUnclear(
                f"the forward before {step.where(step.back)} changes {name!r}, as each micro-batch would; give its "
                f"results names of their own, as in out = model(x), and put them into {name!r} after the step"
            )
        else:
            raise StepUnclear(
                f"the loop reads {name!r} of the forward after {step.where(step.back)}, and it is no tensor with a row "
                "for each sample; have the loss function return it with the loss, as an anybatch.Mean"
            )
    return found


def _is_mean(value: Any) -> bool:
    """Whether a value is a scalar made of means, by sums and by factors that have no graph."""
    if not isinstance(value, torch.Tensor) or value.dim():
        return False
    nodes, seen = [value.grad_fn], set[Any]()
    for node in nodes:  # to which those before it are added
        if node is None or len(nodes) > _MOST_NODES:
            return False
        if node in seen or node.name().startswith("MeanBackward") or getattr(node, "_saved_reduction", None) == 1:
            continue
        seen.add(node)
        name, given = node.name(), [one for one, _ in node.next_functions]
        parts = [one for one in given if one is not None]
        is_factor = name in _ONE_OF_TWO and len(parts) == 1 and (name != "DivBackward0" or given[0] is not None)
        if not parts or not (is_factor or name in _SUMS):
            return False
        nodes += parts
    return True
