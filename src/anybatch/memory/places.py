"""Parts of a model by name, and what is put around their forwards for a while.

A part is a module, or some consecutive children of a Sequential. Layers are taken off in the reverse of the order in
which they were put on.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from anybatch.errors import BatchError
from anybatch.tensors.modules import modules_of

Layer = Callable[..., Any]
"""Is called with the forward that it lies around and the arguments of the call."""

_RUN = re.compile(r"(?:(?P<parent>.+)\.)?(?P<start>\d+):(?P<stop>\d+)")


class Handle(ExitStack):
    """Takes off what was put on; ``remove()`` may be called more than once. Also a context manager.

    Example:
        >>> with Handle([lambda: print("off")]) as handle:
        ...     print("on")
        on
        off
        >>> handle.remove()
    """

    def __init__(self, undo: Iterable[Callable[[], None]] = ()) -> None:
        super().__init__()
        for one in undo:
            self.callback(one)

    def remove(self) -> None:
        """Takes everything off that is still on."""
        self.close()


class Layered:
    """A forward with a layer around it, ``None`` once it was taken off: who kept this calls the forward itself then."""

    __slots__ = ("__wrapped__", "layer")

    def __init__(self, forward: Callable[..., Any], layer: Layer) -> None:
        self.__wrapped__, self.layer = forward, layer

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the layer."""
        layer: Layer | None = self.layer
        return self.__wrapped__(*args, **kwargs) if layer is None else layer(self.__wrapped__, *args, **kwargs)


def put_on(module: torch.nn.Module, layer: Layer) -> Callable[[], None]:
    """Puts a layer around the forward of a module, and gives what takes it off.

    The module keeps its class, its hooks, its parameters and the keys of its state: it has an attribute ``forward`` of
    its own as long as there is a layer. What was there as such an attribute is called inside, and put back.
    """
    # Into the dictionary itself: setting an attribute of a module takes longer and looks for parameters.
    attributes = module.__dict__
    replaced, mine = attributes.get("forward"), Layered(module.forward, layer)
    attributes["forward"] = mine

    def take_off() -> None:
        mine.layer = None  # type: ignore[assignment]  # another's forward may lie over this one
        if attributes.get("forward") is not mine:
            return
        if replaced is None:
            del attributes["forward"]
        else:
            attributes["forward"] = replaced

    return take_off


class _Runs:
    """A layer in place of the forward of a Sequential, some runs of whose children have layers."""

    def __init__(self, sequential: torch.nn.Module) -> None:
        self.runs: dict[tuple[int, int], Callable[..., Any]] = {}
        self._sequential = sequential

    def __call__(self, _: Callable[..., Any], /, input: Any) -> Any:
        children = list(self._sequential._modules.values())
        at = 0
        for (start, stop), run in sorted(self.runs.items(), key=lambda entry: entry[0]):
            input = run(_through(children[at:start], input))
            at = stop
        return _through(children[at:], input)


def _through(children: Sequence[Any], input: Any) -> Any:
    for child in children:
        input = child(input)
    return input


def _runs_of(sequential: torch.nn.Module) -> _Runs | None:
    forward = sequential.__dict__.get("forward")
    while isinstance(forward, Layered):
        if isinstance(forward.layer, _Runs):
            return forward.layer
        forward = forward.__wrapped__
    return None


def _put_innermost(sequential: torch.nn.Module, runs: _Runs) -> Callable[[], None]:
    """Puts the runs within the layers of the Sequential itself, which they call no further."""
    last = sequential.__dict__.get("forward")
    if not isinstance(last, Layered):
        return put_on(sequential, runs)
    while isinstance(last.__wrapped__, Layered):
        last = last.__wrapped__
    own = last.__wrapped__
    last.__wrapped__ = Layered(own, runs)
    return partial(setattr, last, "__wrapped__", own)


def _put_on_run(sequential: torch.nn.Module, span: tuple[int, int], layer: Layer) -> Callable[[], None]:
    """Puts a layer around some consecutive children of a Sequential that has its own forward."""
    runs, off = _runs_of(sequential), None
    if runs is None:
        runs = _Runs(sequential)
        off = _put_innermost(sequential, runs)
    before = runs.runs.get(span)
    inner = before or partial(_through, list(sequential._modules.values())[slice(*span)])
    runs.runs[span] = partial(layer, inner)

    def take_off() -> None:
        if before is None:
            del runs.runs[span]
        else:
            runs.runs[span] = before
        if off is not None:
            off()

    return take_off


@dataclass(frozen=True)
class Place:
    """A part of a model that a layer can be put around."""

    name: str  # as it was given
    module: torch.nn.Module  # the module, or the Sequential that has the run
    # the first child and the one behind the last, or ``None`` for the module itself
    span: tuple[int, int] | None = None

    def modules(self) -> list[torch.nn.Module]:
        """All modules in the part."""
        if self.span is None:
            return modules_of(self.module)
        return modules_of(*list(self.module._modules.values())[slice(*self.span)])

    def put_on(self, layer: Layer) -> Callable[[], None]:
        """Puts a layer around the forward; gives what takes it off."""
        return put_on(self.module, layer) if self.span is None else _put_on_run(self.module, self.span, layer)


def places_of(model: torch.nn.Module, names: Iterable[str]) -> list[Place]:
    """Finds parts of a model.

    Args:
        names: dotted names such as ``"encoder.layers.3"``, or runs of children of a Sequential: ``"net.2:5"`` are its
            children 2, 3 and 4, and ``"2:5"`` those of a model that is the Sequential itself.

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
        raise BatchError(
            f"the name of a block is a {type(name).__name__}; expected a string such as 'encoder.layers.3'"
        )
    run = _RUN.fullmatch(name)
    if run is None:
        module = _module(model, name)
        if isinstance(module, torch.jit.ScriptModule):
            raise BatchError(f"{name!r} is a ScriptModule, whose forward can't be replaced; expected a plain module")
        if not has_forward(module):
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


def has_forward(module: torch.nn.Module) -> bool:
    """Whether a module can be called, as a list of parameters can't."""
    return type(module).forward is not torch.nn.Module.forward or "forward" in module.__dict__


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
    return "forward" not in module.__dict__ or isinstance(module.__dict__["forward"], Layered)


def _check_runs(places: list[Place]) -> None:
    """Runs of one Sequential are either the same or apart, those of other handles included."""
    for place in places:
        if place.span is None:
            continue
        others = [other.span for other in places if other.module is place.module and other.span is not None]
        runs = _runs_of(place.module)
        for start, stop in [*others, *(() if runs is None else runs.runs)]:
            if (start, stop) != place.span and start < place.span[1] and place.span[0] < stop:
                raise BatchError(
                    f"the run {place.name!r} overlaps with the run {start}:{stop} of the same Sequential; expected "
                    "runs that are apart"
                )
