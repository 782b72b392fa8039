"""The names that the statements of a loop read and change, and which of them may hold the samples of a batch."""

import ast
import types
from collections.abc import Container, Iterable, Sequence, Sized
from typing import Any

import torch

from anybatch.batch.trees import leaves, opened
from anybatch.doctor.crashing.usercode import called, names_in, nodes_in

_FILLS = frozenset({"append", "extend", "insert", "add", "update", "setdefault"})


def stored(nodes: Iterable[ast.AST]) -> set[str]:
    """Names that statements assign or change."""
    nodes = list(nodes)
    found = names_in(nodes, ast.Store)
    parts = (one for one in nodes_in(nodes, ast.expr) if isinstance(one, ast.Subscript | ast.Attribute))
    found |= {root_of(one) for one in parts if isinstance(one.ctx, ast.Store)}
    for call in (one.value for one in nodes_in(nodes, ast.Expr) if isinstance(one.value, ast.Call)):
        if called(call) in _FILLS or called(call).endswith("_"):  # losses.append(loss), x.mul_(2)
            found.add(root_of(call.func))
    return found


def free_name(taken: Container[str], name: str) -> str:
    """A name, with a beginning that makes it a new one where need be."""
    return next(one for one in (name, f"batch_{name}", f"anybatch_{name}") if one not in taken)


def root_of(node: ast.AST) -> str:
    """The name that attributes and items are taken of; empty for another expression."""
    while isinstance(node, ast.Attribute | ast.Subscript):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def read(nodes: Iterable[ast.AST]) -> set[str]:
    """Names that statements read, including those that they change."""
    nodes = list(nodes)
    return names_in(nodes, ast.Load) | {root_of(one.target) for one in nodes_in(nodes, ast.AugAssign)}


def inputs_of(nodes: Sequence[ast.AST]) -> set[str]:
    """Names that consecutive statements read before they assign them."""
    found = set[str]()
    _follow(nodes, set(), found)
    return found


def _follow(nodes: Iterable[ast.AST | None], known: set[str], found: set[str]) -> None:
    for node in nodes:
        if isinstance(node, ast.For | ast.AsyncFor):
            _follow([node.iter, node.target, *node.body, *node.orelse], known, found)
        elif isinstance(node, ast.With | ast.AsyncWith):
            _follow([part for one in node.items for part in (one.context_expr, one.optional_vars)], known, found)
            _follow(node.body, known, found)
        elif isinstance(node, ast.If):
            _follow([node.test], known, found)
            ways = [set(known), set(known)]
            for way, body in zip(ways, (node.body, node.orelse), strict=True):
                _follow(body, way, found)
            known |= ways[0] & ways[1]
        elif isinstance(node, ast.While | ast.Try):
            parts = [getattr(node, name, []) for name in ("test", "body", "handlers", "orelse", "finalbody")]
            _follow([one for part in parts for one in (part if isinstance(part, list) else [part])], known, found)
        elif node is not None:
            own = {one.arg for one in nodes_in(node, ast.arg)} | stored(nodes_in(node, ast.comprehension))
            found |= read([node]) - own - known
            known |= stored([node])


_PLAIN = (bool, int, float, complex, str, bytes, torch.device, torch.dtype, torch.optim.Optimizer, types.ModuleType)


def size_of(value: Any) -> int:
    """How many samples a value may hold: the rows of its longest tensor, or its items."""
    return rows_of(value) or (len(value) if isinstance(value, Sized) and not hasattr(value, "dim") else 0)


def is_flat(value: Any) -> bool:
    """Whether a value is no tensor with more than one dimension."""
    return not isinstance(value, torch.Tensor) or value.dim() < 2


def holds_samples(value: Any) -> bool:
    """Whether a value may be a part of a batch."""
    held = getattr(value, "__dict__", {}).values()  # of an object with modules, as a trainer is, no sample
    return _is_data(value) and not any(isinstance(one, torch.nn.Module) for one in held)


def _is_data(value: Any) -> bool:
    """Whether a value may hold samples: tensors with rows, and what nobody here knows."""
    if isinstance(value, torch.Tensor):
        return value.dim() > 0 and not isinstance(value, torch.nn.Parameter)
    if isinstance(value, _PLAIN) or value is None or callable(value):
        return False
    inside = opened(value)
    return inside is None or any(_is_data(child.value) for child in inside.children)


def rows_of(value: Any) -> int:
    """The length of the longest tensor in a batch."""
    return max((len(one) for _, _, one in leaves(value) if isinstance(one, torch.Tensor) and one.dim()), default=0)
