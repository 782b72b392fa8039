"""What a script computes and throws away: a function that changes nothing in place, called as if it did."""

import ast
from collections.abc import Iterator

from anybatch.doctor.ask.keeping import Kept
from anybatch.doctor.ask.source import scope_at, scripts, walked
from anybatch.doctor.ask.trials import Line, told
from anybatch.records.lossfacts import Probed
from anybatch.records.runs import Run

_FLIPS = frozenset({"flip", "fliplr", "flipud", "rot90"})
_METHODS = _FLIPS | {
    "abs", "astype", "clamp", "clip", "contiguous", "detach", "div", "dropna", "exp", "fillna", "flatten", "index_add",
    "index_copy", "index_fill", "log_softmax", "masked_fill", "masked_scatter", "mul", "nan_to_num", "permute",
    "relu", "reset_index", "reshape", "roll", "scatter", "scatter_add", "sigmoid", "softmax", "sort_values", "sqrt",
    "squeeze", "swapaxes", "tanh", "transpose", "tril", "triu", "unsqueeze", "view", "where",
}  # fmt: skip
"""Of a tensor, an array or a table; none that a list, a set, a string, a path or a module has."""

_FUNCTIONS = _METHODS | {
    "append", "concatenate", "delete", "dropout", "expand_dims", "gelu", "insert", "leaky_relu", "log", "moveaxis",
    "normalize", "pad", "permutation", "repeat", "tile",
}  # fmt: skip
_OWNERS = frozenset({"F", "TF", "cv2", "functional", "np", "numpy", "random", "torch"})
"""What the functions of libraries are called on, which take first what they are said to change."""

_IN_PLACE = (None, "out", "inplace", "dst")  # keywords that say where the result goes; ``None`` for those of a mapping


def about_results(kept: Kept, run: Run) -> Iterator[Probed]:
    """Whether a statement calls what gives a changed copy, and what it was called with is read afterwards."""
    for file, tree in scripts(run):
        for name, call, line in thrown_away(tree):
            yield told("unread field", Line(file, line), name=name, call=call, kind="result")


def thrown_away(tree: ast.Module) -> Iterator[tuple[str, str, int]]:
    """What is left as it is, the call whose result is thrown away, and its line.

    Example:
        >>> text = "def load(image):\\n  np.fliplr(image)\\n  return image"
        >>> list(thrown_away(ast.parse(text)))
        [('image', 'np.fliplr(image).copy()', 2)]
        >>> list(thrown_away(ast.parse("for x in data:\\n  x.clamp(0, 1)\\n  net(x)")))
        [('x', 'x.clamp(0, 1)', 2)]
        >>> list(thrown_away(ast.parse("h.detach_()\\nnp.clip(x, 0, 1, out=x)\\nx.view(2)\\nnet(h)")))
        []
    """
    for call in [one.value for one in walked(tree) if isinstance(one, ast.Expr) and isinstance(one.value, ast.Call)]:
        found, function = _copied(call), _last(call.func)
        if found is None:
            continue
        scope, name, text = scope_at(tree, call.lineno), ast.unparse(found), ast.unparse(call)
        if _is_read(scope, call, name) and (function != "detach" or _is_number(scope, name)):
            is_of_numpy = function in _FLIPS and text.startswith(("np.", "numpy."))  # torch takes no negative strides
            yield name, f"{text}.copy()" if is_of_numpy else text, call.lineno


def _copied(call: ast.Call) -> ast.expr | None:
    """What a call gives a changed copy of; ``None`` for a call that may change something."""
    if not isinstance(call.func, ast.Attribute) or any(one.arg in _IN_PLACE for one in call.keywords):
        return None
    owner, name = call.func.value, call.func.attr
    if _last(owner) in _OWNERS:
        given = call.args[0] if call.args and name in _FUNCTIONS else None
    else:
        given = owner if name in _METHODS and _last(owner) not in ("self", "dist") else None
    return given if isinstance(given, ast.Name | ast.Attribute | ast.Subscript) else None


def _last(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _is_number(scope: ast.AST, name: str) -> bool:
    """Whether something is computed with what has that name, which is no handle, loader or recorder then."""
    given = (
        [*one.args, *(key.value for key in one.keywords)] if isinstance(one, ast.Call) else [one.left, one.right]
        for one in walked(scope)
        if isinstance(one, ast.Call | ast.BinOp)
    )
    return any(ast.unparse(one) == name for each in given for one in each)


def _is_read(scope: ast.AST, call: ast.Call, name: str) -> bool:
    """Whether a scope reads what has that name after a call, before it gives it another value."""
    after = [
        one
        for one in walked(scope)
        if isinstance(one, ast.Name | ast.Attribute | ast.Subscript)
        and one.lineno > (call.end_lineno or 0)
        and ast.unparse(one) == name
    ]
    first = min(after, key=lambda one: (one.lineno, isinstance(one.ctx, ast.Store), one.col_offset), default=None)
    return first is not None and isinstance(first.ctx, ast.Load)
