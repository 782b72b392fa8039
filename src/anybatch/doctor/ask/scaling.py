"""Is what scales the data fitted anew to those of the evaluation? The text of the script tells."""

import ast
import re
from collections.abc import Iterator

from anybatch.doctor.ask.keeping import Kept
from anybatch.doctor.ask.source import scripts, walked
from anybatch.doctor.ask.trials import Line, told
from anybatch.records.lossfacts import Probed
from anybatch.records.runs import Run

_FITTED = re.compile(r"(Scaler|Imputer|Vectorizer|PowerTransformer|QuantileTransformer)$")
_TRAINED = re.compile(r"(?<![a-z])[xy]?train(?!er)", re.I)
_HELD_OUT = re.compile(r"(?<![a-z])[xy]?(test|val|valid|validation|dev|holdout)[xy]?(?![a-z])", re.I)
_LEARNING = frozenset({"fit", "fit_transform"})


def about_scalers(kept: Kept, run: Run) -> Iterator[Probed]:
    """Whether a scaler that was fitted to the data of the training is fitted again to those of the evaluation."""
    for file, tree in scripts(run):
        for name, trained, held_out, line in fitted_anew(tree):
            yield told("fitted anew", Line(file, line), name=name, trained=trained, held_out=held_out)


def fitted_anew(tree: ast.Module) -> Iterator[tuple[str, str, str, int]]:
    """Scalers of one kind that are fitted to training data, and later to what is named as those of the evaluation.

    Example:
        >>> text = "s = MinMaxScaler()\\na = s.fit_transform(train_raw)\\nb = s.{}(test_raw)"
        >>> [list(fitted_anew(ast.parse(text.format(one)))) for one in ("fit_transform", "transform")]
        [[('s', 'train_raw', 'test_raw', 3)], []]
        >>> text = "s = StandardScaler()\\ns.fit(X_train)\\nx = s.fit_transform(cat(X_train, X_test))"
        >>> list(fitted_anew(ast.parse(text)))
        []
    """
    kinds = dict[str, str]()
    for one in walked(tree):
        if isinstance(one, ast.Assign) and isinstance(one.value, ast.Call):
            kind = ast.unparse(one.value.func).rpartition(".")[2]
            kinds |= {ast.unparse(target): kind for target in one.targets if _FITTED.search(kind)}
    trained = dict[str, str]()  # by kind
    for call in sorted(_fits(tree), key=lambda one: (one.lineno, one.col_offset)):
        func, given = call.func, ast.unparse(call.args[0])
        name = ast.unparse(func.value) if isinstance(func, ast.Attribute) else ""
        kind = kinds.get(name) or (_kind_of(func.value) if isinstance(func, ast.Attribute) else "")
        if kind and _TRAINED.search(given) and not _HELD_OUT.search(given):
            trained.setdefault(kind, given)
        elif kind in trained and _HELD_OUT.search(given) and not _TRAINED.search(given):
            yield name, trained[kind], given, call.lineno


def _fits(tree: ast.Module) -> Iterator[ast.Call]:
    for one in walked(tree):
        if (
            isinstance(one, ast.Call)
            and isinstance(one.func, ast.Attribute)
            and one.func.attr in _LEARNING
            and one.args
        ):
            yield one


def _kind_of(node: ast.expr) -> str:
    """The kind of a scaler that is made where it is used."""
    kind = ast.unparse(node.func).rpartition(".")[2] if isinstance(node, ast.Call) else ""
    return kind if _FITTED.search(kind) else ""
