"""Is what scales the data fitted anew to those of the evaluation? The text of the script tells."""

import ast
import re
from collections.abc import Iterator

from anybatch.doctor.ask.keeping import Kept
from anybatch.doctor.ask.source import scripts, walked
from anybatch.doctor.ask.trials import Line, told
from anybatch.records.lossfacts import Probed
from anybatch.records.runs import Run

_FITTED = re.compile(r"^(?!Temperature).*(Scaler|Imputer|Vectorizer|PowerTransformer|QuantileTransformer)$")
_TRAINED = re.compile(r"(?<![a-z])([xy]?)train(ing)?(?!er|ed)", re.I)
_HELD_OUT = re.compile(r"(?<![a-z])([xy]?)(test|validation|valid|val)(?=[xy]?(?![a-z]))", re.I)
_ANY = r"\1*"  # in place of either
_LEARNING = frozenset({"fit", "fit_transform"})
_LOOPS, _EACH = (ast.For, ast.AsyncFor), (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)

Place = tuple[tuple[ast.AST, str], ...]
"""The nodes that something is within, from the outermost on, each with the name of the part that it is in."""


def about_scalers(kept: Kept, run: Run) -> Iterator[Probed]:
    """Whether a scaler that was fitted to the data of the training is fitted again to those of the evaluation."""
    for file, tree in scripts(run):
        for name, trained, held_out, line in fitted_anew(tree):
            yield told("fitted anew", Line(file, line), name=name, trained=trained, held_out=held_out)


def fitted_anew(tree: ast.Module) -> Iterator[tuple[str, str, str, int]]:
    """Scalers that are fitted to training data, and later to those that are named alike, but for the evaluation.

    Example:
        >>> text = "s = MinMaxScaler()\\na = s.fit_transform(train_raw)\\nb = s.{}(test_raw)"
        >>> [list(fitted_anew(ast.parse(text.format(one)))) for one in ("fit_transform", "transform")]
        [[('s', 'train_raw', 'test_raw', 3)], []]
        >>> text = "s = StandardScaler()\\ns.fit(X_train)\\nx = s.fit_transform(cat(X_train, X_test))"
        >>> list(fitted_anew(ast.parse(text)))
        []
    """
    made = {ast.unparse(one.targets[0]) for one in walked(tree) if isinstance(one, ast.Assign) and _is_made(one.value)}
    trained = dict[str, list[tuple[str, Place]]]()  # by the name of the scaler
    for one, place in sorted(_placed(tree), key=lambda pair: (pair[0].lineno, pair[0].col_offset)):
        if isinstance(one, ast.Assign):
            trained.pop(ast.unparse(one.targets[0]), None)  # another one of the same name
        elif isinstance(one.func, ast.Attribute) and not _is_reversed(given := one.args[0]):
            name, text = ast.unparse(one.func.value), ast.unparse(given)
            if name not in made and not _is_made(one.func.value):
                continue
            if _TRAINED.search(text) and not _HELD_OUT.search(text):
                trained.setdefault(name, []).append((text, place))
            elif _HELD_OUT.search(text) and not _TRAINED.search(text):
                alike = (its for its, other in trained.get(name, ())
                         if _TRAINED.sub(_ANY, its).lower() == _HELD_OUT.sub(_ANY, text).lower()
                         and _meet(other, place) and not _is_of_each(its, other, text, place))  # fmt: skip
                if its := next(alike, ""):
                    yield name, its, text, one.lineno


def _is_made(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and bool(_FITTED.search(ast.unparse(node.func).rpartition(".")[2]))


def _placed(tree: ast.Module) -> Iterator[tuple[ast.Assign | ast.Call, Place]]:
    """Where scalers are made and fitted, and what that is within."""
    left: list[tuple[ast.AST, Place]] = [(tree, ())]
    while left:
        node, place = left.pop()
        if isinstance(node, ast.Assign) and _is_made(node.value):
            yield node, place
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _LEARNING:
            yield from [(node, place)] if node.args else []
        for part, value in ast.iter_fields(node):
            every = value if isinstance(value, list) else [value]
            left += [(one, (*place, (node, part))) for one in every if isinstance(one, ast.AST)]


def _is_reversed(given: ast.expr) -> bool:
    """Whether it names what is left out: rows that are not of a set."""
    unlike = (ast.Invert, ast.Not, ast.NotEq, ast.IsNot, ast.NotIn)
    return any(isinstance(one, unlike) for one in ast.walk(given))


def _meet(one: Place, other: Place) -> bool:
    """Whether both can happen in one run: not in different branches of one condition."""
    parts = {id(node): part for node, part in one if isinstance(node, ast.If | ast.IfExp)}
    return all(parts.get(id(node), part) == part for node, part in other)


def _is_of_each(one: str, place: Place, other: str, otherwhere: Place) -> bool:
    """Whether data of several subjects, say, are scaled by themselves: in a comprehension, or in loops over them."""
    both = {id(node) for node, _ in place} & {id(node) for node, _ in otherwhere}
    for text, within in ((one, place), (other, otherwhere)):
        names = {each.id for each in ast.walk(ast.parse(text)) if isinstance(each, ast.Name)}
        for node, _ in within:
            if isinstance(node, _EACH):
                return True
            if isinstance(node, _LOOPS) and id(node) not in both:
                bound = {each.id for each in ast.walk(node.target) if isinstance(each, ast.Name)}
                if bound & names:
                    return True
    return False
