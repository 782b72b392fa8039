"""What is held out: masks of the rows, and rows, that the training and the evaluation have in common."""

import ast
import re
from collections.abc import Iterator, Sequence
from typing import Any, TypeGuard

from anybatch.doctor.ask.keeping import Kept
from anybatch.doctor.ask.source import FUNCTIONS, scripts, walked
from anybatch.doctor.ask.trials import Line, told
from anybatch.doctor.samples.inputs import mark
from anybatch.records.events import Backward
from anybatch.records.lossfacts import Probed
from anybatch.records.runs import Run

_ROWS = "(mask|idx|index|indices|ids|nodes)"
_TRAINED = re.compile(rf"^(train_{_ROWS}|{_ROWS}_train)$")
_HELD_OUT = re.compile(rf"^((val|valid|test)_{_ROWS}|{_ROWS}_(val|valid|test))$")
_NAMED = re.compile(r"(?<![a-z])([xy]?(test|validation|valid|val)|held_?out|dev)(?![a-z])", re.I)
_WITHOUT_GRADIENT = re.compile(r"no_grad|inference_mode")
_LEAST_ROWS = 12  # that were evaluated and looked at


def about_rows(kept: Kept, run: Run) -> Iterator[Probed]:
    """Whether all rows that are evaluated were trained on before, in a script that names something as held out."""
    rows = kept.rows
    if rows.new or len(rows.known) < _LEAST_ROWS:
        return
    names = [name for _, tree in scripts(run) for name in held_out_names(tree)]
    if names:
        yield told("trained rows", Line(rows.file, rows.line), rows=len(rows.known), name=names[0])


def about_training(kept: Kept, run: Run) -> Iterator[Probed]:
    """Whether all losses that go back are of what is named as held out."""
    for file, tree in scripts(run):
        found = list(trained_on(tree, {one.line for one in run.of(Backward) if one.file == file}))
        if found and all(_is_held_out(name) for name, _ in found):
            yield told("held out trained", Line(file, found[0][1]), name=found[0][0])


def trained_on(tree: ast.Module, lines: set[int]) -> Iterator[tuple[str, int]]:
    """What is gone through, or picks rows, for the losses that go back on some lines.

    Example:
        >>> text = "for x, y in test_loader:\\n  loss = f(net(x), y)\\n  loss.backward()"
        >>> list(trained_on(ast.parse(text), {3}))
        [('test_loader', 1)]
        >>> text = "loss = f(net(x)[data.test_mask], y[data.test_mask])\\nloss.backward()"
        >>> list(trained_on(ast.parse(text), {2}))
        [('data.test_mask', 1)]
    """
    for line in sorted(lines):
        around = [one for one in walked(tree) if isinstance(one, (ast.For, *FUNCTIONS)) and _holds(one, line)]
        innermost = max(around, key=lambda one: one.lineno, default=tree)
        loops = [one.iter for one in around if isinstance(one, ast.For)]
        losses = {ast.unparse(one.value) for one in walked(tree) if _holds(one, line) and _goes_back(one)}
        masks = [part.slice for one in walked(innermost) if isinstance(one, ast.Assign)
                 and losses & {ast.unparse(target) for target in one.targets}
                 for part in walked(one.value) if isinstance(part, ast.Subscript)]  # fmt: skip
        yield from dict.fromkeys((ast.unparse(one), one.lineno) for one in [*loops, *masks] if _is_named(one))


def _holds(node: Any, line: int) -> bool:
    return getattr(node, "lineno", line + 1) <= line <= (getattr(node, "end_lineno", None) or 0)


def _goes_back(node: ast.AST) -> TypeGuard[ast.Attribute]:
    return isinstance(node, ast.Attribute) and node.attr == "backward"


def _is_named(node: ast.expr) -> bool:
    """Whether it says of which part of the data it is."""
    text = ast.unparse(node)
    return bool(_NAMED.search(text) or re.search("tr(ai)?n", text, re.I))


def _is_held_out(text: str) -> bool:
    return bool(_NAMED.search(text)) and not re.search("tr(ai)?n", text, re.I)


def held_out_names(tree: ast.Module) -> Iterator[str]:
    """Names and keys that say that something is held out from the training.

    Example:
        >>> list(held_out_names(ast.parse("x_train, x_val = x[:9], x[9:]\\nval = critic(state)")))
        ['x_val']
        >>> list(held_out_names(ast.parse("loaders = {one: load(one) for one in ('train', 'valid')}")))
        ['valid']
    """
    for one in walked(tree):
        stored = one.id if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store) else ""
        name = one.value if isinstance(one, ast.Constant) and isinstance(one.value, str) else stored
        if name.isidentifier() and stored != "val" and _NAMED.search(name):
            yield name


def about_splits(kept: Kept, run: Run) -> Iterator[Probed]:
    """Whether a loss over all rows leaves out the mask of those of the training, which the evaluation alone reads."""
    if not any(_is_whole(kept, root, batches) for root, batches in kept.batches.items()):
        return
    for file, tree in scripts(run):
        for name, held, line in evaluated_splits(tree):
            yield told("unread field", Line(file, line), name=name, held_out=held, kind="split")


def _is_whole(kept: Kept, root: int, batches: Sequence[Any]) -> bool:
    """Whether each loss is over all rows of one and the same input, which is the one that is evaluated."""
    same = all(mark(first) == mark(batches[0][0]) and len(first) == len(one["target"]) for first, _, one in batches)
    trained, evaluated = (kept.given.get((root, mode), []) for mode in (True, False))
    return (
        bool(trained)
        and len(batches) > 1
        and same
        and any(one.rows == trained[0].rows and one.mean == trained[0].mean for one in evaluated)
    )


def evaluated_splits(tree: ast.Module) -> Iterator[tuple[str, str, int]]:
    """Masks of the rows of the training that nothing reads but an evaluation, and beside them what is held out.

    Example:
        >>> text = "@torch.no_grad()\\ndef test():\\n  return [acc(y[m]) for m in (data.train_mask, data.test_mask)]"
        >>> list(evaluated_splits(ast.parse(text)))
        [('train_mask', 'test_mask', 3)]
        >>> list(evaluated_splits(ast.parse(text + "\\nloss = f(out[data.train_mask])")))
        []
    """
    tested = {id(one) for scope in walked(tree) if _evaluates(scope) for one in walked(scope)}
    stored = {
        id(one.value) for one in walked(tree) if isinstance(one, ast.Subscript) and isinstance(one.ctx, ast.Store)
    }
    read = [
        (one.id if isinstance(one, ast.Name) else one.attr, one.lineno, id(one) in tested)
        for one in walked(tree)
        if isinstance(one, (ast.Name, ast.Attribute)) and isinstance(one.ctx, ast.Load) and id(one) not in stored
    ]
    held = [name for name, _, is_tested in read if is_tested and _HELD_OUT.match(name)]
    for name in dict.fromkeys(name for name, *_ in read if _TRAINED.match(name)):
        lines = [line for other, line, is_tested in read if other == name and is_tested]
        if held and len(lines) == sum(other == name for other, *_ in read):
            yield name, held[-1], lines[0]


def _evaluates(scope: ast.AST) -> bool:
    """Whether a function or a block is run without gradients."""
    parts: list[ast.expr] = []
    if isinstance(scope, FUNCTIONS):
        parts = scope.decorator_list
    elif isinstance(scope, ast.With):
        parts = [one.context_expr for one in scope.items]
    return any(_WITHOUT_GRADIENT.search(ast.unparse(one)) for one in parts)
