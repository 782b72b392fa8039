"""Which lines of the user's code call the operation that a node of the graph stands for."""

import ast
import linecache
import re
from collections.abc import Iterable, Iterator

_MOST_LINES = 3
_LONGEST = 20_000  # lines of a file
_SIGNS: dict[str, type[ast.operator]] = {
    "Div": ast.Div, "Pow": ast.Pow, "Mul": ast.Mult, "Add": ast.Add, "Sub": ast.Sub, "Rsub": ast.Sub,
    "Mm": ast.MatMult, "Bmm": ast.MatMult, "Reciprocal": ast.Div,
}  # fmt: skip
_NAMES = {
    "Div": ("div", "true_divide", "divide", "normalize"),
    "Pow": ("pow", "square", "float_power"),
    "Mul": ("mul", "multiply"),
    "Log": ("log", "entropy", "log_prob"),
    "Log1P": ("log1p",),
    "Softmax": ("softmax", "Softmax"),
    "LogSoftmax": ("log_softmax", "LogSoftmax", "cross_entropy", "CrossEntropyLoss"),
    "NllLoss": ("nll_loss", "cross_entropy", "NLLLoss", "CrossEntropyLoss"),
    "NllLoss2D": ("nll_loss", "cross_entropy", "NLLLoss", "CrossEntropyLoss"),
    "Std": ("std", "std_mean"),
    "Var": ("var", "var_mean"),
    "MseLoss": ("mse_loss", "MSELoss"),
    "BinaryCrossEntropy": ("binary_cross_entropy", "BCELoss"),
    "BinaryCrossEntropyWithLogits": ("binary_cross_entropy_with_logits", "BCEWithLogitsLoss"),
    "NativeLayerNorm": ("layer_norm", "LayerNorm"),
    "NativeBatchNorm": ("batch_norm", "BatchNorm1d", "BatchNorm2d", "BatchNorm3d"),
    "NativeGroupNorm": ("group_norm", "GroupNorm"),
    "LinalgVectorNorm": ("norm", "vector_norm", "normalize"),
    "Norm": ("norm", "normalize"),
}


def lines_of(op: str, files: Iterable[str]) -> tuple[str, tuple[int, ...]]:
    """The file and the lines that spell an operation, where they are few and in one file; else empty."""
    kind = re.sub(r"Backward\d*$", "", op)
    names = {*_NAMES.get(kind, (re.sub(r"(?<!^)(?=[A-Z])", "_", kind).lower(),)), kind}
    names |= {f"{name}_" for name in names}
    found = {file: lines for file in dict.fromkeys(files) if (lines := sorted(set(_spelled(file, names, kind))))}
    if len(found) != 1:
        return "", ()
    ((file, lines),) = found.items()
    return (file, tuple(lines)) if len(lines) <= _MOST_LINES else ("", ())


def _spelled(file: str, names: set[str], kind: str) -> Iterator[int]:
    lines = linecache.getlines(file)
    try:
        tree = ast.parse("".join(lines)) if 0 < len(lines) <= _LONGEST else None
    except (SyntaxError, ValueError, RecursionError):
        return
    sign = _SIGNS.get(kind)
    for node in ast.walk(tree) if tree is not None else ():
        if isinstance(node, ast.Call) and _is_called(node.func, names, kind):
            yield node.func.end_lineno or node.lineno
        elif isinstance(node, ast.BinOp | ast.AugAssign) and isinstance(node.op, sign or ()) and not _is_plain(node):
            yield node.lineno


def _is_called(called: ast.expr, names: set[str], kind: str) -> bool:
    if isinstance(called, ast.Name):
        return called.id in names
    if not isinstance(called, ast.Attribute):
        return False
    of = called.value.id if isinstance(called.value, ast.Name) else ""
    return of not in ("math", "np", "numpy") and (called.attr in names or of == kind)


def _is_plain(node: ast.BinOp | ast.AugAssign) -> bool:
    """Whether it computes with numbers that are written there, such as ``1 / 3``."""
    return isinstance(node, ast.BinOp) and all(isinstance(side, ast.Constant) for side in (node.left, node.right))
