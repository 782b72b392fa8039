"""The call that failed: which expression of the user's line it is, with what operands; and how it is run again."""

import ast
import builtins
import contextlib
import inspect
import itertools
import operator
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import BuiltinFunctionType, ModuleType
from typing import Any

import torch

from anybatch.doctor.crashing.live import Frame, Live, attributes
from anybatch.doctor.crashing.usercode import path_of
from anybatch.doctor.values import tensors_in

_LARGEST = 2**28  # bytes of operands that are still run again
_PURE = (
    "torch.functional", "torch.nn.functional", "torch._C._nn", "torch._C._linalg", "torch._C._fft", "torch._C._special",
    "torch.nn.modules.", "torch.nn.utils.rnn", "torch.nn.parameter", "torch.optim.", "torch.distributions.",
    "torch._tensor", "numpy", "builtins", "_operator",
)  # fmt: skip
_ACTS = frozenset(
    {"save", "load", "compile", "manual_seed", "seed", "backward", "step", "open", "exec", "eval", "input"}
)
_HARMLESS = {"len", "int", "float", "bool", "range", "list", "tuple", "dict", "max", "min", "abs", "slice", "sum"}
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_OPERATORS: dict[type, Callable[..., Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.MatMult: operator.matmul, ast.Pow: operator.pow, ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod,
    ast.BitAnd: operator.and_, ast.BitOr: operator.or_, ast.Lt: operator.lt, ast.LtE: operator.le,
    ast.Gt: operator.gt, ast.GtE: operator.ge, ast.Eq: operator.eq, ast.NotEq: operator.ne,
    ast.USub: operator.neg, ast.Invert: operator.invert, ast.Not: operator.not_,
}  # fmt: skip
ELEMENTWISE = frozenset({operator.add, operator.sub, operator.mul, operator.truediv, operator.iadd, operator.imul})
_SUBSCRIPTED = (torch.Tensor, list, tuple, dict, torch.nn.ModuleList, torch.nn.Sequential, torch.nn.ModuleDict)


class Unknown(Exception):
    """A value that can't be had without running code of the user's."""


@dataclass(frozen=True, slots=True)
class Operand:
    """What a call was given."""

    # its position, its keyword, or ``"self"`` for the tensor whose method is called; of a part of a list that is an
    # operand the list's key and the part's position
    key: Any
    value: Any
    text: str = ""  # the user's expression, empty where there is none


@dataclass(slots=True)
class Call:
    """A call, operator or subscript, with its operands."""

    function: Callable[..., Any]  # takes the operands, that with the key ``"self"`` first
    title: str  # what the user calls it
    operands: list[Operand]
    subject: Any = None  # the module or function that was called
    node: ast.AST | None = None  # the expression in the user's line, ``None`` for a call within torch

    @property
    def name(self) -> str:
        """Of the function or class, as torch has it."""
        return getattr(self.subject, "__name__", "") or type(self.subject).__name__

    @property
    def is_loss(self) -> bool:
        """Whether it is one of torch's losses."""
        return any(part in self.name.lower() for part in ("loss", "entropy", "kl_div"))

    @property
    def writes(self) -> bool:
        """Whether it is a method that changes its tensor."""
        return any(one.key == "self" for one in self.operands) and self.name.endswith("_")

    def weights(self) -> list[torch.Tensor]:
        """The parameters and buffers of the module that was called."""
        own = self.subject if isinstance(self.subject, torch.nn.Module) else torch.nn.Module()
        return [*own.parameters(), *own.buffers()]

    def run(self, changed: Mapping[Any, Any] | None = None, function: Callable[..., Any] | None = None) -> Any:
        """Runs it on what it was given, with some operands changed, or another function; on the CPU."""
        given: dict[Any, Any] = {one.key: one.value for one in self.operands if not isinstance(one.key, tuple)}
        for key, value in (changed or {}).items():
            if isinstance(key, tuple):
                parts = list(given[key[0]])
                parts[key[1]] = value
                given[key[0]] = type(given[key[0]])(parts)
            else:
                given[key] = value
        given = {key: on_cpu(value) for key, value in given.items()}
        first = [given.pop("self")] if "self" in given else []
        args = [given.pop(key) for key in sorted(key for key in given if isinstance(key, int))]
        return (function or self.function)(*first, *args, **given)

    def is_small(self) -> bool:
        """Whether it may be run again, by the bytes that it takes."""
        held = [*self.weights(), *(one for operand in self.operands for one in tensors_of(operand.value))]
        return sum(one.numel() * one.element_size() for one in held) <= _LARGEST


def tensors_of(value: Any) -> list[torch.Tensor]:
    """The tensors in plain containers."""
    return list(itertools.islice(tensors_in(value), 100))


def on_cpu(value: Any) -> Any:
    """A value whose tensors are on the CPU; a GPU that has raised an error may not be used any more."""
    if isinstance(value, torch.Tensor) and value.device.type != "cpu":
        return torch.zeros_like(value, device="cpu") if value.is_meta else value.cpu()
    if type(value) in (list, tuple):
        return type(value)(map(on_cpu, value))
    return {key: on_cpu(one) for key, one in value.items()} if type(value) is dict else value


def failing_calls(live: Live) -> Iterator[Call]:
    """The call in the user's line that failed, and the innermost call of a module within it."""
    outer = None
    with contextlib.suppress(Unknown):
        outer = _outer(live)
    if outer is not None and outer.subject in _OPERATORS.values() and not tensors_of([o.value for o in outer.operands]):
        outer = None
    inner = _inner(live)
    if outer is not None:
        yield outer
    whole = outer is not None and isinstance(outer.subject, torch.nn.Module) and not list(outer.subject.children())
    if inner is not None and not whole and (outer is None or inner.subject is not outer.subject):
        yield inner


def copied(module: torch.nn.Module) -> torch.nn.Module:
    """A module with the same parameters, or copies of them on the CPU, with its own buffers, and without hooks."""
    new = object.__new__(type(module))
    own = dict(vars(module))
    own["_parameters"] = {
        name: one if one is None or one.device.type == "cpu" else torch.nn.Parameter(on_cpu(one.detach()))
        for name, one in module._parameters.items()
    }
    if "_flat_weights_names" in own:  # of a recurrent layer
        own["_flat_weights"] = [own["_parameters"].get(name) for name in own["_flat_weights_names"]]
    own["_modules"] = {name: None if one is None else copied(one) for name, one in module._modules.items()}
    own["_buffers"] = {
        name: None if one is None else on_cpu(one.detach().clone()) for name, one in module._buffers.items()
    }
    own |= {name: OrderedDict() for name in _HOOKS if name in own}
    vars(new).update(own)
    return new


def may_run(value: Any) -> bool:
    """Whether a module, class or function is torch's own and changes nothing but what it gives."""
    if isinstance(value, torch.nn.Module):
        return all(may_run(type(one)) and "forward" not in vars(one) for one in value.modules())
    owner, name = getattr(value, "__self__", None), getattr(value, "__name__", "_")
    if owner is not None and not isinstance(owner, torch.Tensor | str | dict | list | tuple | ModuleType):
        return False
    if name in _ACTS or name.startswith(("set_", "_")) or (name.endswith("_") and not isinstance(value, type)):
        return False
    if isinstance(owner, torch.Tensor):
        return True
    home = getattr(value, "__module__", None) or getattr(type(owner), "__module__", "")
    return home == "torch" or f"{home}.".startswith(_PURE)


def _node_of(live: Live, frame: Frame) -> ast.AST | None:
    """The expression or statement that was running, by its place in the line."""
    source = live.source(frame)
    if source is None or frame.span is None:
        return None
    line, end_line, begin, end = frame.span
    found: ast.AST | None = None
    for node in ast.walk(source.tree):
        place = [getattr(node, name, None) for name in ("lineno", "end_lineno", "col_offset", "end_col_offset")]
        if place == [line, end_line, begin, end] and not isinstance(node, ast.Expr):
            return node
        if isinstance(node, ast.Call) and place[1] == end_line and place[3] == end:
            found = node  # of a chain of methods over several lines the beginning is told otherwise
    return found


def _outer(live: Live) -> Call | None:
    frame = live.user
    node = _node_of(live, frame) if frame is not None else None
    if frame is None or node is None:
        return None
    if isinstance(node, ast.Call):
        return _of_call(live, frame, node)
    subject: Any = None
    if isinstance(node, ast.BinOp):
        parts, function, title = [node.left, node.right], _OPERATORS.get(type(node.op)), ast.unparse(node)
    elif isinstance(node, ast.Compare) and len(node.ops) == 1:
        parts, function, title = [node.left, *node.comparators], _OPERATORS.get(type(node.ops[0])), ast.unparse(node)
    elif isinstance(node, ast.AugAssign):
        inplace = getattr(operator, f"i{_OPERATORS[type(node.op)].__name__}", None)
        parts, title = [node.target, node.value], ast.unparse(node)
        function = None if inplace is None else lambda first, second: inplace(_fresh(first), second)
        subject = inplace
    elif isinstance(node, ast.Subscript):
        parts, function, title = [node.value, node.slice], operator.getitem, ast.unparse(node)
    else:
        return None
    operands = [Operand(n, evaluate(live, frame, part), ast.unparse(part)) for n, part in enumerate(parts)]
    return None if function is None else Call(function, title, operands, subject or function, node)


def _of_call(live: Live, frame: Frame, node: ast.Call) -> Call | None:
    title = ast.unparse(node.func)
    operands: list[Operand] = []
    if isinstance(node.func, ast.Attribute) and isinstance(
        owner := _tensor(live, frame, node.func.value), torch.Tensor
    ):
        name = node.func.attr
        writes = name.endswith("_") and not name.startswith("__")
        operands.append(Operand("self", owner, ast.unparse(node.func.value)))
        subject: Any = getattr(torch.Tensor, name, None)
        if name in _ACTS or name.startswith(("register", "share", "_")):
            return None

        def function(first: Any, *args: Any, **kwargs: Any) -> Any:
            return getattr(_fresh(first) if writes else first, name)(*args, **kwargs)
    else:
        subject = evaluate(live, frame, node.func)
        if subject is None or not may_run(subject):
            return None
        function = _callable(subject)
    given = _given_to_callee(live, frame)
    for position, part in enumerate(node.args):
        if isinstance(part, ast.Starred):
            for offset, value in enumerate(evaluate(live, frame, part.value)):
                text = f"{ast.unparse(part.value)}[{offset}]"
                operands.append(Operand(position + offset, value, text))
            break
        value = _value(live, frame, part, given, position)
        operands.append(Operand(position, value, ast.unparse(part)))
        operands += _parts(position, value, part)
    for one in node.keywords:
        if one.arg is None:
            whole = evaluate(live, frame, one.value)
            text = ast.unparse(one.value)
            operands += [Operand(key, value, f"{text}[{key!r}]") for key, value in whole.items()]
        else:
            value = _value(live, frame, one.value, given, one.arg)
            operands += [Operand(one.arg, value, ast.unparse(one.value)), *_parts(one.arg, value, one.value)]
    if any(_is_theirs(one.value) for one in operands):
        return None
    return Call(function, title, operands, subject, node)


def _is_theirs(value: Any) -> bool:
    """Whether using a value may run code of the user's: a function, or a tensor of a class of their own."""
    if any(not type(one).__module__.startswith("torch") for one in tensors_of(value)):
        return True
    return callable(value) and not inspect.ismethod(value) and not may_run(value)


def _parts(key: Any, value: Any, node: ast.AST) -> Iterator[Operand]:
    """The tensors of a short list or tuple that is an operand."""
    if type(value) not in (list, tuple) or not 0 < len(value) <= 4 or not tensors_of(value):
        return
    texts = [f"{ast.unparse(node)}[{n}]" for n in range(len(value))]
    if isinstance(node, ast.List | ast.Tuple) and len(node.elts) == len(value):
        texts = list(map(ast.unparse, node.elts))
    for n, (one, text) in enumerate(zip(value, texts, strict=True)):
        if isinstance(one, torch.Tensor):
            yield Operand((key, n), one, text)


def _callable(subject: Any) -> Callable[..., Any]:
    if isinstance(subject, torch.nn.Module):
        return lambda *args, **kwargs: copied(subject)(*args, **kwargs)  # noqa: PLW0108 - a new copy for each
    return subject  # type: ignore[no-any-return]


def _fresh(tensor: Any) -> Any:
    """A copy that may be written to."""
    return tensor.detach().clone() if isinstance(tensor, torch.Tensor) else tensor


def _tensor(live: Live, frame: Frame, node: ast.AST) -> Any:
    try:
        return evaluate(live, frame, node)
    except Unknown:
        return None


def _value(live: Live, frame: Frame, node: ast.AST, given: Mapping[int | str, Any], key: int | str) -> Any:
    """An operand as the callee has it; otherwise computed again."""
    if path_of(node) == "" and key in given:
        return given[key]
    try:
        return evaluate(live, frame, node)
    except Unknown:
        if key in given:
            return given[key]
        raise


def _given_to_callee(live: Live, frame: Frame) -> dict[int | str, Any]:
    """What the function of torch's that the user's line called has got, by position and name."""
    place = next(n for n, one in enumerate(live.frames) if one is frame)
    after = live.frames[place + 1 :]
    callee = next((one for one in after if one.whose in ("torch", "library")), None)
    if callee is None or callee.code is None:
        return {}
    code, values = callee.code, callee.values
    if callee.function in ("_wrapped_call_impl", "_call_impl"):
        return {**dict(enumerate(values.get("args", ()))), **values.get("kwargs", {})}
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    plain = [name for name in names[: code.co_argcount] if name not in ("self", "cls")]
    return {n: values[name] for n, name in enumerate(plain) if name in values} | {
        name: values[name] for name in names if name in values
    }


def _inner(live: Live) -> Call | None:
    """The innermost call of a module of torch's or a library's that was running beneath the user's line."""
    module = next(live.running(), None)
    if module is None or not may_run(module):
        return None
    for frame in reversed(live.frames):
        if frame.values.get("self") is module and frame.function in ("_call_impl", "_wrapped_call_impl"):
            given = {**dict(enumerate(frame.values.get("args", ()))), **frame.values.get("kwargs", {})}
            operands = [Operand(key, value, live.label(value)) for key, value in given.items()]
            return Call(_callable(module), live.module_name(module) or type(module).__name__, operands, module)
    return None


def evaluate(live: Live, frame: Frame, node: ast.AST) -> Any:
    """What an expression means in a frame; operations of torch run again, code of the user's never does.

    Raises:
        Unknown: it would have to.
    """

    def of(inner: ast.AST) -> Any:
        return evaluate(live, frame, inner)

    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.Name):
        for names in (frame.values, frame.names):
            if node.id in names:
                return names[node.id]
        if node.id in _HARMLESS:
            return getattr(builtins, node.id)
    if isinstance(node, ast.Attribute):
        return _attribute(of(node.value), node.attr)
    if isinstance(node, ast.Tuple | ast.List):
        values = [of(one) for one in node.elts]
        return values if isinstance(node, ast.List) else tuple(values)
    if isinstance(node, ast.Dict) and None not in node.keys:
        return {of(key): of(value) for key, value in zip(node.keys, node.values, strict=True) if key is not None}
    if isinstance(node, ast.Slice):
        return slice(*(None if one is None else of(one) for one in (node.lower, node.upper, node.step)))
    if isinstance(node, ast.Subscript):
        owner = of(node.value)
        if isinstance(owner, _SUBSCRIPTED):
            return _safely(operator.getitem, owner, of(node.slice))
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return _safely(_OPERATORS[type(node.op)], of(node.left), of(node.right))
    if isinstance(node, ast.UnaryOp) and type(node.op) in _OPERATORS:
        return _safely(_OPERATORS[type(node.op)], of(node.operand))
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in _OPERATORS:
        return _safely(_OPERATORS[type(node.ops[0])], of(node.left), of(node.comparators[0]))
    if isinstance(node, ast.Call) and not any(isinstance(one, ast.Starred) for one in node.args):
        function = of(node.func)
        if may_run(function):
            kwargs = {one.arg: of(one.value) for one in node.keywords if one.arg is not None}
            return _safely(_callable(function), *map(of, node.args), **kwargs)
    raise Unknown(ast.dump(node)[:80])


def _attribute(owner: Any, name: str) -> Any:
    if isinstance(owner, torch.Tensor | ModuleType | tuple | torch.optim.Optimizer):
        return _safely(getattr, owner, name)
    own = dict(attributes(owner))
    if name in own:
        return own[name]
    found = vars(owner).get(name) if isinstance(owner, type) else None
    for cls in (owner if isinstance(owner, type) else type(owner)).__mro__ if found is None else ():
        found = vars(cls).get(name, found) if found is None else found
    if callable(found) and (isinstance(found, BuiltinFunctionType) or hasattr(found, "__code__")):
        return _safely(getattr, owner, name)
    if isinstance(owner, str | int | float | list | dict):
        return _safely(getattr, owner, name)
    raise Unknown(name)


def _safely(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    try:
        return function(*args, **kwargs)
    except Exception as error:
        raise Unknown(str(error)) from error
