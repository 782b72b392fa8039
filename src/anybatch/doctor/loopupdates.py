"""The update of a plain loop: what a ``TrainStep`` replaces, and what runs behind it."""

import ast
import types
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from anybatch.doctor.crashing.usercode import SCOPES, called, names_in, nodes_in
from anybatch.doctor.looplooks import HARMLESS, LEAVES, LOOKS, NEEDS_GRAPH, leaves, may_look, only_looks, value_at
from anybatch.doctor.loopnames import inputs_of, read, root_of, stored
from anybatch.doctor.loopparts import LoopStep, StepUnclear, value_of
from anybatch.userlines import USERS, whose_file

_ORDERS = (ast.Lt, ast.LtE, ast.Gt, ast.GtE)
_DECIDES = ("item", "any", "all", "isnan", "isfinite", "isinf")
_FIXED = (ast.Name, ast.Attribute, ast.Constant, ast.UnaryOp, ast.BinOp, ast.operator, ast.unaryop, ast.expr_context)


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
    optimizer = _receiver(step, steps[0])
    if not _in_place(step, found, steps[0]) or home_of(step, optimizer) is None:
        return None
    updates = [one for one in step.source.calls(step.loops[0], "step") if _is_optimizer(step, one)]
    if len(updates) > 1 or len(step.source.calls(step.loops[0], "backward")) > 1:
        return None
    if any(_is_replaced(step, text) for text in (optimizer, *step.modules)):
        return None
    between = block[block.index(step.back) + 1 : block.index(steps[0])]
    if not all(one in found or _may_wait(step, one, optimizer) for one in between):
        return None
    if any(_before_step_only(step, one, optimizer) for one in run_behind(step).statements):
        return None
    if not _keeps_cleared(step, found):
        return None
    clips = [one for one, kind in found.items() if kind == "clip"]
    limit = _limit(step, clips[0]) if clips else ""
    return None if limit and not _is_fixed(step, limit) else Update(optimizer, list(found), limit)


def _in_place(step: LoopStep, found: dict[ast.stmt, str], steps: ast.stmt) -> bool:
    """Whether what makes an update stands in the order of a ``TrainStep``, and is of the trained parameters."""
    optimizer = value_of(_receiver(step, steps), step.names)
    block = step.source.block(step.back)
    at = {kind: [block.index(one) for one, other in found.items() if other == kind] for kind in found.values()}
    back, stepped = block.index(step.back), block.index(steps)
    trained = {id(one) for group in optimizer.param_groups for one in group["params"] if one.requires_grad}
    own = {id(one) for one in step.model.parameters() if one.requires_grad}
    for one, kind in found.items():
        if kind == "clear" and not _clears_trained(step, one, optimizer, trained):
            return False
    unscaled = [block.index(one) for one in found if called(_call(one) or one) == "unscale_"]
    clipped = at.get("clip", [])
    return (
        stepped > back
        and all(not back <= one <= stepped for one in at["clear"])
        and all(back < one < stepped for one in (*clipped, *unscaled))
        and not (clipped and own != trained)
        and not (clipped and step.scaler and not (unscaled and min(unscaled) < min(clipped)))
    )


def _clears_trained(step: LoopStep, statement: ast.stmt, optimizer: Any, trained: set[int]) -> bool:
    call = _call(statement)
    owner = value_at(step, call.func.value) if call is not None and isinstance(call.func, ast.Attribute) else None
    if isinstance(owner, torch.nn.Module):
        return trained <= {id(one) for one in owner.parameters()}
    return owner is optimizer


def _is_replaced(step: LoopStep, text: str) -> bool:
    """Whether a function may give a name, or an attribute outside of an ``__init__``, another value."""
    name, _, attribute = text.rpartition(".")
    if not name:
        outer = [one for one in ast.walk(step.source.tree) if isinstance(one, ast.Global | ast.Nonlocal)]
        return any(text in one.names for one in outer)
    return _stores_attribute(step, attribute) or _is_replaced(step, name)


def _stores_attribute(step: LoopStep, name: str) -> bool:
    for one in nodes_in(step.source.tree, ast.Attribute):
        if one.attr == name and not isinstance(one.ctx, ast.Load):
            scope = next((outer for outer in step.source.ancestors(one) if isinstance(outer, SCOPES)), None)
            if not isinstance(scope, ast.FunctionDef) or scope.name != "__init__":
                return True
    return False


def _is_fixed(step: LoopStep, text: str) -> bool:
    """Whether the limit of a clip is the same in each step."""
    tree = ast.parse(text, mode="eval").body
    if not all(isinstance(one, _FIXED) for one in ast.walk(tree)):
        return False
    stores = [one.id for one in nodes_in(step.source.tree, ast.Name) if not isinstance(one.ctx, ast.Load)]
    stores += [one.arg for one in nodes_in(step.source.tree, ast.arg)]
    names = names_in(tree) - {"self"}
    attributes = {one.attr for one in nodes_in(tree, ast.Attribute)}
    return all(stores.count(one) <= 1 for one in names) and not any(_stores_attribute(step, one) for one in attributes)


def _keeps_cleared(step: LoopStep, found: dict[ast.stmt, str]) -> bool:
    """Whether nothing between a clear and the backward makes or reads gradients."""
    block = step.source.block(step.back)
    back = block.index(step.back)
    ahead = [block.index(one) for one, kind in found.items() if kind == "clear" and block.index(one) < back]
    between = block[max(ahead) + 1 : back] if ahead else [one for one in block if one is not step.back]
    others = [one for one in between if one not in found and one not in step.forward]
    if any(one.attr == "grad" for one in nodes_in(others, ast.Attribute)):
        return False
    calls = [one for one in nodes_in(others, ast.Call) if not may_look(step, one)]
    if calls and _goes_back_elsewhere(step):
        return not any(_is_users(step, one) for one in calls)
    return not any(_is_elsewhere(step, one) for one in calls)


def _goes_back_elsewhere(step: LoopStep) -> bool:
    """Whether other lines of the file make, read or write gradients."""
    tree = step.source.tree
    return len(step.source.calls(tree, "backward", "grad")) > 1 or any(
        one.attr == "grad" and not isinstance(step.source.parent(one), ast.Call)
        for one in nodes_in(tree, ast.Attribute)
    )


def _is_users(step: LoopStep, call: ast.Call) -> bool:
    """Whether a call may run other lines of the user's."""
    value = value_at(step, call.func)
    if isinstance(value, types.MethodType):
        value = value.__func__
    return not isinstance(value, types.BuiltinFunctionType) and not str(getattr(value, "__module__", "")).startswith(
        "torch"
    )


def _is_elsewhere(step: LoopStep, call: ast.Call) -> bool:
    """Whether a call runs a function of another file of the user's, which may make gradients."""
    value = value_at(step, call.func)
    code = getattr(value, "__code__", None) or getattr(vars(type(value)).get("__call__"), "__code__", None)
    file = getattr(code, "co_filename", step.source.path)
    return file != step.source.path and whose_file(file) == USERS


class Behind(NamedTuple):
    """What stands between a forward and its backward, and has to run after both, in its order."""

    statements: list[ast.stmt]
    changes: bool  # whether one of them changes what the forward reads


def run_behind(step: LoopStep) -> Behind:
    """The statements between a forward and its backward, but for those that clear or only leave.

    Of those before the forward's last statement only what reads what the forward gives or changes what it reads, and
    what depends on that.
    """
    block, found, changes = step.source.block(step.back), list[ast.stmt](), False
    forward = [one for one in step.forward if one in block]
    if not step.windowed and (not forward or forward[0] is not step.forward[0]):
        return Behind(found, changes)
    made, needed = stored(step.forward), inputs_of([*step.forward, step.loss])
    first = block.index(forward[0]) if forward else 0
    last = max(map(block.index, forward), default=block.index(step.back))
    if step.windowed:  # what the loader yields has its names once the step is done
        first, made = 0, made | step.windowed.names
    for one in block[first : block.index(step.back)]:
        if one in step.forward or _kind(step, one) == "clear" or (_clears(one) and not read([one]) & made):
            continue
        is_last = block.index(one) > last and not any(map(leaves, ast.walk(one)))
        acts = any(called(call) not in LOOKS for call in nodes_in(one, ast.Call))
        own = stored([one]) & needed | ({name for name in read([one]) & needed if acts and _is_object(step, name)})
        if own or is_last or read([one]) & made or stored([one]) & made:
            is_known = all(may_look(step, call) for call in nodes_in(one, ast.Call))
            changes |= bool(own) or not (is_known or read([one]) & made)
            found.append(one)
            made |= stored([one])
            needed |= read([one]) if own else set()
    return Behind(found, changes)


def _is_object(step: LoopStep, name: str) -> bool:
    """Whether a call may change what a name stands for, as an update of a teacher does."""
    value = step.names.get(name)
    known = (torch.Tensor, str, int, float, complex, list, tuple, dict, types.ModuleType, torch.device, torch.dtype)
    functions = (type, types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.MethodDescriptorType)
    return not (value is None or isinstance(value, (*known, *functions)))


def _clears(statement: ast.stmt) -> bool:
    """Whether a statement clears gradients, in any form."""
    stores = (one for one in nodes_in(statement, ast.Attribute) if isinstance(one.ctx, ast.Store))
    calls = (called(one) for one in nodes_in(statement, ast.Call))
    return any(one.attr == "grad" for one in stores) or "zero_grad" in calls


def _before_step_only(step: LoopStep, statement: ast.stmt, optimizer: str) -> bool:
    """Whether a statement may not run after the update: it may leave the loop, or know the model or the optimizer."""
    names = {text.partition(".")[0] for text in (*step.modules, optimizer)} - {"self"}
    for node in ast.walk(statement):
        if leaves(node):
            return True
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            return True  # such as a learning rate
        if (
            isinstance(node, ast.Subscript)
            and isinstance(node.ctx, ast.Store)
            and not only_looks(
                step,
                [ast.copy_location(ast.Expr(node.value), node)],  # which reads what the assignment changes
            )
        ):
            return True
    return bool(read([statement]) & names) or not only_looks(step, [statement])


def check_behind(step: LoopStep) -> None:
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
        _check_graph(step, one)
        leaving = next((node for node in ast.walk(one) if isinstance(node, LEAVES)), None)
        if leaving is not None and step.windowed:
            raise StepUnclear(
                f"{step.where(leaving)} may leave out one batch of an update, and the batches of an update are one to "
                "anybatch; leave it out before, in the dataset or in a generator around the loader"
            )
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
    _check_order(step)
    for node in nodes_in(step.forward, ast.AST):
        if isinstance(node, ast.If | ast.While | ast.IfExp) and _decides(step, node.test, made):
            raise StepUnclear(
                f"{step.where(node)} decides by values of the batch, as each micro-batch would for itself; decide for "
                "each sample, as by torch.where, or before the forward"
            )


def _check_graph(step: LoopStep, statement: ast.stmt) -> None:
    """Refuses what needs the graph or the gradients as they are before the backward."""
    grads = [one for one in nodes_in(statement, ast.Attribute) if one.attr == "grad"]
    node = next((one for one in ast.walk(statement) if called(one) in NEEDS_GRAPH or one in grads), None)
    if node is not None and called(node) == "backward":
        lines = " and ".join(dict.fromkeys([str(getattr(node, "lineno", 0)), str(step.back.lineno)]))
        raise StepUnclear(
            f"{step.source.path} calls backward() twice for one update (line {lines}); "
            'have one loss function return both losses in a mapping, as in: return {"first": first, "second": second}, '
            "and give it to anybatch.TrainStep, which adds them up and goes back by itself"
        )
    if node is not None:
        what = called(node) or "grad"
        raise StepUnclear(
            f"{step.where(node)} uses {what} between the forward and the backward in line {step.back.lineno}, and "
            "anybatch runs these two as one call of the step; have it use a forward of its own before, or read the "
            "gradients of the parameters after the backward"
        )


def _check_order(step: LoopStep) -> None:
    """Refuses a call in the middle of the forward that may change what the forward reads behind it."""
    block = step.source.block(step.back)
    first = min((block.index(one) for one in step.forward), default=len(block))
    for one in block[first : block.index(step.back)]:
        later = [other for other in step.forward if other.lineno > one.lineno]
        calls = [] if one in step.forward else [call for call in nodes_in(one, ast.Call) if not may_look(step, call)]
        objects = {root_of(call.func) for call in calls if isinstance(call.func, ast.Attribute)}
        changed = {name for name in objects if _is_object(step, name)} & inputs_of([*later, step.loss])
        if changed and later:
            raise StepUnclear(
                f"{step.where(one)} may change {min(changed)!r} in the middle of the forward, and anybatch runs it "
                "behind the backward; put it before the forward or after the step"
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


def _may_wait(step: LoopStep, statement: ast.stmt, optimizer: str) -> bool:
    """Whether a statement between the backward and the step certainly does the same behind the step."""
    if not isinstance(statement, ast.Assign | ast.AnnAssign | ast.AugAssign | ast.Expr | ast.Pass):
        return False
    changed = [one for one in nodes_in(statement, ast.expr) if isinstance(getattr(one, "ctx", None), ast.Store)]
    if not all(isinstance(one, ast.Name | ast.Tuple) for one in changed):
        return False
    added = statement.target if isinstance(statement, ast.AugAssign) else None
    if added is not None and isinstance(value_of(step.source.of(added), step.names), torch.Tensor):
        return False
    is_harmless = all(called(one) in HARMLESS for one in nodes_in(statement, ast.Call))
    return is_harmless and not _before_step_only(step, statement, optimizer)


def _call(statement: ast.stmt) -> ast.Call | None:
    return statement.value if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call) else None


def _kind(step: LoopStep, statement: ast.stmt) -> str:
    """What a statement does in an update; empty if it is no part of one."""
    call = _call(statement)
    if call is None or not isinstance(call.func, ast.Attribute | ast.Name):
        return ""
    name = called(call)
    if name == "zero_grad":
        given = [*call.args, *(one.value for one in call.keywords)]  # gradients of zeros are no cleared ones
        return "clear" if all(isinstance(one, ast.Constant) and one.value is True for one in given) else ""
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
