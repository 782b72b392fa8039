"""The blocks of a model that may be recomputed or offloaded, and where they ran."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from anybatch.errors import BatchError
from anybatch.levers.lazylogits import LazyLogits
from anybatch.tensors.graph import in_backward, is_transformed
from anybatch.tensors.meter import Allocation, Recording
from anybatch.tensors.modules import is_scripted
from anybatch.tensors.trees import leaves

_CONTAINERS = (torch.nn.Sequential, torch.nn.ModuleList, torch.nn.ModuleDict)


def blocks_of(model: torch.nn.Module, named: Sequence[str] = ()) -> list[str]:
    """Finds the blocks that a model is made of: the children of its lists and sequences, on the outermost level.

    A model without lists gives its own children.

    Args:
        model: any.
        named: modules that the user names; they are blocks as a whole, and nothing in them is.

    Returns:
        Qualified names, none within another.

    Raises:
        BatchError: the user named something that is not there.

    Example:
        >>> layers = torch.nn.ModuleList([torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)])
        >>> blocks_of(torch.nn.ModuleDict({"layers": layers, "head": torch.nn.Linear(2, 2)}))
        ['layers.0', 'layers.1', 'head']
    """
    if is_scripted(model):
        return []
    known = dict(model.named_modules(remove_duplicate=False))
    for name in named:
        if name not in known or not name:
            near = ", ".join(list(known)[1:6])
            raise BatchError(f"blocks names {name!r}, which the model has not; expected names such as {near}")
    found: list[str] = []
    _descend(model, "", set(named), found)
    return found or [name for name, child in model.named_children() if not is_scripted(child)]


def _descend(module: torch.nn.Module, name: str, named: set[str], found: list[str]) -> None:
    if is_scripted(module):  # its forward is none of Python's
        return
    for key, child in module._modules.items():
        path = f"{name}.{key}" if name else key
        if child is None or is_scripted(child):
            continue
        if path in named or (isinstance(module, _CONTAINERS) and not _is_nest(child)):
            found.append(path)
        else:
            _descend(child, path, named, found)


def _is_nest(module: torch.nn.Module) -> bool:
    """Whether a child of a list is itself no block but holds some: a list, or a stage of modules made of others."""
    if not isinstance(module, _CONTAINERS) or len(module) < 2:
        return False
    return type(module) is not torch.nn.Sequential or any(True for child in module for _ in child.children())


@dataclass
class Span:
    """One run of a block's forward.

    Args:
        name: of the block.
        enter: how many operations had run before it.
        leave: how many operations had run after it.
        inputs: what it was given.
        outputs: what it gave.
    """

    name: str
    enter: int
    leave: int = 0
    inputs: list[Allocation] = field(default_factory=list)
    outputs: list[Allocation] = field(default_factory=list)


@contextmanager
def spans_noted(model: torch.nn.Module, names: Sequence[str], recording: Recording) -> Iterator[list[Span]]:
    """Notes where the forwards of blocks begin and end, but for those in which no lever is of use.

    Args:
        model: has the blocks.
        names: of the blocks.
        recording: is entered around the runs.

    Returns:
        A context whose value fills with the runs, in the order in which they ended.
    """
    found: list[Span] = []
    running: list[Span] = []

    def before(name: str, args: Any, kwargs: Any) -> None:
        if not in_backward() and not is_transformed():
            span = Span(name, recording.now)
            span.inputs = _allocations(recording, (args, kwargs))
            running.append(span)

    def after(name: str, output: Any) -> None:
        if not in_backward() and not is_transformed() and running and running[-1].name == name:
            span = running.pop()
            span.leave = recording.now
            span.outputs = _allocations(recording, output)
            found.append(span)

    handles = []
    for name in names:
        module = model.get_submodule(name)
        handles.append(
            module.register_forward_pre_hook(lambda _, args, kwargs, n=name: before(n, args, kwargs), with_kwargs=True)
        )
        handles.append(module.register_forward_hook(lambda _, args, output, n=name: after(n, output)))
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def _allocations(recording: Recording, value: Any) -> list[Allocation]:
    """Of the tensors in it; logits that are not computed stay so, of which a loss in chunks never has all."""
    return recording.allocations_of(leaf for _, _, leaf in leaves(value) if not isinstance(leaf, LazyLogits))


def runs_of(model: torch.nn.Module, names: Sequence[str]) -> dict[str, tuple[str, int]]:
    """Says which blocks are children of a ``Sequential``, where several in a row can be recomputed as one.

    Args:
        model: any.
        names: of its blocks.

    Returns:
        For each such block the name of its sequence and its position there.

    Example:
        >>> runs_of(torch.nn.Sequential(torch.nn.ReLU(), torch.nn.ReLU()), ["0", "1"])
        {'0': ('', 0), '1': ('', 1)}
    """
    found = {}
    for name in names:
        home, _, key = name.rpartition(".")
        parent = model.get_submodule(home)
        if type(parent) is torch.nn.Sequential:
            found[name] = (home, list(parent._modules).index(key))
    return found
