"""The step of a plain loop: its model, forward, loss, batch and optimizer, found while it runs."""

import ast
import builtins
import copy
import itertools
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from typing import Any

import torch

from anybatch.doctor.crashing.usercode import LOOPS, SCOPES, called, names_in, nodes_in
from anybatch.doctor.fixes.source import UnclearEdit, UserSource
from anybatch.doctor.loopnames import holds_samples, inputs_of, is_flat, read, root_of, rows_of, size_of, stored
from anybatch.doctor.loopparts import LoopStep, StepUnclear, Windowed, value_of

_DRAWS = frozenset({"randint", "randperm", "choice", "choices", "sample", "permutation", "integers", "multinomial"})
_HOUSEKEEPING = frozenset({"zero_grad", "train", "eval"})
_GOES_ELSEWHERE = (ast.Return, ast.Break, ast.Continue, ast.Yield, ast.YieldFrom, ast.Await, ast.Global, ast.Nonlocal)


def step_at(
    file: str,
    line: int,
    names: Mapping[str, Any],
    optimizers: Sequence[torch.optim.Optimizer] = (),
    windowed: Windowed | None = None,
) -> LoopStep:
    """Finds the step that contains a line of a loop; by default all optimizers in ``names`` are its own.

    Raises:
        StepUnclear: the step can't be separated from the rest of the loop.
    """
    try:
        source = UserSource(file, None if windowed is None else windowed.text)
        back, call = _backward(source, source.statement(line))
    except UnclearEdit as error:
        raise StepUnclear(str(error)) from None
    loss, scaler = _loss(source, call, names)
    step = LoopStep(source, back, loss, scaler, names, windowed=windowed)
    optimizers = optimizers or [one for one in names.values() if isinstance(one, torch.optim.Optimizer)]
    trained = {id(one) for optimizer in optimizers for group in optimizer.param_groups for one in group["params"]}
    before = _before(source, back)
    _find_modules(step, before, trained)
    step.forward = _forward(step, before)
    _check_changed(step)
    _find_batch(step)
    _check_item(step)
    _check_carried(step)
    _check_inner_calls(step)
    return step


def _check_item(step: LoopStep) -> None:
    """Refuses what a loop over windows reads beside the items of its loader, one of which is a batch."""
    others = (step.batch.keys() - step.windowed.names) | step.taken_out.keys() if step.windowed else ()
    if others:
        raise StepUnclear(
            f"the loop at {step.where(step.back)} adds up the gradients of several batches, and its forward reads "
            f"{min(others)!r}, which is no part of what the loader yields; have the loader yield it with the batch"
        )


def _check_changed(step: LoopStep) -> None:
    """Refuses a forward over windows that reads what the loop changes with each batch, such as their number."""
    changed = frozenset[str]() if step.windowed is None else step.windowed.changed
    for node in nodes_in([*step.forward, step.loss], ast.expr):
        if isinstance(node, ast.Name | ast.Attribute | ast.Subscript) and step.source.of(node) in changed:
            raise StepUnclear(
                f"{step.where(node)} reads {step.source.of(node)!r}, which the loop changes with each batch, within "
                "the forward, and the batches of an update are one to anybatch; change it with each update, in the if "
                "of the update"
            )


def _check_carried(step: LoopStep) -> None:
    """Refuses what the forward makes of its own last value, which a function would not know."""
    carried = names_in(step.forward, ast.Store) & inputs_of([*step.forward, step.loss]) & step.names.keys()
    if carried:
        name = min(carried)
        first = next(one for one in step.forward if name in names_in(one, ast.Store))
        raise StepUnclear(
            f"{step.where(first)} makes {name!r} of what it was in the last iteration, within the forward, as each "
            f"micro-batch would again; put {name} before the forward"
        )


def _check_inner_calls(step: LoopStep) -> None:
    """Refuses a call for its effect in a block of the forward, as each micro-batch would repeat it."""
    own = names_in(step.forward, ast.Store)
    for one in nodes_in([outer for outer in step.forward if hasattr(outer, "body")], ast.Expr):
        name, call = called(one.value), one.value
        if not name or name in _HOUSEKEEPING or name == "print" or not isinstance(call, ast.Call):
            continue
        root = root_of(call.func)
        if root in own or (isinstance(step.names.get(root), types.ModuleType) and isinstance(call.func, ast.Attribute)):
            continue
        raise StepUnclear(
            f"{step.where(one)} calls {step.source.of(call.func)} in a block of the forward, as each micro-batch would "
            "again; put it behind the backward"
        )


def _before(source: UserSource, here: ast.stmt) -> list[ast.stmt]:
    """The statements before one, in its block and in those around it up to its loop or function."""
    block = source.block(here)
    before = block[: block.index(here)]
    outer = next((one for one in source.ancestors(here) if isinstance(one, ast.stmt)), None)
    if outer is None or isinstance(outer, (*LOOPS, *SCOPES)):
        return before
    return [*_before(source, outer), *before]


def _backward(source: UserSource, here: ast.stmt) -> tuple[ast.stmt, ast.Call]:
    """The backward at a line, or the only one in the blocks around it up to its loop."""
    for outer in (here, *source.ancestors(here)):
        found = [one for one in source.calls(outer, "backward") if isinstance(one.func, ast.Attribute)]
        if found and not isinstance(outer, ast.Module):
            back = source.around(found[0])
            if len(found) > 1:
                lines = ", ".join(str(one.lineno) for one in found)
                raise UnclearEdit(
                    f"{source.path} calls backward() for several losses, one after the other (lines {lines}). Where "
                    "they are of one update, have one loss function return them in a mapping, as in: return "
                    '{"first": first, "second": second}, and give it to anybatch.TrainStep, which adds them up; where '
                    "each has an optimizer of its own, as in a GAN, make a TrainStep of each"
                )
            if not isinstance(back, ast.Expr) or back.value is not found[0]:
                raise UnclearEdit(f"{source.path}:{back.lineno} does more than call backward; expected loss.backward()")
            return back, found[0]
        if isinstance(outer, SCOPES):
            break
    raise UnclearEdit(f"there is no backward() in the loop or function of {source.path}:{here.lineno}")


def _loss(source: UserSource, call: ast.Call, names: Mapping[str, Any]) -> tuple[ast.expr, str]:
    """The expression that goes back, and the scaler around it."""
    where = f"{source.path}:{call.lineno}"
    if call.args or call.keywords:
        raise StepUnclear(
            f"{where} passes arguments to backward(), as for a graph that is used again; expected loss.backward(). If "
            'several losses go back for one update, have one loss function return them in a mapping: return {"first": '
            'first, "second": second}'
        )
    loss = call.func.value if isinstance(call.func, ast.Attribute) else call.func
    if isinstance(loss, ast.NamedExpr):
        raise StepUnclear(f"{where} gives the loss a name within its backward; give it one in the line before")
    if isinstance(loss, ast.Call) and called(loss) == "scale" and isinstance(loss.func, ast.Attribute):
        scaler = source.of(loss.func.value)
        if isinstance(value_of(scaler, names), torch.amp.GradScaler) and len(loss.args) == 1:
            return loss.args[0], scaler
    return loss, ""


def _named(source: UserSource, nodes: Iterable[ast.AST]) -> Iterator[str]:
    """Names, and names with attributes, that are read."""
    for node in nodes_in(nodes, ast.expr):
        if isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Load):
            text = source.of(node)
            if text.replace(".", "").isidentifier():
                yield text


def _find_modules(step: LoopStep, before: Sequence[ast.stmt], trained: set[int]) -> None:
    """The modules with trained parameters that the statements name; else those that the place has names for."""
    named = list(dict.fromkeys(_named(step.source, [*before, step.loss])))
    everywhere = [name for name in step.names if not name.startswith("_")]
    owners = [name for name in everywhere if not isinstance(step.names[name], (type, types.ModuleType))]
    inside = [f"{name}.{inner}" for name in owners for inner in list(getattr(step.names[name], "__dict__", ()))]
    found: dict[str, torch.nn.Module] = {}
    missing = set(trained)
    for text in (*named, *everywhere, *inside):
        if trained and not missing:
            break
        value = value_of(text, step.names)
        if not isinstance(value, torch.nn.Module) or any(value is one for one in found.values()):
            continue
        own = {id(one) for one in value.parameters() if one.requires_grad}
        if own & missing or (not trained and own and text in named):
            found[text] = value
            missing -= own
    parts = {id(part) for one in found.values() for part in list(one.modules())[1:]}
    step.modules = {text: one for text, one in found.items() if id(one) not in parts}
    if not step.modules:
        raise StepUnclear(
            f"no module that is trained has a name at {step.where(step.back)}; expected one such as model, or "
            "self.model, whose parameters the optimizer has"
        )


def _forward(step: LoopStep, before: Sequence[ast.stmt]) -> list[ast.stmt]:
    """The statements that the loss is computed by, from the first on that uses a trained module."""
    work = [one for one in before if not (isinstance(one, ast.Expr) and called(one.value) in _HOUSEKEEPING)]
    work = [one for one in work if step.windowed is None or one.lineno != step.windowed.apart]
    needed, chain = read([step.loss]), list[ast.stmt]()
    for statement in reversed(work):
        if stored([statement]) & needed:
            chain.insert(0, statement)
            needed |= read([statement])
    uses = [any(text in step.modules for text in _named(step.source, [one])) for one in chain]
    ends = stored(chain) & read([step.loss])
    first = uses.index(True) if True in uses else next((i for i, one in enumerate(chain) if stored([one]) & ends), 0)
    if True not in uses and any(text in step.modules for text in _named(step.source, [step.loss])):
        first = len(chain)
    first = first if step.windowed is None else 0  # a batch of a window is what the loader yields
    forward = chain[first:]
    for statement in reversed(chain[:first]):
        inputs = inputs_of([*forward, step.loss])
        carried = stored(forward) & inputs  # such as a sum of losses that begins with 0
        carried |= {name for name in inputs if getattr(step.names.get(name), "grad_fn", None) is not None}
        if stored([statement]) & carried:
            forward.insert(0, statement)
    for statement in forward:
        leaving = next((one for one in ast.walk(statement) if isinstance(one, _GOES_ELSEWHERE)), None)
        if leaving is not None:
            raise StepUnclear(
                f"{step.where(leaving)} leaves the forward in its middle; put it before the forward or after the step"
            )
    own = stored([*forward, step.loss])
    for call in nodes_in([*forward, step.loss], ast.Call):
        taken = _taken_from(call)
        if taken and taken not in own:
            raise StepUnclear(
                f"{step.where(call)} takes something out of {taken!r} within the forward, as each micro-batch would "
                "again; put it before the forward"
            )
    return forward


def _taken_from(call: ast.Call) -> str:
    """What a call takes the next item out of; empty for another call, such as the ``get`` of a mapping."""
    if isinstance(call.func, ast.Name) and call.func.id == "next" and call.args:
        return root_of(call.args[0])
    takes = called(call) in ("pop", "popleft", "popitem", "__next__") or (called(call) == "get" and not call.args)
    return root_of(call.func) if takes and isinstance(call.func, ast.Attribute) else ""


def _find_batch(step: LoopStep) -> None:
    """What of the inputs of the forward is new in each iteration; without a loop, what the function was given."""
    loops, scope = step.loops, step.source.scope(step.back)
    inside = stored([loops[0]]) if loops else stored([scope])
    if not loops and isinstance(scope, ast.FunctionDef | ast.AsyncFunctionDef):
        inside |= {one.arg for one in nodes_in(scope.args, ast.arg)}
    given = _given(step, step.names)
    step.batch = {name: value for name, value in given.items() if name in inside and holds_samples(value)}
    if made_of := _made_of_all(step, given, inside):
        step.batch = {name: value for name, value in given.items() if name in step.batch or name in made_of}
    if parts := _taken_out(step, inside):
        given, inside = _given(step, {**step.names, **parts}), inside | parts.keys()
        step.batch = {name: value for name, value in given.items() if name in inside and holds_samples(value)}
        _check_others(step, given)
    if not step.batch:  # one batch, again and again
        data = {name: value for name, value in given.items() if holds_samples(value)}
        longest = max((rows_of(value) for value in data.values()), default=0)
        step.batch = {name: value for name, value in data.items() if rows_of(value) == longest}
    rows = max(map(rows_of, step.batch.values()), default=0)
    if rows > 1:  # a number in a tensor, such as that of a mixture, is the same for all
        step.batch = {name: value for name, value in step.batch.items() if getattr(value, "numel", lambda: 2)() != 1}
    for name, value in given.items():
        if name in inside and isinstance(value, list | tuple) and len(value) == rows and name not in step.batch:
            step.batch[name] = value
    if not step.batch:
        raise StepUnclear(
            f"no tensor with the samples of a batch is read by the forward before {step.where(step.back)}; give the "
            "batch a name in the loop, as in: for x, y in loader"
        )
    overwritten = stored(step.forward) & set(step.batch)
    if overwritten:
        name = min(overwritten)
        raise StepUnclear(
            f"the forward before {step.where(step.back)} gives {name!r} another value, so that what it began with is "
            f"gone; give the result another name. A state that goes on from batch to batch is for anybatch.OverTime"
        )


def _made_of_all(step: LoopStep, given: Mapping[str, Any], inside: Set[str]) -> set[str]:
    """The samples from outside of the loop, where all that is new in it is computed from them, row by row.

    Such is ``t = teacher(X)`` before a forward that reads ``X``, too. A table of as many rows, such as one of classes,
    is neither what all that is new is computed from nor given to a model.
    """
    rows = rows_of(step.logical_batch) if step.batch else 0
    sources = [_sources(step, name) for name in step.batch]
    needed = set().union(*sources)
    if not rows or _targets(step) & needed:
        return set()
    whole = {name for name, value in given.items() if name not in inside and holds_samples(value)}
    whole = {name for name in whole if rows_of(given[name]) == rows}
    calls = nodes_in([*step.forward, step.loss], ast.Call)
    own = [one for one in calls if any(text in step.modules for text in _named(step.source, [one.func]))]
    modelled = {root_of(argument) for one in own for argument in one.args}
    is_source = all(one & whole for one in sources) or bool(needed & whole and modelled & whole)
    return whole if is_source else set()


def _sources(step: LoopStep, name: str) -> set[str]:
    """A name and those that it is computed from before the backward."""
    needed = {name}
    for statement in reversed(_before(step.source, step.back)):
        needed |= read([statement]) if stored([statement]) & needed else set()
    return needed


def _targets(step: LoopStep) -> set[str]:
    """What the loop itself gives values, such as the batches of a loader."""
    return {
        name
        for one in step.loops
        if isinstance(one, ast.For | ast.AsyncFor)
        for name in stored([one.target])
        if holds_samples(step.names.get(name))
    }


def _check_others(step: LoopStep, given: Mapping[str, Any]) -> None:
    """Refuses a batch that the forward takes out if something else that it reads may be a part of it."""
    rows = rows_of(step.logical_batch)
    if step.batch.keys() <= step.taken_out.keys():
        for name, value in given.items():
            if name not in step.batch and holds_samples(value) and size_of(value) == rows:
                text = next(iter(step.taken_out.values()))
                raise StepUnclear(
                    f"the forward before {step.where(step.back)} reads all of {name!r}, with as many rows as {text}; "
                    f"give the whole batch names in the loop, as in: xs, ys = {name}, {text}"
                )


def _given(step: LoopStep, names: Mapping[str, Any]) -> dict[str, Any]:
    """The values of the names that the forward reads; what it takes out of all samples has the name for it."""
    new = {text: name for name, text in step.taken_out.items()}
    nodes = [_Renamed(step.source, new).visit(copy.deepcopy(one)) for one in (*step.forward, step.loss)]
    return {name: names[name] for name in sorted(inputs_of(nodes)) if name in names and not hasattr(builtins, name)}


class _Renamed(ast.NodeTransformer):
    """Puts names in the place of expressions with certain texts."""

    def __init__(self, source: UserSource, names: Mapping[str, str]) -> None:
        self._source, self._names = source, names

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        name = self._names.get(self._source.of(node))
        return self.generic_visit(node) if name is None else ast.Name(name, ast.Load())


def _taken_out(step: LoopStep, inside: Set[str]) -> dict[str, Any]:
    """What a forward takes out of all samples itself, as it would out of each micro-batch again, by a name for it."""
    nodes, values = [*step.forward, step.loss], dict[str, Any]()
    parts = list(_parts(step, nodes, inside))
    texts = [step.source.of(one) for one in parts]
    found = {text: _evaluated(step, node) for text, node in zip(texts, parts, strict=True)}
    rows = max(map(size_of, step.batch.values() or found.values()), default=0)
    are_items = [_is_item(step, node) for node in parts]
    sizes = {size_of(found[text]) for text in texts}
    is_sample = not step.batch and any(are_items) and (len(sizes) > 1 or all(map(is_flat, found.values())))
    for node, text in zip(parts, texts, strict=True):
        is_batch = size_of(found[text]) == rows  # else such as a table of positions
        draws_again = texts.count(text) > 1 and any(nodes_in(node, ast.Call))
        if is_sample or draws_again or not (step.batch or size_of(found[text])):
            raise _nameless(step, node)
        if is_batch and _begins_alike(node):
            raise StepUnclear(
                f"{step.where(node)} reads {text}, which has as many rows as the batch and begins at the same row in "
                "each iteration; where it is no part of the batch, as a table of positions, give it a name before the "
                f"loop, else one in the loop before the forward, as in: xs = {text}"
            )
        if is_batch:
            values[text] = found[text]
    new = _Renamed(step.source, dict.fromkeys(values, ""))
    used = set(step.modules) | {name for node in nodes for name in names_in(new.visit(copy.deepcopy(node)))}
    for text in values:
        first = text.partition("[")[0].rpartition(".")[2]
        numbered = (f"{first}_{i}" for i in itertools.count(2))
        name = next(one for one in itertools.chain([first], numbered) if one not in used)
        step.taken_out[name] = text
        used.add(name)
    return {name: values[text] for name, text in step.taken_out.items()}


def _nameless(step: LoopStep, node: ast.Subscript) -> StepUnclear:
    return StepUnclear(
        f"{step.where(node)} takes the batch out of {step.source.of(node.value)!r} within the forward; give it "
        f"a name before, as in: xs = {step.source.of(node)}"
    )


def _evaluated(step: LoopStep, node: ast.Subscript) -> Any:
    """The value of a part, which has to be the same at the backward as it was before the forward."""
    if read([node.slice]) & (_changed_before(step) | _own(step)):
        raise _nameless(step, node)
    return _value(step, node)


def _value(step: LoopStep, node: ast.expr) -> Any:
    try:
        return eval(f"({step.source.of(node)})", dict(step.names))
    except Exception as error:  # noqa: BLE001 - the user's code, in a place that it was not written for
        raise StepUnclear(
            f"{step.where(node)} reads {step.source.of(node)}, whose value is not known before the forward ({error}); "
            "give it a name before"
        ) from None


def _own(step: LoopStep) -> set[str]:
    """Names that the forward itself gives values."""
    nodes = [*step.forward, step.loss]
    return stored(nodes) | {one.arg for one in nodes_in(nodes, ast.arg)}


def _is_item(step: LoopStep, node: ast.Subscript) -> bool:
    """Whether an index is one number, as that of a sample, or of a batch in a tensor of batches."""
    if isinstance(node.slice, ast.Slice | ast.Tuple):
        return False
    index = _value(step, node.slice)
    return isinstance(index, int) or (isinstance(index, torch.Tensor) and not index.dim())


def _begins_alike(node: ast.Subscript) -> bool:
    """Whether a slice begins at the same row in each iteration, as one of a table of positions does."""
    first = node.slice.elts[0] if isinstance(node.slice, ast.Tuple) else node.slice
    return isinstance(first, ast.Slice) and (first.lower is None or isinstance(first.lower, ast.Constant))


def _parts(step: LoopStep, nodes: Iterable[ast.AST], inside: Set[str]) -> Iterator[ast.Subscript]:
    for node in nodes:
        if isinstance(node, ast.Subscript) and _takes_samples(step, node, inside):
            yield node
        else:
            yield from _parts(step, ast.iter_child_nodes(node), inside)


def _takes_samples(step: LoopStep, node: ast.Subscript, inside: Set[str]) -> bool:
    """Whether an index takes other rows in each iteration out of something that stays."""
    parts = (ast.Name, ast.Attribute, ast.Subscript, ast.Constant, ast.expr_context)
    root, own = root_of(node), _own(step)
    if _takes_rows(step, node):
        return True
    if (
        not isinstance(node.ctx, ast.Load)
        or root in (inside - {"self"}) | own
        or not all(isinstance(one, parts) for one in ast.walk(node.value))
    ):
        return False
    first = node.slice.elts[0] if isinstance(node.slice, ast.Tuple) and node.slice.elts else node.slice
    draws = any(called(one) in _DRAWS for one in nodes_in([first], ast.Call))
    indices = read([first]) & inside
    if root not in step.names or not (draws or indices) or indices & step.batch.keys():
        return False
    is_bounded_here = isinstance(first, ast.Slice) and bool(indices - own)  # as in ys[i:end]
    if indices & own and not is_bounded_here:
        return False
    whole = _value(step, node.value)
    return holds_samples(whole) or (isinstance(whole, list | tuple) and isinstance(first, ast.Slice))


def _takes_rows(step: LoopStep, node: ast.Subscript) -> bool:
    """Whether the forward takes rows of a part of the batch by another that has their numbers, as ``y[order]``.

    They are numbers of rows of the whole batch, and a micro-batch has others.
    """
    if not (isinstance(node.value, ast.Name) and isinstance(node.slice, ast.Name) and isinstance(node.ctx, ast.Load)):
        return False
    names = [node.value.id, node.slice.id]
    if any(name in _own(step) or not isinstance(step.batch.get(name), torch.Tensor) for name in names):
        return False
    taken, order = (step.batch[name] for name in names)
    return len(taken) == len(order) and order.dim() == 1 and order.dtype in (torch.int64, torch.int32)


def _changed_before(step: LoopStep) -> set[str]:
    """Names that statements between the forward and the backward change."""
    block = step.source.block(step.back)
    first = block.index(step.forward[0]) if step.forward and step.forward[0] in block else block.index(step.back)
    return stored(one for one in block[first : block.index(step.back)] if one not in step.forward)
