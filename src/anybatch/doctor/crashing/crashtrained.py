"""Whether an expression of the user's computes something from the parameters that are trained."""

import ast
import builtins
import functools
from collections.abc import Iterator
from types import CodeType, FunctionType, MethodType
from typing import Any

import torch

from anybatch.doctor.crashing.crashlive import Frame, Live, attributes
from anybatch.doctor.crashing.crashsource import targets

_DEEPEST = 3
_MOST = 50


class Trained:
    """The parameters that optimizers have, or all that require gradients where no optimizer is to be seen.

    Args:
        live: the state of the crash.
    """

    def __init__(self, live: Live) -> None:
        self.live = live
        held = [one for frame in live.users for value in list(frame.values.values()) for one in _optimizers(value)]
        if held:
            self.own = {id(p) for one in held for group in one.param_groups for p in group["params"]}
        else:
            self.own = {id(p) for p in live.parameters().values() if p.requires_grad}

    def reach(self, node: ast.AST, frame: Frame | None, owner: Any) -> bool | None:
        """Tells whether trained parameters, or what was computed from them, go into an expression.

        Args:
            node: the expression or statement.
            frame: where it ran, if it is still alive.
            owner: the module or function that it belongs to otherwise.

        Returns:
            ``None`` where a name in it is not known.
        """
        bound = set(targets(node)) | _names_within(node)
        read = {one.id for one in ast.walk(node) if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Load)}
        unknown = isinstance(node, ast.AugAssign) or bool(set(targets(node)) & read)  # the old value is gone
        for value, name in self._read(node, frame, owner):
            if name in bound or (value is None and hasattr(builtins, name)):
                continue
            if self._has(value, 0):
                return True
            unknown = unknown or value is None
        return None if unknown else False

    def _read(self, node: ast.AST, frame: Frame | None, owner: Any) -> Iterator[tuple[Any, str]]:
        """Values that an expression reads, each with the name that it begins with."""
        waiting = [node]
        while waiting:
            one = waiting.pop()
            if isinstance(one, ast.Name | ast.Attribute) and isinstance(one.ctx, ast.Load):
                value = self._value(one, frame, owner)
                if value is not None or isinstance(one, ast.Name):
                    yield value, one.id if isinstance(one, ast.Name) else ""
                    continue
            waiting.extend(ast.iter_child_nodes(one))

    def _value(self, node: ast.AST, frame: Frame | None, owner: Any) -> Any:
        if frame is not None:
            return self.live.value(frame, node)
        if isinstance(node, ast.Attribute):
            return dict(attributes(self._value(node.value, None, owner))).get(node.attr)
        if not isinstance(node, ast.Name):
            return None
        if isinstance(owner, torch.nn.Module):
            return owner if node.id == "self" else getattr(type(owner).forward, "__globals__", {}).get(node.id)
        return dict(_names_of(owner)).get(node.id) if isinstance(owner, FunctionType) else None

    def _has(self, value: Any, depth: int) -> bool:
        """Whether a value is or holds something trained."""
        if isinstance(value, torch.Tensor):
            return id(value) in self.own or (value.requires_grad and not value.is_leaf)
        if isinstance(value, torch.nn.Module):
            return any(id(parameter) in self.own for parameter in value.parameters())
        holds = isinstance(value, list | tuple | dict | FunctionType | MethodType)
        if depth > _DEEPEST or isinstance(value, type) or (type(value).__module__ == "builtins" and not holds):
            return False
        return any(self._has(one, depth + 1) for one in _inner(value))


def _inner(value: Any) -> list[Any]:
    """What a value holds that may be a module or a tensor."""
    if isinstance(value, MethodType):
        return [value.__self__, value.__func__]
    if isinstance(value, FunctionType):
        return [one for _, one in _names_of(value)]
    if isinstance(value, functools.partial):
        return [value.func, *value.args, *value.keywords.values()]
    if isinstance(value, dict):
        return list(dict.values(value))[:_MOST]
    if isinstance(value, list | tuple):
        return list(value[:_MOST])
    return [one for _, one in attributes(value)][:_MOST]


def _names_of(function: FunctionType) -> Iterator[tuple[str, Any]]:
    """The globals and the closure that a function and those within it read."""
    yield from zip(function.__code__.co_freevars, map(_content, function.__closure__ or ()), strict=False)
    for name in _global_names(function.__code__):
        if name in function.__globals__:
            yield name, function.__globals__[name]


def _global_names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for one in code.co_consts:
        if isinstance(one, CodeType):
            yield from _global_names(one)


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not yet filled
        return None


def _optimizers(value: Any) -> list[torch.optim.Optimizer]:
    if isinstance(value, torch.optim.Optimizer):
        return [value]
    held = value if isinstance(value, list | tuple) else [one for _, one in attributes(value)]
    return [one for one in held[:_MOST] if isinstance(one, torch.optim.Optimizer)]


def _names_within(node: ast.AST) -> set[str]:
    """Names that a lambda or a comprehension has for itself."""
    found = {one.arg for one in ast.walk(node) if isinstance(one, ast.arg)}
    for one in ast.walk(node):
        if isinstance(one, ast.comprehension):
            found |= {name.id for name in ast.walk(one.target) if isinstance(name, ast.Name)}
    return found
