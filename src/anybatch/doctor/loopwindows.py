"""A loop that adds up the gradients of several batches by hand, written as a loop over windows of its loader."""

import ast
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeGuard

import torch

from anybatch.doctor.crashing.usercode import called, names_in, nodes_in
from anybatch.doctor.fixes.source import Change, UnclearEdit, UserSource
from anybatch.doctor.loopbatches import BatchLoop, changed_each, check_each, counters_of, counts_in, number_of
from anybatch.doctor.loopnames import free_name, inputs_of, stored
from anybatch.doctor.loopparts import LoopStep, StepUnclear, Windowed, value_of
from anybatch.doctor.loopsums import counted, cycle_of, first_lines, is_first, sums

_GONE = "# of a micro-batch alone"
"""A line in the place of one that goes, so that the lines below keep their numbers."""
_WRAPS = ("enumerate", "tqdm", "track")
_OF_UPDATES = ("step", "zero_grad", "update", "unscale_", "clip_grad_norm_", "parameters", "len")


def item_at(file: str, line: int) -> str | None:
    """The code of what a loop around a backward iterates over, as its target; ``None`` where there is no such loop."""
    try:
        source = UserSource(file)
        loop = next(iter(source.loops_around(source.statement(line))), None)
    except UnclearEdit:
        return None
    head = _head(source, loop)
    return source.of(head.target) if head else source.of(loop.target) if isinstance(loop, ast.For) else None


def windowed(file: str, line: int, names: Mapping[str, Any], backwards: int) -> Windowed | None:
    """The loop around a backward as one over windows; ``None`` if it updates after each backward.

    Args:
        file: the user's.
        line: of the backward.
        names: the variables at the first backward, with their values.
        backwards: how many ran up to the first update; 0 if that is not known.

    Raises:
        StepUnclear: the loop adds up gradients, and can't be written so.
    """
    try:
        source = UserSource(file)
        back = source.statement(line)
        found = _loop_of(source, back, names)
        if found is None and backwards <= 1:
            return None
        where = f"{file}:{line}"
        if found is None:
            raise StepUnclear(
                f"the loop at {where} ran backward {backwards} times before its first update, and it was not seen by "
                f"which condition; where each update is to have {backwards} batches, iterate over "
                f"anybatch.windows(loader, batches={backwards}), give each window to one TrainStep, and divide the "
                "loss by no number of batches"
            )
        if backwards and found.many != backwards:
            raise StepUnclear(
                f"the loop at {where} ran backward {_times(backwards)} before its first update, and its condition at "
                f"line {found.update.lineno} is about {found.many} batches; where it counts from 0, write "
                f"(i + 1) % {found.batches} == 0, or iterate over anybatch.windows(loader, batches={found.batches})"
            )
        return _rewritten(found)
    except UnclearEdit as error:
        if backwards <= 1:
            return None
        raise StepUnclear(
            f"the loop at {file}:{line} adds up {backwards} gradients for an update, and its lines can't be changed in "
            f"one way only: {error}; iterate over anybatch.windows(loader, batches={backwards})"
        ) from None


def clean(text: str) -> str:
    """A text without the lines that stand in the place of others."""
    lines = text.splitlines(keepends=True)
    return "".join(one for one in lines if not one.strip().startswith(_GONE))


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


class _Head(NamedTuple):
    loader: ast.expr
    target: ast.expr  # of what the loader yields
    counter: ast.expr | None = None
    start: int = 0


def _head(source: UserSource, loop: ast.AST | None) -> _Head | None:
    """What a loop iterates over; ``None`` if that is no loader."""
    if not isinstance(loop, ast.For):
        return None
    head = _Head(loop.iter, loop.target)
    while True:
        node = head.loader
        if isinstance(node, ast.Name):  # such as progress = tqdm(loader)
            made = [one.value for one in nodes_in(source.scope(loop), ast.Assign) if _assigns(one, node.id)]
            node = made[0] if len(made) == 1 else node
        if not isinstance(node, ast.Call) or called(node) not in _WRAPS or not node.args:
            break
        head = head._replace(loader=node.args[0])
        if called(node) == "enumerate":
            given = [*node.args[1:], *(one.value for one in node.keywords)]
            start = given[0].value if given and isinstance(given[0], ast.Constant) else 0 if not given else None
            if not isinstance(head.target, ast.Tuple) or len(head.target.elts) != 2 or not isinstance(start, int):
                return None
            head = head._replace(target=head.target.elts[1], counter=head.target.elts[0], start=start)
    return None if called(head.loader) == "range" else head


def _assigns(statement: ast.Assign, name: str) -> bool:
    return any(isinstance(one, ast.Name) and one.id == name for one in statement.targets)


def _loop_of(source: UserSource, back: ast.stmt, names: Mapping[str, Any]) -> BatchLoop | None:
    """The loop around a backward, if an ``if`` behind it updates once every some batches."""
    loop = next(iter(source.loops_around(back)), None)
    head = _head(source, loop)
    if head is None or not isinstance(loop, ast.For) or back not in loop.body:
        return None
    for one in loop.body[loop.body.index(back) + 1 :]:
        if not isinstance(one, ast.If) or one.orelse or not any(_updates(source, one, names)):
            continue
        test = one.test
        if isinstance(test, ast.Name):  # such as is_last = (i + 1) % n == 0
            made = [each.value for each in nodes_in(loop.body, ast.Assign) if _assigns(each, test.id)]
            test = made[0] if len(made) == 1 else test
        parts = test.values if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.Or) else [test]
        cycles = [(part, node.right) for part in parts if (node := cycle_of(part)) is not None]
        many = number_of(source, cycles[0][1], names) if len(cycles) == 1 else None
        if many is not None and many > 1 and many == int(many):
            found = BatchLoop(source, back, names, loop, *head, one, source.of(cycles[0][1]), int(many))
            others = [part for part in parts if part is not cycles[0][0]]
            own = [call for call in _updates(source, loop, names) if one not in source.ancestors(call)]
            return found if not own and all(_is_last(found, part) for part in others) else None
    return None


def _is_last(found: BatchLoop, test: ast.expr) -> bool:
    """Whether a condition is that of the last batch of the loader."""
    source, loader = found.source, value_of(found.source.of(found.loader), found.names)
    if not isinstance(test, ast.Compare) or not isinstance(test.ops[0], ast.Eq) or not hasattr(loader, "__len__"):
        return False
    last = found.start + len(loader) - 1
    name = source.of(found.counter) if found.counter is not None else ""
    counters = {name: last, **{text: last + 1 for text, one in counters_of(found).items() if one is not None}}
    known = {**found.names, **counters}
    if not names_in([test]) & counters.keys() or any(called(one) != "len" for one in nodes_in(test, ast.Call)):
        return False
    try:
        return bool(eval(source.of(test), dict(known)))
    except Exception:  # noqa: BLE001 - the user's names, which may not exist yet
        return False


def _updates(source: UserSource, node: ast.AST, names: Mapping[str, Any]) -> Iterator[ast.Call]:
    """The calls of an optimizer's step, or of a scaler's."""
    kinds = (torch.optim.Optimizer, torch.amp.GradScaler)
    for call in source.calls(node, "step"):
        if isinstance(call.func, ast.Attribute) and isinstance(value_of(source.of(call.func.value), names), kinds):
            yield call


def _rewritten(found: BatchLoop) -> Windowed:
    check_each(found)
    source = found.source
    window = free_name(set(found.names) | stored([source.tree]), "window")
    moves = [one for one in found.loop.body if _only_moves(found, one)]
    changes = [source.replaced(found.loader, f"anybatch.windows({source.of(found.loader)}, batches={found.batches})")]
    changes += [source.commented(one, _GONE) for one in moves]
    division = _division(found)
    changes += [*division.changes, *sums(found, window), *counted(found, window)]
    changes += [*_totals(found), *_lengths(found), *_tail(found)]
    text = source.edit(changes).after
    for line in [found.update.lineno, *(one.lineno for one in found.loop.body if is_first(found, one))]:
        summed = UserSource(source.path, text)
        text = summed.edit(summed.dedented(next(_ifs_at(summed, line)), _GONE)).after
    note = f"# an iteration is one update of {found.many} batches"
    if not division.is_found:
        note += f"; their gradients were added up, and this is the mean: 1 / {found.many} of it"
    if counters := sorted({source.of(node) for one in found.each(ast.If) for node in counts_in(found, one.test)}):
        note += f"; a condition on {' or '.join(counters)} is met with the update of the batch that meets it"
    return Windowed(
        text, source.of(found.target), window, tuple(map(source.of, moves)), f"{note}\n",
        divided=found.many if division.is_found else 1,
        changed=changed_each(found),
        first=first_lines(found if _is_read(source, text, found) else found._replace(counter=None), window),
        scale=division.scale,
        apart=division.apart,
    )  # fmt: skip


def _ifs_at(source: UserSource, line: int) -> Iterator[ast.If]:
    return (one for one in nodes_in(source.tree, ast.If) if one.lineno == line)


def _is_read(source: UserSource, text: str, found: BatchLoop) -> bool:
    """Whether the number of the iteration is read in the loop or behind it."""
    changed = UserSource(source.path, text)
    loop = next(one for one in nodes_in(changed.tree, ast.For) if one.lineno == found.loop.lineno)
    name = source.of(found.counter) if found.counter is not None else ""
    reads = [one for one in nodes_in(changed.scope(loop), ast.Name) if one.id == name and isinstance(one.ctx, ast.Load)]
    others = [one for one in nodes_in(changed.scope(loop), ast.For) if one is not loop and name in stored([one.target])]
    return any(not set(others) & set(changed.ancestors(one)) for one in reads)


def _totals(found: BatchLoop) -> Iterator[Change]:
    """What keeps the length of a progress bar."""
    for call in nodes_in(found.source.scope(found.loop), ast.Call):
        for one in call.keywords:
            if one.arg == "total" and called(call) in _WRAPS and found.loader in ast.walk(call):
                yield found.source.replaced(one.value, f"-(-{found.source.of(one.value)} // {found.batches})")


def _lengths(found: BatchLoop) -> Iterator[Change]:
    """What keeps ``len(bar)`` the number of batches, where ``bar = tqdm(loader)``."""
    source, scope = found.source, found.source.scope(found.loop)
    bars = [one for one in nodes_in(scope, ast.Assign) if found.loader in ast.walk(one.value)]
    names = {to.id for one in bars for to in one.targets if isinstance(to, ast.Name)}
    for call in nodes_in(scope, ast.Call):
        if called(call) == "len" and len(call.args) == 1 and source.of(call.args[0]) in names:
            if any(isinstance(one, ast.JoinedStr) for one in source.ancestors(call)):
                raise StepUnclear(
                    f"{found.where(call)} reads {source.of(call)}, which would be the number of windows; read "
                    f"len({source.of(found.loader)}) there"
                )
            yield source.replaced(call.args[0], source.of(found.loader))


def _only_moves(found: BatchLoop, statement: ast.stmt) -> bool:
    """Whether a statement only moves what the loader yields to a device, as a step does by itself."""
    if not isinstance(statement, ast.Assign) or len(statement.targets) != 1:
        return False
    return _are_moved(found, statement.targets[0], statement.value)


def _are_moved(found: BatchLoop, target: ast.expr, value: ast.expr) -> bool:
    """Whether variables of a batch get their own values, on a device."""
    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and len(target.elts) == len(value.elts):
        return all(_are_moved(found, *pair) for pair in zip(target.elts, value.elts, strict=True))
    if not isinstance(target, ast.Name) or target.id not in found.item_names:
        return False
    if isinstance(value, ast.Call) and called(value) in ("tuple", "list") and len(value.args) == 1:
        value = value.args[0]
    if not isinstance(value, ast.DictComp | ast.ListComp | ast.GeneratorExp):
        return _is_moved(found, value, target.id)
    own = value.generators[0]
    over = f"{target.id}.items()" if isinstance(value, ast.DictComp) else target.id
    if len(value.generators) > 1 or own.ifs or found.source.of(own.iter) != over:
        return False
    if not isinstance(value, ast.DictComp):
        return isinstance(own.target, ast.Name) and _is_moved(found, value.elt, own.target.id)
    names = (
        [one.id for one in own.target.elts if isinstance(one, ast.Name)] if isinstance(own.target, ast.Tuple) else []
    )
    return len(names) == 2 and found.source.of(value.key) == names[0] and _is_moved(found, value.value, names[1])


def _is_moved(found: BatchLoop, node: ast.expr, name: str) -> bool:
    """Whether an expression is a variable on a device, or that of a tensor and else the variable itself."""
    if isinstance(node, ast.IfExp) and called(node.test) in ("isinstance", "is_tensor", "hasattr"):
        return found.source.of(node.orelse) == name and _is_moved(found, node.body, name)
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return False
    if not (node.func.attr == "to" or _is_type(node.func.attr)) or found.source.of(node.func.value) != name:
        return False
    given = [*node.args[:1], *(one.value for one in node.keywords if one.arg == "device")]
    others = [one for one in node.keywords if one.arg not in ("device", "non_blocking")]
    return not others and len(node.args) < 2 and all(_is_device(found, one) for one in given)


def _is_type(name: str) -> bool:
    """Whether a name is that of a type of device, as the method is that moves to one."""
    try:
        return torch.device(name).type == name
    except RuntimeError:
        return False


def _is_device(found: BatchLoop, node: ast.expr) -> bool:
    value = node.value if isinstance(node, ast.Constant) else value_of(found.source.of(node), found.names)
    return isinstance(value, torch.device | str | int) and not isinstance(value, bool)


class _Division(NamedTuple):
    """How a loop divides a loss by the number of batches."""

    changes: Sequence[Change] = ()  # that take the division out
    is_found: bool = False
    scale: str = ""  # what the loop reads of the loss, times that
    apart: int = 0  # the line of a division that stays, behind the step


class _Scaled(NamedTuple):
    inner: ast.expr  # what is divided by the number of batches
    scale: str  # the code behind it, such as ``/ 4``


def _division(found: BatchLoop) -> _Division:
    """What takes the division by the number of batches out of the loss; without one there is nothing to take out."""
    source, back = found.source, found.back
    call = back.value if isinstance(back, ast.Expr) else None
    loss = call.func.value if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) else None
    if isinstance(loss, ast.Call) and called(loss) == "scale" and loss.args:
        loss = loss.args[0]
    if (scaled := _scaled(found, loss)) is not None and loss is not None:
        return _Division([source.replaced(loss, source.of(scaled.inner))], is_found=True)
    name = loss.id if isinstance(loss, ast.Name) else ""
    makes = [one for one in nodes_in(found.loop.body, ast.stmt) if not hasattr(one, "body") and name in stored([one])]
    makes = sorted((one for one in makes if one.lineno < back.lineno), key=lambda one: one.lineno)
    if makes and (scaled := _scaled_by(found, makes[-1], name)) is not None:
        last = makes[-1]
        if not isinstance(scaled.inner, ast.Name) or scaled.inner.id != name:
            _check_always(found, last)
            value = last.value if isinstance(last, ast.Assign) else scaled.inner
            return _Division([source.replaced(value, source.of(scaled.inner))], is_found=True, scale=scaled.scale)
        return _division_alone(found, makes, name, scaled.scale)
    _check_parts(found)
    return _Division()


def _division_alone(found: BatchLoop, makes: Sequence[ast.stmt], name: str, scale: str) -> _Division:
    """A division in a line of its own, or in an ``if n > 1:`` of its own."""
    source, whole = found.source, makes[-1]
    outer = source.parent(whole)
    is_own = isinstance(outer, ast.If) and outer.body == [whole] and not outer.orelse
    if isinstance(outer, ast.If) and is_own and found.batches in source.of(outer.test):
        whole = outer  # such as if n > 1:
    _check_always(found, whole)
    begin = makes[-2].lineno if len(makes) > 1 else found.loop.lineno
    reads = [one for one in nodes_in(found.loop.body, ast.Name) if one.id == name and begin < one.lineno < whole.lineno]
    if not reads:
        return _Division([source.commented(whole, _GONE)], is_found=True, scale=scale)
    if whole not in found.loop.body:
        raise StepUnclear(
            f"{found.where(reads[0])} reads {name!r} before line {whole.lineno} divides it by {found.batches}; divide "
            f"it in the line of the backward, as in ({name} / {found.batches}).backward()"
        )
    return _Division(is_found=True, apart=whole.lineno)


def _check_always(found: BatchLoop, statement: ast.stmt) -> None:
    """Refuses a division that a condition may leave out."""
    around = list(found.source.ancestors(statement))
    if any(isinstance(one, ast.If | ast.Try | ast.For | ast.While) for one in around[: around.index(found.loop)]):
        raise StepUnclear(
            f"{found.where(statement)} divides the loss in a block that may not run; divide it in the line of the "
            f"backward, as in (loss / {found.batches}).backward()"
        )


def _check_parts(found: BatchLoop) -> None:
    """Refuses a division that may be that of the loss by the number of batches."""
    for node in nodes_in([one for one in found.loop.body if one.lineno <= found.back.lineno], ast.expr):
        if _scaled(found, node) is not None:
            raise StepUnclear(
                f"{found.where(node)} may divide the loss, or divides a part of the loss by {found.batches}, the "
                "number of batches of an update, by which anybatch weighs them itself; divide the whole loss by it in "
                f"the line of the backward, as in (loss / {found.batches}).backward()"
            )


def _scaled(found: BatchLoop, node: ast.expr | None) -> _Scaled | None:
    """What an expression divides by the number of batches, and how."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div | ast.Mult):
        sides = [(node.left, node.right), (node.right, node.left)][: 1 if isinstance(node.op, ast.Div) else 2]
        is_division = isinstance(node.op, ast.Div)
    elif isinstance(node, ast.Call) and called(node).rstrip("_") in ("div", "true_divide", "divide", "mul", "multiply"):
        given = [*([node.func.value] if isinstance(node.func, ast.Attribute) else []), *node.args][-2:]
        sides = [(given[0], given[1])] if len(given) == 2 and not node.keywords else []
        is_division = not called(node).startswith("mul")
    else:
        return None
    for inner, other in sides:
        number = found.number(other)
        if number and math.isclose(number if is_division else 1 / number, found.many):
            text = found.source.of(other)
            text = f"({text})" if isinstance(other, ast.BinOp) else text
            return _Scaled(inner, f" {'/' if is_division else '*'} {text}")
    return None


def _scaled_by(found: BatchLoop, statement: ast.stmt, name: str) -> _Scaled | None:
    """What a statement that gives a loss its value divides by the number of batches."""
    if isinstance(statement, ast.AugAssign) and isinstance(statement.op, ast.Div | ast.Mult):
        return _scaled(found, ast.BinOp(statement.target, statement.op, statement.value))
    if isinstance(statement, ast.Assign) or (isinstance(statement, ast.Expr) and name):
        return _scaled(found, statement.value)
    return None


def _tail(found: BatchLoop) -> Iterator[Change]:
    """What takes the update of a short last window out, which each window ends with."""
    source, scope = found.source, found.source.scope(found.loop)
    block = source.block(found.loop)
    others = [one for one in _updates(source, scope, found.names) if found.update not in source.ancestors(one)]
    later = block[block.index(found.loop) + 1 :]
    for statement in later[:1]:
        inside = [one for one in others if statement in (source.around(one), *source.ancestors(one))]
        if inside and all(called(one) in _OF_UPDATES for one in nodes_in(statement, ast.Call)):
            yield source.commented(statement, _GONE)
            others = [one for one in others if one not in inside]
    if others:
        raise StepUnclear(
            f"{source.path}:{others[0].lineno} updates, too, beside line {found.update.lineno}; a window of "
            "anybatch.windows may be the last, shorter one, and ends with the one update"
        )


def joined(step: LoopStep, later: Sequence[ast.AST]) -> list[str]:
    """The lines that join what is read of the batches of a window once its step is done.

    Raises:
        StepUnclear: it can't be joined by its rows.
    """
    windowed = step.windowed
    own = {} if windowed is None else {one: step.names[one] for one in windowed.names}
    needed = inputs_of(list(later)) & own.keys()
    if windowed is None or not needed:
        return []
    moves = [text for text in windowed.moves if names_in([ast.parse(text)], ast.Store) & needed]
    for text in moves:
        needed |= names_in([ast.parse(text)]) & own.keys()
    lines = list[str]()
    for name in sorted(needed):
        keys = _keys_of(later, name)
        parts = [own[name]] if keys is None else [own[name].get(key) for key in keys] if _is_mapping(own[name]) else []
        if not parts or not all(isinstance(one, torch.Tensor) and one.dim() for one in parts):
            reader = next(one for one in later if name in names_in([one]))
            raise StepUnclear(
                f"{step.where(reader)} reads {name!r} of each batch, and an iteration over anybatch.windows has "
                "several of them; have the loss function return what it makes of it with the loss, as an anybatch.Mean"
            )
        each = f"for {windowed.item} in {windowed.window}]"
        joins = [f'"{key}": torch.cat([{name}["{key}"] {each})' for key in keys or ()]
        lines.append(f"{name} = {{{', '.join(joins)}}}" if keys else f"{name} = torch.cat([{name} {each})")
    return [*lines, *moves]


def _is_mapping(value: object) -> TypeGuard[Mapping[str, Any]]:
    return isinstance(value, Mapping)


def _keys_of(nodes: Sequence[ast.AST], name: str) -> list[str] | None:
    """The keys by which a variable is read; ``None`` if it is read as a whole."""
    items = [one for one in nodes_in(nodes, ast.Subscript) if isinstance(one.value, ast.Name) and one.value.id == name]
    keys = [
        one.slice.value for one in items if isinstance(one.slice, ast.Constant) and isinstance(one.slice.value, str)
    ]
    reads = [one for one in nodes_in(nodes, ast.Name) if one.id == name]
    return list(dict.fromkeys(keys)) if len(keys) == len(reads) else None
