"""What a loss function reaches beside its arguments: what it is bound to, its closure, and the globals it reads."""

import contextlib
import functools
import inspect
import types
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import torch

from anybatch.tensors.sideeffects import INTERNALS, defaults_of, names_in

_DEPTH = 4
_MOST = 16  # of what a container holds
_FOREIGN = ("torch", "numpy", "builtins", "functools", "typing", "collections")


Named = Sequence[tuple[str, Any]]


def reached_by(loss_fn: Any) -> Named:
    """Everything that a loss function reaches, by how it is written in code next to the loss."""
    return [*_walk(loss_fn, "loss_fn", _DEPTH, set())]


def modules_of(model: Any, loss_fn: Any, of_loss: Named | None = None) -> dict[str, torch.nn.Module]:
    """The modules that a model and a loss function reach, without the submodules of others.

    Returns:
        The modules by how they are written in code next to the loss; the model has the empty name.
    """
    found: dict[str, torch.nn.Module] = {}
    inside: set[int] = set()
    of_loss = reached_by(loss_fn) if of_loss is None else of_loss
    for inner, value in (*_walk(model, "", _DEPTH, set()), *of_loss):
        if isinstance(value, torch.nn.Module) and id(value) not in inside:
            found[inner] = value
            inside.update(id(module) for module in value.modules())
    return found


def parameters_of(modules: Mapping[str, torch.nn.Module]) -> dict[str, torch.nn.Parameter]:
    """The parameters of some modules, by how they are written in code where these are written so."""
    return {f"{home}.{name}".strip("."): one for home, own in modules.items() for name, one in own.named_parameters()}


def optimized_by(loss_fn: Any) -> set[int]:
    """The parameters of the optimizers that a loss function reaches, by their ``id``."""
    return {
        id(one)
        for optimizer in _optimizers(reached_by(loss_fn))
        for group in optimizer.param_groups
        for one in group["params"]
    }


def _optimizers(of_loss: Named) -> list[torch.optim.Optimizer]:
    return [one for _, one in of_loss if isinstance(one, torch.optim.Optimizer)]


@contextlib.contextmanager
def own_optimizers_put_back(model: Any, of_loss: Named) -> Iterator[None]:
    """Puts back the state of the optimizers by which a loss trains nets of its own, none of the model's parameters."""
    own = {id(one) for one in model.parameters()} if isinstance(model, torch.nn.Module) else set()
    every = {id(one): one for one in _optimizers(of_loss)}.values()
    found = [one for one in every if own.isdisjoint(id(p) for g in one.param_groups for p in g["params"])]
    before = [{key: _copied(one) for key, one in each.state.items()} for each in found]
    try:
        yield
    finally:
        for optimizer, state in zip(found, before, strict=True):
            optimizer.state.clear()
            optimizer.state.update(state)


def _copied(state: Any) -> Any:
    if not isinstance(state, dict):
        return state
    return {name: one.detach().clone() if isinstance(one, torch.Tensor) else one for name, one in state.items()}


def tensors_of(loss_fn: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors that a loss function reaches, such as class weights; not the parameters.

    Example:
        >>> criterion = torch.nn.CrossEntropyLoss(weight=torch.ones(3))
        >>> [name for name, _ in tensors_of(lambda model, batch: criterion(model(batch[0]), batch[1]))]
        ['criterion.weight']
    """
    for name, value in reached_by(loss_fn):
        if isinstance(value, torch.nn.Module):
            yield from ((f"{name}.{inner}", buffer) for inner, buffer in value.named_buffers())
        elif isinstance(value, torch.Tensor) and not isinstance(value, torch.nn.Parameter):
            yield name, value


def _walk(value: Any, name: str, depth: int, seen: set[int]) -> Iterator[tuple[str, Any]]:
    if id(value) in seen:
        return
    seen.add(id(value))
    yield name, value
    if depth == 0 or isinstance(value, (torch.Tensor, type, types.ModuleType)):
        return
    for inner, held in _held(value, name):
        yield from _walk(held, inner, depth - 1, seen)


def _held(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, torch.nn.Module):  # a teacher in a list is none of its parameters
        for path, module in value.named_modules(prefix=name):
            for key, held in vars(module).items():
                if key not in INTERNALS and isinstance(held, (list, tuple, dict, torch.nn.Module)):
                    yield f"{path}.{key}".strip("."), held
    elif isinstance(value, functools.partial):
        yield name, value.func
        yield from ((f"{name}.args[{position}]", held) for position, held in enumerate(value.args))
        yield from value.keywords.items()
    elif inspect.ismethod(value):
        yield "self", value.__self__
        yield from _held(value.__func__, name)
    elif inspect.isfunction(value):
        if _is_foreign(value.__module__):
            return
        yield from (*variables_of(value).items(), *defaults_of(value))
    elif isinstance(value, dict):
        yield from ((f"{name}[{key!r}]", held) for key, held in islice(value.items(), _MOST))
    elif isinstance(value, (list, tuple)):
        yield from ((f"{name}[{position}]", held) for position, held in enumerate(value[:_MOST]))
    elif not inspect.isroutine(value) and not _is_foreign(type(value).__module__):
        yield from ((f"{name}.{inner}", held) for inner, held in getattr(value, "__dict__", {}).items())
        if callable(value):
            yield from _held(type(value).__call__, name)


def _is_foreign(module: str | None) -> bool:
    return (module or "").partition(".")[0] in _FOREIGN


def variables_of(function: types.FunctionType) -> dict[str, Any]:
    """What a function reads outside of itself, by name: the variables around it, and globals."""
    code, around, found = function.__code__, function.__globals__, dict[str, Any]()
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):  # in each step, so without calls
        if not is_empty(cell):
            found[name] = cell.cell_contents
    for name in names_in(code):
        if name in around:
            found.setdefault(name, around[name])
    return found


def is_empty(cell: types.CellType) -> bool:
    """Whether a variable of a closure has no value so far."""
    try:
        return cell.cell_contents is cell
    except ValueError:
        return True
