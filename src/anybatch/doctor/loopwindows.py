"""A loop that adds up the gradients of several batches by hand, written as a loop over windows of its loader."""

import ast
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeGuard

import torch

from anybatch.doctor.crashing.usercode import called, names_in, nodes_in
from anybatch.doctor.fixes.source import Change, UnclearEdit, UserSource
from anybatch.doctor.loopnames import free_name, inputs_of, stored
from anybatch.doctor.loopparts import LoopStep, StepUnclear, Windowed, value_of

_GONE = "# of a micro-batch alone"
"""A line in the place of one that goes, so that the lines below keep their numbers."""
_WRAPS = ("enumerate", "tqdm", "track")
_MOVES = ("to", "items", "dict")
_OF_UPDATES = ("step", "zero_grad", "update", "unscale_", "clip_grad_norm_", "parameters", "len")


class _Loop(NamedTuple):
    source: UserSource
    back: ast.stmt
    names: Mapping[str, Any]
    loop: ast.For
    loader: ast.expr
    target: ast.expr  # of what the loader yields
    counter: ast.expr | None  # the target of the number of the iteration
    start: int  # that of the first iteration
    update: ast.If
    batches: str  # the code of how many make an update
    many: int  # its value

    def is_many(self, node: ast.expr) -> bool:
        """Whether an expression is the number of batches of an update."""
        return _number(self.source, node, self.names) == self.many

    @property
    def item_names(self) -> set[str]:
        return {one.id for one in nodes_in(self.target, ast.Name)}


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
                f"the loop at {where} adds up {backwards} gradients for an update, and it was not seen by which "
                f"condition; iterate over anybatch.windows(loader, batches={backwards}), give each window to one "
                "TrainStep, and divide the loss by no number of batches"
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


def _number(source: UserSource, node: ast.expr, names: Mapping[str, Any]) -> int | None:
    """The value of a constant, or of a name with attributes, that is a whole number."""
    value: object = node.value if isinstance(node, ast.Constant) else value_of(source.of(node), names)
    return int(value) if isinstance(value, int | float) and value == int(value) else None


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


def _loop_of(source: UserSource, back: ast.stmt, names: Mapping[str, Any]) -> _Loop | None:
    """The loop around a backward, if an ``if`` behind it updates once every some batches."""
    loop = next(iter(source.loops_around(back)), None)
    head = _head(source, loop)
    if head is None or not isinstance(loop, ast.For) or back not in loop.body:
        return None
    for one in loop.body[loop.body.index(back) + 1 :]:
        if not isinstance(one, ast.If) or one.orelse or not any(_updates(source, one, names)):
            continue
        parts = one.test.values if isinstance(one.test, ast.BoolOp) and isinstance(one.test.op, ast.Or) else [one.test]
        cycles = [node for part in parts if (node := _cycle(part)) is not None]
        many = _number(source, cycles[0], names) if len(cycles) == 1 else None
        if many is not None and many > 1:
            return _Loop(source, back, names, loop, *head, one, source.of(cycles[0]), many)
    return None


def _cycle(test: ast.expr) -> ast.expr | None:
    """The n of a test such as ``(i + 1) % n == 0``."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        left = test.operand
    elif isinstance(test, ast.Compare) and len(test.ops) == 1 and isinstance(test.ops[0], ast.Eq):
        left = test.left
    else:
        return None
    return left.right if isinstance(left, ast.BinOp) and isinstance(left.op, ast.Mod) else None


def _updates(source: UserSource, node: ast.AST, names: Mapping[str, Any]) -> Iterator[ast.Call]:
    """The calls of an optimizer's step, or of a scaler's."""
    kinds = (torch.optim.Optimizer, torch.amp.GradScaler)
    for call in source.calls(node, "step"):
        if isinstance(call.func, ast.Attribute) and isinstance(value_of(source.of(call.func.value), names), kinds):
            yield call


def _rewritten(found: _Loop) -> Windowed:
    source = found.source
    window = free_name(set(found.names) | stored([source.tree]), "window")
    moves = [one for one in found.loop.body if _only_moves(found, one)]
    changes = [source.replaced(found.loader, f"anybatch.windows({source.of(found.loader)}, batches={found.batches})")]
    changes += [source.commented(one, _GONE) for one in moves]
    divided, name, line = _division(found)
    changes += [*divided, *_sums(found, window, name, line), *_counters(found, window)]
    changes += [*_totals(found), *_tail(found)]
    summed = UserSource(source.path, source.edit(changes).after)
    update = next(one for one in nodes_in(summed.tree, ast.If) if one.lineno == found.update.lineno)
    text = summed.edit(summed.dedented(update, _GONE)).after
    note = f"# an iteration is one update of {found.many} batches"
    if not divided:
        note += f"; their gradients were added up, and this is the mean: 1 / {found.many} of it"
    moved = tuple(map(source.of, moves))
    return Windowed(text, source.of(found.target), window, moved, f"{note}\n", found.many if divided else 1)


def _counters(found: _Loop, window: str) -> Iterator[Change]:
    """What keeps the number of the iteration that of a batch, the last of its window, but for each n-th one."""
    source, node, start = found.source, found.counter, found.start
    for one in nodes_in(found.loop.body, ast.Name) if isinstance(node, ast.Name) else ():
        around = [outer for outer in source.ancestors(one) if isinstance(outer, ast.BinOp)]
        around = [outer for outer in around if source.around(outer) is source.around(one)]
        if one.id != source.of(found.counter or one) or any(isinstance(outer.op, ast.Mod) for outer in around):
            continue
        next_one = next((outer for outer in around if source.of(outer) == f"{one.id} + 1"), None)
        less = 1 - start - (next_one is not None)
        before = f"({one.id} - {start})" if start else one.id
        behind = f" - {less}" if less > 0 else f" + {-less}" if less else ""
        yield source.replaced(next_one or one, f"({before} * {found.batches} + len({window}){behind})")


def _totals(found: _Loop) -> Iterator[Change]:
    """What keeps the length of a progress bar."""
    for call in nodes_in(found.source.scope(found.loop), ast.Call):
        for one in call.keywords:
            if one.arg == "total" and called(call) in _WRAPS and found.loader in ast.walk(call):
                yield found.source.replaced(one.value, f"-(-{found.source.of(one.value)} // {found.batches})")


def _only_moves(found: _Loop, statement: ast.stmt) -> bool:
    """Whether a statement only moves what the loader yields to a device, as a step does by itself."""
    if not isinstance(statement, ast.Assign) or not names_in(statement.targets, ast.Store) <= found.item_names:
        return False
    calls = list(nodes_in(statement.value, ast.Call))
    if not calls or not all(called(one) in _MOVES or _is_type(called(one)) for one in calls):
        return False
    given = [one for call in calls for one in (*call.args, *(k.value for k in call.keywords if k.arg == "device"))]
    return all(_is_device(found, one) for one in given)


def _is_type(name: str) -> bool:
    """Whether a name is that of a type of device, as the method is that moves to one."""
    try:
        return torch.device(name).type == name
    except RuntimeError:
        return False


def _is_device(found: _Loop, node: ast.expr) -> bool:
    value = node.value if isinstance(node, ast.Constant) else value_of(found.source.of(node), found.names)
    return isinstance(value, torch.device | str)


def _division(found: _Loop) -> tuple[list[Change], str, int]:
    """What takes the division by the number of batches out of the loss, and the name and line from which it had it.

    Without one there is nothing to take out.
    """
    source, back = found.source, found.back
    call = back.value if isinstance(back, ast.Expr) else None
    loss = call.func.value if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) else None
    if isinstance(loss, ast.Call) and called(loss) == "scale" and loss.args:
        loss = loss.args[0]
    if (divided := _divided(found, loss)) is not None and loss is not None:
        return [source.replaced(loss, source.of(divided))], "", back.lineno
    ahead = [node for node in nodes_in(found.loop.body, ast.stmt) if node.lineno < back.lineno]
    name = loss.id if isinstance(loss, ast.Name) else ""
    for one in sorted(ahead, key=lambda one: one.lineno, reverse=True):
        if hasattr(one, "body") or name not in names_in([one], ast.Store):
            continue
        is_gone = isinstance(one, ast.AugAssign) and isinstance(one.op, ast.Div) and found.is_many(one.value)
        divided = _divided(found, one.value) if isinstance(one, ast.Assign) else None
        if is_gone or (isinstance(divided, ast.Name) and divided.id == name):
            return [source.commented(one, _GONE)], name, one.lineno
        if isinstance(one, ast.Assign) and divided is not None:
            return [source.replaced(one.value, source.of(divided))], name, one.lineno
        break
    _check_parts(found)
    return [], "", back.lineno


def _check_parts(found: _Loop) -> None:
    """Refuses a division of a part of the loss by the number of batches."""
    for node in nodes_in([one for one in found.loop.body if one.lineno <= found.back.lineno], ast.BinOp):
        if isinstance(node.op, ast.Div) and found.is_many(node.right):
            raise StepUnclear(
                f"{found.source.path}:{node.lineno} divides a part of the loss by {found.batches}, the number of "
                "batches of an update, by which anybatch weighs them itself; divide the whole loss by it, in the line "
                "of the backward"
            )


def _divided(found: _Loop, node: ast.expr | None) -> ast.expr | None:
    """What an expression divides by the number of batches."""
    is_so = isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div) and found.is_many(node.right)
    return node.left if is_so and isinstance(node, ast.BinOp) else None


def _sums(found: _Loop, window: str, divided: str, line: int) -> Iterator[Change]:
    """What keeps sums over batches: a scalar of a window is the mean of its batches', but for a loss that was divided.

    Args:
        found: the loop.
        window: the name of a window.
        divided: the name of the loss if it was divided; from then on its sum is that of the windows.
        line: of the division.
    """
    source = found.source
    products = [one for one in nodes_in(source.scope(found.loop), ast.BinOp) if isinstance(one.op, ast.Mult)]
    again = [one for one in products if found.is_many(one.right) and divided in names_in([one.left])]
    yield from (source.replaced(one, source.of(one.left)) for one in again)
    for one in found.loop.body:
        if not isinstance(one, ast.AugAssign) or not isinstance(one.op, ast.Add):
            continue
        read = names_in([one.value])
        is_mean = any(isinstance(found.names.get(name), torch.Tensor) and not found.names[name].dim() for name in read)
        is_whole = divided not in read or one.lineno < line or any(node in again for node in ast.walk(one.value))
        if isinstance(one.value, ast.Constant) and one.value.value == 1:
            yield source.replaced(one.value, f"len({window})")
        elif isinstance(one.value, ast.Constant) or (is_mean and is_whole and not read & found.item_names):
            yield Change(source.start(one.value), source.start(one.value), "(" if _is_loose(one.value) else "")
            yield source.behind(one.value, f"{')' if _is_loose(one.value) else ''} * len({window})")


def _is_loose(node: ast.expr) -> bool:
    """Whether an expression needs parentheses to be multiplied."""
    is_product = isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult | ast.Div)
    return not isinstance(node, ast.Call | ast.Name | ast.Attribute | ast.Constant | ast.Subscript) and not is_product


def _tail(found: _Loop) -> Iterator[Change]:
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
