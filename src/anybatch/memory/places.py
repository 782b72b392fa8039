"""Parts of a model by name: a module, or some consecutive children of a Sequential."""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from anybatch.errors import BatchError
from anybatch.memory.handles import Layer, put_on, put_on_run, spans_of
from anybatch.tensors.modules import modules_of

_RUN = re.compile(r"(?:(?P<parent>.+)\.)?(?P<start>\d+):(?P<stop>\d+)")


@dataclass(frozen=True)
class Place:
    """A part of a model that a layer can be put around.

    Args:
        name: as it was given.
        module: the module, or the Sequential that has the run.
        span: the first child and the one behind the last, or ``None`` for the module itself.
    """

    name: str
    module: torch.nn.Module
    span: tuple[int, int] | None = None

    def modules(self) -> list[torch.nn.Module]:
        """All modules in the part."""
        if self.span is None:
            return modules_of(self.module)
        return modules_of(*list(self.module._modules.values())[slice(*self.span)])

    def put_on(self, layer: Layer, rank: int) -> Callable[[], None]:
        """Puts a layer around the forward; gives what takes it off."""
        if self.span is None:
            return put_on(self.module, layer, rank)
        return put_on_run(self.module, self.span, layer, rank)


def places_of(model: torch.nn.Module, names: Iterable[str]) -> list[Place]:
    """Finds parts of a model.

    Args:
        model: the model.
        names: dotted names such as ``"encoder.layers.3"``, or runs of children of a Sequential: ``"net.2:5"`` are its
            children 2, 3 and 4, and ``"2:5"`` those of a model that is the Sequential itself.

    Returns:
        The parts in the order of the names; a module that has several names is there once.

    Raises:
        BatchError: a name is unknown, or names what can't be called.

    Example:
        >>> net = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU(), torch.nn.Linear(2, 2))
        >>> [place.span for place in places_of(net, ["0", "1:3"])]
        [None, (1, 3)]
    """
    if isinstance(names, str):
        raise BatchError(f"the names of the blocks are the text {names!r}; expected a sequence of names: [{names!r}]")
    found: dict[Any, Place] = {}
    for name in names:
        place = _place(model, name)
        found.setdefault((id(place.module), place.span), place)
    _check_runs(list(found.values()))
    return list(found.values())


def _place(model: torch.nn.Module, name: str) -> Place:
    if not isinstance(name, str):
        raise BatchError(f"the name of a block is a {type(name).__name__}; expected a text such as 'encoder.layers.3'")
    run = _RUN.fullmatch(name)
    if run is None:
        module = _module(model, name)
        if isinstance(module, torch.jit.ScriptModule):
            raise BatchError(f"{name!r} is a ScriptModule, whose forward can't be replaced; expected a plain module")
        if type(module).forward is torch.nn.Module.forward and "forward" not in module.__dict__:
            inside = [f"{name}.{child}" for child in list(module._modules)[:5]]
            raise BatchError(
                f"{name!r} is a {type(module).__name__}, which has no forward; expected modules that are called, such "
                f"as {inside}"
            )
        return Place(name, module)
    parent, start, stop = run["parent"] or "", int(run["start"]), int(run["stop"])
    sequential = _module(model, parent)
    if not _is_plain_sequential(sequential):
        raise BatchError(
            f"{name!r} is a run of children of a {type(sequential).__name__}; expected a torch.nn.Sequential with its "
            "own forward. Name the children one by one"
        )
    if not 0 <= start < stop <= len(sequential._modules):
        raise BatchError(f"{name!r} is no run of the {len(sequential._modules)} children there; expected start:stop")
    return Place(name, sequential, (start, stop))


def _module(model: torch.nn.Module, name: str) -> torch.nn.Module:
    module: Any = model
    walked: list[str] = []
    for part in name.split(".") if name else ():
        children = getattr(module, "_modules", {})
        if children.get(part) is None:
            where = ".".join(walked) or "the model"
            raise BatchError(f"{where} has no module {part!r} (of {name!r}); it has {list(children)[:20]}")
        walked.append(part)
        module = children[part]
    found: torch.nn.Module = module
    return found


def _is_plain_sequential(module: torch.nn.Module) -> bool:
    if not isinstance(module, torch.nn.Sequential) or type(module).forward is not torch.nn.Sequential.forward:
        return False
    return "forward" not in module.__dict__ or hasattr(module.__dict__["forward"], "layers")


def _check_runs(places: list[Place]) -> None:
    """Runs of one Sequential are either the same or apart, those of other handles included."""
    for place in places:
        if place.span is None:
            continue
        others = [other.span for other in places if other.module is place.module and other.span is not None]
        for start, stop in [*others, *spans_of(place.module)]:
            if (start, stop) != place.span and start < place.span[1] and place.span[0] < stop:
                raise BatchError(
                    f"the run {place.name!r} overlaps with the run {start}:{stop} of the same Sequential; expected "
                    "runs that are apart"
                )
