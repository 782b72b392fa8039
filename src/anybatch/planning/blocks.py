"""The blocks of a model: which may be recomputed or offloaded, where they ran, and what each keeps between."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from anybatch.batch.trees import leaves
from anybatch.memory.losschunks import LazyLogits
from anybatch.memory.meter import Allocation, Recording
from anybatch.memory.places import has_forward
from anybatch.records.memory import PARAMETERS
from anybatch.tensors.graph import in_backward, is_transformed
from anybatch.tensors.modules import is_scripted

_CONTAINERS = (torch.nn.Sequential, torch.nn.ModuleList, torch.nn.ModuleDict)


def blocks_of(model: torch.nn.Module, named: Sequence[str] = ()) -> list[str]:
    """Finds the blocks that a model is made of: the children of its lists and sequences, on the outermost level.

    A model without lists gives its own children.

    Example:
        >>> layers = torch.nn.ModuleList([torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)])
        >>> blocks_of(torch.nn.ModuleDict({"layers": layers, "head": torch.nn.Linear(2, 2)}))
        ['layers.0', 'layers.1', 'head']
    """
    if is_scripted(model):
        return []
    known = dict(model.named_modules(remove_duplicate=False))
    found: list[str] = []
    _descend(model, "", set(named), found)
    found = found or [name for name, child in model.named_children() if not is_scripted(child)]
    return [name for name in found if has_forward(known[name])]


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
    """One run of a block's forward."""

    name: str  # of the block
    enter: int  # how many operations had run before it
    leave: int = 0  # how many operations had run after it
    inputs: list[Allocation] = field(default_factory=list)  # what it was given
    outputs: list[Allocation] = field(default_factory=list)  # what it gave


@contextmanager
def forwards_seen(
    model: torch.nn.Module, names: Sequence[str], before: Callable[[str, Any], None], after: Callable[[str, Any], None]
) -> Iterator[None]:
    """Calls functions before and after forwards of blocks, with what goes in and out; not of those in a backward."""

    def seen(function: Callable[[str, Any], None], name: str, value: Any) -> None:
        if not in_backward():
            function(name, value)

    handles = []
    for name in names:
        module = model.get_submodule(name)
        handles += [
            module.register_forward_pre_hook(lambda _, *given, n=name: seen(before, n, given), with_kwargs=True),
            module.register_forward_hook(lambda _, args, output, n=name: seen(after, n, output)),
        ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def spans_noted(model: torch.nn.Module, names: Sequence[str], recording: Recording) -> Iterator[list[Span]]:
    """Notes where the forwards of blocks begin and end, in the order in which they ended.

    Those in which no memory optimization is of use are left out.
    """
    found: list[Span] = []
    running: list[Span] = []

    def before(name: str, given: Any) -> None:
        if not is_transformed():
            running.append(Span(name, recording.now, inputs=_allocations(recording, given)))

    def after(name: str, output: Any) -> None:
        if not is_transformed() and running and running[-1].name == name:
            span = running.pop()
            span.leave, span.outputs = recording.now, _allocations(recording, output)
            found.append(span)

    with forwards_seen(model, names, before, after):
        yield found


def _allocations(recording: Recording, value: Any) -> list[Allocation]:
    """Of the tensors in it; logits that are not computed stay so, of which a loss in chunks never has all."""
    return recording.allocations_of(leaf for _, _, leaf in leaves(value) if not isinstance(leaf, LazyLogits))


def runs_of(model: torch.nn.Module, names: Sequence[str]) -> dict[str, tuple[str, int]]:
    """The blocks that are children of a ``Sequential``, by name: that of the sequence, and the position there.

    Several of them in a row can be recomputed as one.

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


@dataclass(eq=False)
class Link:
    """A block on its way forward and back: positions of operations, and numbers of allocations."""

    name: str  # of the block
    enter: int  # how many operations had run before its forward
    leave: int  # how many operations had run after it
    back: int  # the first operation of its backward
    inputs: list[int]  # what it was given
    outputs: set[int]  # what it gave
    in_order: bool = True  # whether its backward begins after that of all blocks behind it has begun
    saved: list[int] = field(default_factory=list)  # what it made and keeps for its backward
    repeats: bool = False  # whether the block ran before, too


def chain_of(spans: Sequence[Span], allocations: Sequence[Allocation], stop: int) -> list[Link]:
    """The blocks in the order in which they ran; the backward begins them in the reverse order.

    A block that ran several times, as in a loss that calls its model twice, stands where it ran last. What it made in
    the runs before is added there: it is alive then, and gone only after it.
    """
    links: list[Link] = []
    earlier: dict[str, list[Link]] = {}
    last = {span.name: span for span in spans}
    index = {id(allocation): number for number, allocation in enumerate(allocations)}
    for span in spans:
        runs = links if last[span.name] is span else earlier.setdefault(span.name, [])
        if runs and span.enter < runs[-1].leave:
            continue
        inputs, outputs = ([index[id(a)] for a in some if id(a) in index] for some in (span.inputs, span.outputs))
        runs.append(Link(span.name, span.enter, span.leave, stop, inputs, set(outputs)))
    for link in itertools.chain(links, *earlier.values()):
        for number, a in enumerate(allocations):
            if a.born >= link.leave:
                break
            lives_on = a.died is not None and a.died > link.leave
            if link.enter <= a.born and lives_on and a.back is not None:
                link.saved.append(number)
        backs = [back for number in link.saved if (back := allocations[number].back) is not None]
        link.back = min(backs, default=-1)
    for number, link in reversed(list(enumerate(links))):
        after = links[number + 1].back if number + 1 < len(links) else link.leave
        link.in_order = link.back >= after
        link.back = max(link.back, after)
    for link in links:
        for run in earlier.get(link.name, ()):
            link.repeats = True
            link.saved += run.saved
            link.inputs += run.inputs
            link.outputs |= run.outputs
    return links


def freed_by(links: Sequence[Link], allocations: Sequence[Allocation], sizes: Sequence[int]) -> tuple[int, int]:
    """The bytes that a recomputed run frees, and those of its inputs that it keeps alive for it."""
    first, last = links[0], links[-1]
    inside = {number for link in links for number in link.saved} - last.outputs
    freed = sum(sizes[i] for i in inside if (died := allocations[i].died) is not None and died > last.leave)
    kept = 0
    for number in set(first.inputs):
        allocation = allocations[number]
        if allocation.category != PARAMETERS and allocation.died is not None and allocation.died < last.back:
            kept += sizes[number]
    return freed, kept


def bounds_of(chain: Sequence[Link], live: Sequence[int], around: int) -> tuple[list[int], list[int]]:
    """The most bytes alive while each block goes forward, and in the loss; and while each goes backward."""

    def most(begin: int, end: int) -> int:
        return around + (max(live[begin:end]) if end > begin else live[max(begin - 1, 0)])

    leaves = [0, *(link.leave for link in chain)]
    forward = [most(leaves[k], leaves[k + 1]) for k in range(len(chain))]
    forward.append(most(leaves[-1], chain[-1].back if chain else len(live)))
    backs = [len(live), *(link.back for link in chain)]
    backward = [most(backs[k + 1], backs[k]) for k in range(len(chain))]
    return forward, backward
