"""What a module holds: its modules and parameters, registered or in plain lists and dictionaries."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from anybatch.doctor.containers import entries_of
from anybatch.torch_private import stands_in

_MOST_ENTRIES = 1000  # of a plain list or dictionary that are looked at
_DEEPEST = 3  # containers within containers


class Held(NamedTuple):
    """A module inside of a root."""

    name: str  # qualified, as ``layers[0]`` for what lies in a plain list
    module: torch.nn.Module
    registered: bool  # whether ``named_modules()`` has it


def held_by(root: torch.nn.Module) -> Iterator[Held]:
    """All modules of a root, the root first, each once."""
    waiting = [Held("", root, True)]
    seen = {id(module) for module in root.modules()}
    given: set[int] = set()
    while waiting:
        held = waiting.pop()
        if id(held.module) in given:
            continue
        given.add(id(held.module))
        yield held
        front = f"{held.name}." if held.name else ""
        inside = [
            Held(front + name, child, held.registered)
            for name, child in held.module._modules.items()
            if child is not None
        ]
        for name, child in _plainly_held(held.module):
            if id(child) not in seen:
                seen.add(id(child))
                inside.append(Held(front + name, child, False))
        waiting.extend(reversed(inside))


def parameters_in(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor, bool]]:
    """The parameters of a module itself: names, tensors, and whether they are registered.

    What ``functional_call`` has put in their place within ``vmap`` or ``grad`` is none of the module's own.
    """
    own = set()
    for name, parameter in module._parameters.items():
        if parameter is not None and not stands_in(parameter):
            own.add(id(parameter))
            yield name, parameter, True
    for name, value in list(vars(module).items()):
        if name not in _TORCHS_OWN and type(value) not in _PLAIN:
            for place, tensor in _inside(name, value, torch.Tensor, 0):
                if id(tensor) not in own and tensor.is_leaf and tensor.requires_grad and not stands_in(tensor):
                    own.add(id(tensor))
                    yield place, tensor, False


_PLAIN = (int, float, bool, str, type(None), bytes, complex)
_TORCHS_OWN = frozenset(vars(torch.nn.Module())) - {"training"}


def _plainly_held(module: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    for name, value in list(vars(module).items()):
        if name not in _TORCHS_OWN and type(value) not in _PLAIN:
            yield from _inside(name, value, torch.nn.Module, 0)


def _inside(name: str, value: Any, cls: type, depth: int) -> Iterator[tuple[str, Any]]:
    if isinstance(value, cls):
        yield name, value
    elif depth < _DEEPEST:
        entries = list(enumerate(set.__iter__(value))) if isinstance(value, set) else entries_of(value)
        for key, entry in entries if len(entries) <= _MOST_ENTRIES else ():
            if type(entry) not in _PLAIN:
                yield from _inside(f"{name}[{key!r}]", entry, cls, depth + 1)
