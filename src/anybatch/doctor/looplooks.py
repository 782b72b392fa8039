"""Which statements of a loop certainly do the same when they run at another place of it."""

import argparse
import ast
import builtins
import itertools
import types
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from anybatch.doctor.crashing.usercode import called, names_in, nodes_in
from anybatch.doctor.loopnames import root_of
from anybatch.doctor.loopparts import LoopStep
from anybatch.doctor.values import storage_of

LEAVES = (ast.Return, ast.Break, ast.Continue)
_EXITS = ("exit", "_exit", "quit", "abort")
HARMLESS = ("print", "append", "item", "len")
LOOKS = (*HARMLESS, "size", "numel", "detach", "cpu", "float", "int")
NEEDS_GRAPH = ("grad", "register_hook", "register_post_accumulate_grad_hook", "retain_grad", "backward")
_ACTS = (
    *_EXITS,
    *NEEDS_GRAPH,
    "setattr",
    "delattr",
    "exec",
    "eval",
    "globals",
    "locals",
    "vars",
    "__import__",
    "input",
)
_VALUES = ("torch", "torch.nn.functional", "torch.linalg", "math", "time", "numpy", "random")
_LOGS = ("logging", "tqdm", "wandb", "mlflow", "tensorboardX", "torch.utils.tensorboard", "torchmetrics")
_BOXES = (list, tuple, dict, set, deque)
_SCALARS = (bool, int, float, complex, str, bytes, type(None), torch.device, torch.dtype, torch.Size)
_ONLY_SIZES = ("len", "next", "isinstance")
_PARTS = (ast.Name, ast.Attribute, ast.Subscript, ast.Constant, ast.expr_context)
_MOST_ITEMS = 100


def leaves(node: ast.AST) -> bool:
    """Whether something ends the iteration, the loop or the process."""
    return isinstance(node, (*LEAVES, ast.Raise, ast.Assert)) or called(node) in _EXITS


def only_looks(step: LoopStep, statements: Iterable[ast.stmt]) -> bool:
    """Whether statements only compute with values and log them, and read nothing that an update changes."""
    statements = list(statements)
    return all(may_look(step, call) for call in nodes_in(statements, ast.Call)) and not _reads_trained(step, statements)


def may_look(step: LoopStep, call: ast.Call) -> bool:
    """Whether a call is known to change nothing but a log, whatever it is given."""
    name, function = called(call), call.func
    if not name or name in _ACTS or (name.endswith("_") and isinstance(function, ast.Attribute)):
        return False
    if isinstance(function, ast.Name):
        value = step.names.get(name, getattr(builtins, name, None))
        return value is not None and (
            value is getattr(builtins, name, None)
            or (not isinstance(value, type) and getattr(value, "__module__", "") in _VALUES)
        )
    if not isinstance(function, ast.Attribute):
        return False
    root = root_of(function)
    if isinstance(step.names.get(root), types.ModuleType):
        return _of_module(value_at(step, function.value), value_at(step, function))
    receiver = value_at(step, function.value)
    if _is_log(receiver):
        return True
    if receiver is None or isinstance(receiver, torch.Tensor):
        # of what a call or an expression gives, or what only exists later
        return hasattr(torch.Tensor, name) or name in LOOKS or hasattr(str, name)
    return isinstance(receiver, (*_BOXES, *_SCALARS))


def _of_module(module: Any, value: Any) -> bool:
    """Whether a function of a module computes with values only."""
    name = getattr(module, "__name__", "")
    return (name in _VALUES and not isinstance(value, type)) or name in _LOGS or _is_log(value)


def _is_log(value: Any) -> bool:
    module = getattr(type(value), "__module__", "")
    return any(module == one or module.startswith(f"{one}.") for one in _LOGS)


def value_at(step: LoopStep, node: ast.expr) -> Any:
    """The value of names, attributes and items; ``None`` for another expression and where there is none."""
    if not all(isinstance(one, _PARTS) for one in ast.walk(node)):
        return None
    try:
        return eval(step.source.of(node), dict(step.names))
    except Exception:  # noqa: BLE001 - the user's objects may raise anything
        return None


def _reads_trained(step: LoopStep, statements: Iterable[ast.stmt]) -> bool:
    """Whether statements read what an update changes, or what nobody here knows."""
    statements, memory = list(statements), _trained_memory(step)
    own = names_in(statements, ast.Store) | names_in(step.forward, ast.Store)
    for node in nodes_in(statements, ast.Name):
        path: ast.expr = node
        while isinstance(outer := step.source.parent(path), ast.Attribute):
            path = outer
            if path.attr == "grad":
                return True
        call = step.source.parent(path)
        if isinstance(call, ast.Call) and call.func is path:
            if path is node:
                continue  # it is known what it calls
            path = path.value if isinstance(path, ast.Attribute) else path
        elif called(call or node) in _ONLY_SIZES:
            continue
        if isinstance(node.ctx, ast.Load) and node.id not in own and not _is_plain(value_at(step, path), memory):
            return True
    return False


def _trained_memory(step: LoopStep) -> set[int]:
    """Where the storage of each weight and of each buffer begins, and the ids of optimizer states."""
    found = [one for module in step.modules.values() for one in (*module.parameters(), *module.buffers())]
    states = {id(one.state) for one in step.names.values() if isinstance(one, torch.optim.Optimizer)}
    return states | {storage_of(one) for one in found} - {0}


def _is_plain(value: Any, memory: set[int], depth: int = 4) -> bool:
    """Whether a value is data that no update changes; in ``memory`` are the ids of optimizer states, too."""
    if id(value) in memory:
        return False
    if isinstance(value, torch.Tensor):
        return not isinstance(value, torch.nn.Parameter) and storage_of(value) not in memory
    if isinstance(value, (*_SCALARS, type, types.ModuleType, torch.utils.data.DataLoader)) or _is_log(value):
        return True
    if isinstance(value, argparse.Namespace):
        value = vars(value)
    if isinstance(value, Mapping):
        value = [part for pair in value.items() for part in pair]
    if not isinstance(value, _BOXES) or not depth:
        return False
    return all(_is_plain(one, memory, depth - 1) for one in itertools.islice(value, _MOST_ITEMS))
