"""What is held out: masks of the rows, and rows, that the training and the evaluation have in common."""

import ast
import re
from collections.abc import Iterator, Sequence
from typing import Any

from anybatch.doctor.ask.keeping import Kept
from anybatch.doctor.ask.source import FUNCTIONS, scripts, walked
from anybatch.doctor.ask.trials import Line, told
from anybatch.doctor.samples.inputs import mark
from anybatch.records.lossfacts import Probed
from anybatch.records.runs import Run

_ROWS = "(mask|idx|index|indices|ids|nodes)"
_TRAINED = re.compile(rf"^(train_{_ROWS}|{_ROWS}_train)$")
_HELD_OUT = re.compile(rf"^((val|valid|test)_{_ROWS}|{_ROWS}_(val|valid|test))$")
_NAMED = re.compile(
    r"(?<![a-z])([xy]?(test|validation|val)|held_?out)(?![a-z])|_valid$|^valid_(loader|set|data|x|y|acc|loss)", re.I
)
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
        if name.isidentifier() and stored != "val" and (_NAMED.search(name) or (not stored and name == "valid")):
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
