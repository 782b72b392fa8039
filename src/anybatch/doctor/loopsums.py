"""What keeps the counters and sums of a loop over batches once an iteration has several of them."""

import ast
from collections.abc import Iterator

import torch

from anybatch.doctor.crashing.usercode import called, names_in, nodes_in
from anybatch.doctor.fixes.source import Change
from anybatch.doctor.loopbatches import BatchLoop, counters_of, counts_in
from anybatch.doctor.loopnames import stored
from anybatch.doctor.loopparts import StepUnclear, value_of

_SIZES = ("len", "size", "numel", "nelement", "count_nonzero")
_TIMES = ("time", "perf_counter", "monotonic")
_SAME = ("item", "float", "int", "detach", "cpu", "double", "clone", "numpy", "tolist", "to", "round")
_LISTS = (ast.List, ast.Tuple, ast.ListComp, ast.JoinedStr)


def counted(found: BatchLoop, window: str) -> Iterator[Change]:
    """What has conditions on counters met in the iteration whose window has the batch, as each 100th one."""
    source, tests = found.source, set[ast.AST]()
    for node in found.each(ast.expr):
        _check_sum(found, node)
        if not _is_in_text(found, node) and (changes := _met(found, node, window)):
            tests.add(node)
            yield from changes
    for one in counts_in(found, found.loop):
        if _is_of_first(found, one, tests):
            yield source.replaced(one, f"({source.of(one)} + 1 - len({window}))")


def _check_sum(found: BatchLoop, node: ast.expr) -> None:
    """Refuses a condition that a sum over batches meets at one of them, as a number of samples may."""
    pairs = filter(None, map(found.added, found.each(ast.stmt)))
    sums = {found.source.of(pair[0]) for pair in pairs} - counters_of(found).keys()
    compared = [node.left] if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod) else []
    if isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.Eq | ast.NotEq):
        compared = [node.left, *node.comparators]
    for one in (inner for part in compared for inner in nodes_in(part, ast.expr)):
        if isinstance(one, ast.Name | ast.Attribute | ast.Subscript) and found.source.of(one) in sums:
            raise StepUnclear(
                f"{found.where(node)} compares {found.source.of(one)!r}, a sum over batches, and an iteration over "
                "anybatch.windows adds several of them; have it compare with < or >, or count batches by 1"
            )


def first_lines(found: BatchLoop, window: str) -> str:
    """The lines that make the number of an iteration that of the last batch of its window, and other counters so."""
    name, start = found.source.of(found.counter) if isinstance(found.counter, ast.Name) else "", found.start
    before = f"({name} - {start})" if start else name
    behind = f" - {1 - start}" if start < 1 else f" + {start - 1}" if start > 1 else ""
    lines = [f"{name} = {before} * {found.batches} + len({window}){behind}  # the last batch of the window"]
    late = [text for text, one in counters_of(found).items() if one is not None and _counts_late(found, text, one)]
    return "\n".join([*(lines if name else []), *(f"{text} += len({window}) - 1" for text in late)])


def _counts_late(found: BatchLoop, text: str, statement: ast.stmt) -> bool:
    """Whether an iteration reads the number of batches before it adds 1 to it."""
    is_counter = statement in found.loop.body and counters_of(found).get(text) is statement
    reads = (one for one in counts_in(found, found.loop) if found.source.of(one) == text)
    return is_counter and any(one.lineno < statement.lineno for one in reads)


def cycle_of(test: ast.expr) -> ast.BinOp | None:
    """The ``(i + 1) % n`` of a test such as ``(i + 1) % n == 0``."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        left = test.operand
    elif isinstance(test, ast.Compare) and len(test.ops) == 1 and isinstance(test.ops[0], ast.Eq):
        left = test.left
    else:
        return None
    return left if isinstance(left, ast.BinOp) and isinstance(left.op, ast.Mod) else None


def is_first(found: BatchLoop, statement: ast.stmt | None) -> bool:
    """Whether an ``if`` before the backward is about the first batch of each window, as ``if i % n == 0:``."""
    if not isinstance(statement, ast.If) or statement.orelse or statement not in found.loop.body:
        return False
    cycle, counters = cycle_of(statement.test), counters_of(found)
    text = found.source.of(cycle.left) if cycle is not None else ""
    if cycle is None or statement.lineno > found.back.lineno or not found.is_many(cycle.right) or text not in counters:
        return False
    if isinstance(statement.test, ast.Compare) and not _is_zero(statement.test.comparators[0]):
        return False
    return (counters[text] is None and not found.start) or getattr(counters[text], "lineno", 0) > statement.lineno


def _is_zero(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value == 0


def _if_around(found: BatchLoop, node: ast.AST) -> ast.stmt | None:
    return next((one for one in found.loop.body if one in (node, *found.source.ancestors(node))), None)


def _is_in_text(found: BatchLoop, node: ast.AST) -> bool:
    """Whether a node is in an f-string, whose parts have no places of their own before Python 3.12."""
    return any(isinstance(one, ast.JoinedStr) for one in found.source.ancestors(node))


def _is_of_first(found: BatchLoop, node: ast.expr, tests: set[ast.AST]) -> bool:
    """Whether the number of a batch has to be that of the first in its window, and not of the last.

    So it is in an ``if`` for the first batch, and in ``i % 100 == 0 and i > 0``.
    """
    around = list(found.source.ancestors(node))
    if _is_in_text(found, node) or tests & set(around):
        return False
    both = [one for one in around if isinstance(one, ast.BoolOp) and isinstance(one.op, ast.And)]
    return is_first(found, _if_around(found, node)) or any(tests & set(one.values) for one in both)


def _met(found: BatchLoop, node: ast.expr, window: str) -> list[Change]:
    """A condition that one batch meets as that of its window; none for another expression."""
    source, cycle = found.source, cycle_of(node)
    if is_first(found, _if_around(found, node)):
        return []
    if isinstance(node, ast.UnaryOp) and cycle is not None and counts_in(found, cycle.left):
        start = source.start(node)
        return [Change(start, start + len("not "), ""), source.behind(node, f" < len({window})")]
    if not isinstance(node, ast.Compare) or len(node.ops) != 1 or counts_in(found, node.comparators[0]):
        return []
    is_equal, left, right = isinstance(node.ops[0], ast.Eq), node.left, node.comparators[0]
    is_cycle = isinstance(left, ast.BinOp) and isinstance(left.op, ast.Mod) and bool(counts_in(found, left.left))
    if not counts_in(found, left) or not isinstance(node.ops[0], ast.Eq | ast.NotEq):
        return []
    if not is_cycle and not is_equal:
        return []
    sign, is_zero = b"==" if is_equal else b"!=", _is_zero(right)
    begin = source.end(left) - source.start(node)
    at = source.end(left) + source.of(node).encode()[begin:].index(sign)
    value = source.of(right) if isinstance(right, ast.Constant | ast.Name | ast.Call) else f"({source.of(right)})"
    ahead, less = "", "" if is_zero else f"- {value} "
    if not is_cycle:
        ahead = "0 <= "
    elif isinstance(left, ast.BinOp) and not is_zero:
        ahead, less = "(", f"{less.rstrip()}) % {source.of(left.right)} "
    than = "<" if is_equal else ">="
    changed = [Change(at, source.end(node), f"{less}{than} len({window})")]
    return [*([Change(source.start(node), source.start(node), ahead)] if ahead else []), *changed]


def sums(found: BatchLoop, window: str) -> Iterator[Change]:
    """What keeps sums over batches: what of a window is a mean counts for each of its batches.

    Raises:
        StepUnclear: it is not known whether what is added up is a mean or a sum.
    """
    source = found.source
    for one in found.each(ast.stmt):
        if (pair := found.added(one)) is not None and not isinstance(pair[1], _LISTS):
            target, value = pair
            grows = _grows(found, value, frozenset())
            if grows is None:
                raise StepUnclear(
                    f"{found.where(one)} adds {source.of(value)} of each batch to {source.of(target)!r}, and it was "
                    "not seen whether for all batches of a window it would be their mean or their sum; add up a loss, "
                    "as by loss.item(), or a sum over the samples, as by (...).sum().item()"
                )
            if _counts_late(found, source.of(target), one):
                continue
            if isinstance(value, ast.Constant) and value.value == 1:
                yield source.replaced(value, f"len({window})")
            elif not grows:
                is_loose = _is_loose(value)
                yield Change(source.start(value), source.start(value), "(" if is_loose else "")
                yield source.behind(value, f"{')' if is_loose else ''} * len({window})")
        call = one.value if isinstance(one, ast.Expr) else None
        if isinstance(call, ast.Call) and called(call) == "update" and [*map(source.of, call.args)] == ["1"]:
            yield source.replaced(call.args[0], f"len({window})")  # of a progress bar
        if isinstance(call, ast.Call) and called(call) == "append" and len(call.args) == 1:
            yield from _appended(found, call, window)


def _appended(found: BatchLoop, call: ast.Call, window: str) -> Iterator[Change]:
    """What has a list of numbers one for each batch, as for a mean over ``len(loader)``."""
    source, number = found.source, call.args[0]
    around = [one for one in source.ancestors(call) if isinstance(one, ast.If) and found.loop in source.ancestors(one)]
    if not isinstance(call.func, ast.Attribute) or any(counts_in(found, one.test) for one in around):
        return
    if _grows(found, number, frozenset()) is False:
        yield Change(source.end(call.func.value), source.start(number), ".extend([")
        yield source.behind(number, f"] * len({window})")


def _is_loose(node: ast.expr) -> bool:
    """Whether an expression needs parentheses to be multiplied."""
    is_product = isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult | ast.Div)
    return not isinstance(node, ast.Call | ast.Name | ast.Attribute | ast.Constant | ast.Subscript) and not is_product


def _grows(found: BatchLoop, node: ast.expr, seen: frozenset[str]) -> bool | None:
    """Whether a value grows with the samples, as a sum does and a mean does not; ``None`` if that is not known."""
    if isinstance(node, ast.BinOp):
        return _of_two(found, node, seen)
    if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Attribute) and node.value.attr == "shape":
        return _is_of_batch(found, node.value) and _is_zero(node.slice)
    if isinstance(node, ast.Constant):
        return False if isinstance(node.value, int | float) else None
    if isinstance(node, ast.Call):
        return _of_call(found, node, seen)
    text = found.source.of(node)
    value = value_of(text, found.names) if text.replace(".", "").isidentifier() else None
    if isinstance(value, torch.Tensor) and not value.dim() and value.grad_fn is not None:
        return False  # a mean, such as the loss
    given = [one.value for one in found.each(ast.Assign) for to in one.targets if found.source.of(to) == text]
    if given and text not in seen:
        kinds = {_grows(found, one, seen | {text}) for one in given}
        if len(kinds) == 1 and None not in kinds:
            return kinds.pop()
    return False if isinstance(value, int | float) and not given else None


def _of_two(found: BatchLoop, node: ast.BinOp, seen: frozenset[str]) -> bool | None:
    left, right = (_grows(found, one, seen) for one in (node.left, node.right))
    if left is None or right is None:
        return None
    if isinstance(node.op, ast.Mult):
        return None if left and right else left or right
    if isinstance(node.op, ast.Div):
        return left if not right else False if left else None
    return left if left == right and isinstance(node.op, ast.Add | ast.Sub) else None


def _of_call(found: BatchLoop, node: ast.Call, seen: frozenset[str]) -> bool | None:
    name, is_method = called(node), isinstance(node.func, ast.Attribute)
    inner = node.func.value if isinstance(node.func, ast.Attribute) else node.args[0] if node.args else None
    if inner is None or name in _TIMES:
        return True if name in _TIMES else None
    if name in _SIZES:
        return _is_of_batch(found, inner) and not (name == "size" and node.args and not _is_zero(node.args[0]))
    if name == "sum" and is_method:
        return None if node.args or node.keywords else _grows(found, inner, seen) is not False
    if name == "mean" and is_method:
        return None if node.args or node.keywords else False
    return _grows(found, inner, seen) if name in _SAME else None


def _is_of_batch(found: BatchLoop, node: ast.expr) -> bool:
    """Whether an expression reads what is new in each iteration."""
    return bool(names_in([node]) & (found.item_names | stored(found.loop.body)))
